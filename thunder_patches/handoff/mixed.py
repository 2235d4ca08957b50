"""Precision by importance: which parts of the keys and values get 8 bits, which 4, and which stay exact.

What matters is known only to attention weights, which no server keeps. What is there are the keys and
values themselves, and from them alone comes the choice here:

* The first tokens draw attention whatever they say, and the last ones are what is being talked about:
  they stay exact.
* The rest is cut into units, 64 tokens of one head's keys or values. What 4 bits would do to a unit is
  not guessed but tried: an error in keys counts by what it does to a logit, with the head's own keys
  standing in for the queries that will come; one in values counts relative to the head's values.
* Units with the largest gain from 8 bits get them, until the bits allowed for are used up.

Groups are those of `codec.integers` (after KIVI, arXiv 2402.02750): 64 tokens of one channel for keys,
64 channels of one token for values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thunder_patches.cache.record import DTYPE_BYTES, Buffer, Header, TensorSpec, flat
from thunder_patches.codec.base import CodecError, Coded, Refused, take
from thunder_patches.codec.numbers import bf16_down, bf16_up, from_bf16, from_float32, to_float32
from thunder_patches.codec.planes import join_parts, split_parts

UNIT = 64
SINKS = 4
WINDOW = 64
BITS = 6.0
"""Bits for each key or value on average, steps and exact tokens included, before entropy coding."""
KEY_WEIGHT = 1.0
"""How much a squared error of a logit counts against a relative squared error of a value."""


@dataclass(frozen=True)
class Rows:
    """One tensor's float32 values ``[heads, tokens, dim]``, with role "k" or "v"."""

    spec: TensorSpec
    role: str
    values: np.ndarray


class Mixed:
    """The codec of one tensor, for units chosen by `choose`."""

    name: ClassVar[str] = "mixed"
    lossy: ClassVar[bool] = True

    def encode_units(self, rows: Rows, data: Buffer, eight: np.ndarray) -> Coded:
        """Args: eight: ``[heads, units]``, whether a unit gets 8 bits.

        Raises:
            Refused: values that have no such form.
        """
        heads, tokens, _ = rows.spec.shape
        units, window = split(tokens)
        whole: dict[int, list[np.ndarray]] = {8: [], 4: []}
        steps, offsets = [], []
        for head, wanted in zip(rows.values, eight, strict=True):
            lines = _lines(head[SINKS : SINKS + units * UNIT], rows.role)
            for bits, chosen in ((8, wanted), (4, ~wanted)):
                numbers, step, offset = quantise(lines[chosen], bits)
                whole[bits].append(numbers)
                steps.append(step)
                offsets.append(offset)
        four = np.concatenate([n.reshape(-1) for n in whole[4]])
        raw = np.frombuffer(flat(data), np.uint8).reshape(heads, tokens, -1)
        exact = np.concatenate([raw[:, :SINKS], raw[:, tokens - window :]], axis=1)
        parts, payload = join_parts(
            [
                exact,
                np.packbits(eight),
                np.concatenate([n.reshape(-1) for n in whole[8]]),
                four[0::2] | (four[1::2] << 4),
                np.concatenate([s.reshape(-1) for s in steps]).view(np.uint8),
                np.concatenate([o.reshape(-1) for o in offsets]).view(np.uint8),
            ]
        )
        return Coded(self.name, payload, {"parts": parts, "eights": int(eight.sum())})

    def encode(self, spec: TensorSpec, data: Buffer, header: Header) -> Coded:
        raise Refused("the units of a mixed tensor are chosen among all tensors at once")

    def decode(self, spec: TensorSpec, coded: Coded, header: Header) -> Buffer:
        role, eights = spec.name[:1], take(coded.params, "eights", int)
        if len(spec.shape) != 3 or role not in ("k", "v"):
            raise CodecError(f"{spec.name} {spec.shape} holds no keys or values")
        heads, tokens, dim = spec.shape
        if tokens < SINKS + WINDOW or not dim or not heads:
            raise CodecError(f"{spec.name}: {tokens} tokens in mixed precision")
        units, window = split(tokens)
        if not 0 <= eights <= heads * units:
            raise CodecError(f"{spec.name}: {eights} of {heads * units} units with 8 bits")
        width, count = DTYPE_BYTES[spec.dtype], UNIT * dim
        lines = count // _group(role, dim)
        sizes = [heads * (SINKS + window) * dim * width, -(-heads * units // 8)]
        sizes += [eights * count, (heads * units - eights) * count // 2]
        sizes += [heads * units * lines * 2] * 2
        exact, flags, eight, four, steps, offsets = split_parts(coded, sizes)
        wanted = np.unpackbits(flags, count=heads * units).reshape(heads, units).astype(bool)
        if wanted.sum() != eights:
            raise CodecError(f"{spec.name}: expected {eights} units, found {wanted.sum()}")
        nibbles = np.empty(four.size * 2, np.uint8)
        nibbles[0::2], nibbles[1::2] = four & 15, four >> 4
        left = {
            8: eight.reshape(eights, lines, count // lines),
            4: nibbles.reshape(heads * units - eights, lines, count // lines),
        }
        scale = from_bf16(steps.view("<u2")).reshape(heads, units, lines, 1)
        low = from_bf16(offsets.view("<u2")).reshape(heads, units, lines, 1)
        values = np.empty(spec.shape, np.float32)
        for head in range(heads):
            found = np.empty((units, lines, count // lines), np.float32)
            at = 0
            for bits, chosen in ((8, wanted[head]), (4, ~wanted[head])):
                n = int(chosen.sum())
                numbers, left[bits] = left[bits][:n], left[bits][n:]
                found[chosen] = numbers * scale[head, at : at + n] + low[head, at : at + n]
                at += n
            values[head, SINKS : SINKS + units * UNIT] = _rows(found, role, dim)
        with np.errstate(over="ignore", invalid="ignore"):
            out = np.frombuffer(from_float32(values, spec.dtype), np.uint8).copy()
        rows, kept = out.reshape(heads, tokens, -1), exact.reshape(heads, SINKS + window, -1)
        rows[:, :SINKS], rows[:, tokens - window :] = kept[:, :SINKS], kept[:, SINKS:]
        return out.data


def split(tokens: int) -> tuple[int, int]:
    """Units of a context, and the number of its last tokens that stay exact: `WINDOW` or more."""
    units = (tokens - SINKS - WINDOW) // UNIT
    return units, tokens - SINKS - units * UNIT


def choose(
    tensors: Sequence[Rows],
    bits: float = BITS,
    gains: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Which units of each tensor ``[heads, units]`` get 8 bits, by the tensor's name.

    Args:
        bits: the average to reach for all tensors together; at least 4 bits are always given.
        gains: what 8 bits are worth to each unit; by default what `gain` finds.
    """
    if gains is None:
        gains = {rows.spec.name: gain(rows) for rows in tensors}
    chosen = {name: np.zeros(found.shape, bool) for name, found in gains.items()}
    budget = sum(bits * rows.values.size - _least(rows) for rows in tensors)
    cost = {rows.spec.name: 4 * UNIT * rows.spec.shape[2] for rows in tensors}
    order = sorted(
        (
            (float(found[head, unit]) / cost[name], name, head, unit)
            for name, found in gains.items()
            for head in range(found.shape[0])
            for unit in range(found.shape[1])
        ),
        reverse=True,
    )
    for _, name, head, unit in order:
        if (budget := budget - cost[name]) < 0:
            break
        chosen[name][head, unit] = True
    return chosen


def gain(rows: Rows) -> np.ndarray:
    """By how much 8 bits instead of 4 lessen the error that each unit adds, ``[heads, units]``."""
    units, _ = split(rows.spec.shape[1])
    found = np.empty((rows.spec.shape[0], units))
    for i, head in enumerate(rows.values):
        lines = _lines(head[SINKS : SINKS + units * UNIT], rows.role)
        errors = []
        for bits in (4, 8):
            numbers, step, offset = quantise(lines, bits)
            back = numbers * from_bf16(step)[..., None] + from_bf16(offset)[..., None]
            errors.append(((back - lines) ** 2).sum(-1))
        less = errors[0] - errors[1]
        power = (head**2).mean(0)
        if rows.role == "k":
            found[i] = KEY_WEIGHT * (less * power).sum(-1) / len(power)
        else:
            found[i] = less.sum(-1) / max(float(power.sum()), 1e-30)
    return found


def quantise(lines: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whole numbers of ``[..., group]`` values, and the BF16 bits of each group's step and offset.

    Raises:
        Refused: a range too wide.
    """
    low, high = lines.min(-1), lines.max(-1)
    offset = bf16_down(low)
    with np.errstate(over="ignore"):
        step = bf16_up((high - from_bf16(offset)) / (2**bits - 1))
    scale = from_bf16(step)
    if not np.isfinite(scale).all():
        raise Refused("a range too wide for mixed precision")
    safe = np.where(scale == 0, 1, scale)[..., None]
    whole = np.rint((lines - from_bf16(offset)[..., None]) / safe)
    return whole.astype(np.uint8), step, offset


def values_of(spec: TensorSpec, role: str, data: Buffer) -> Rows:
    """A tensor's values.

    Raises:
        Refused: NaN, infinity, or too few tokens for units.
    """
    if spec.shape[1] < SINKS + WINDOW or not spec.nbytes:
        raise Refused(f"{spec.name}: {spec.shape[1]} tokens stay exact")
    values = to_float32(flat(data), spec.dtype).reshape(spec.shape)
    if not np.isfinite(values).all():
        raise Refused(f"{spec.name} holds NaN or infinity")
    return Rows(spec, role, values)


def _group(role: str, dim: int) -> int:
    if role == "k":
        return UNIT
    return UNIT if dim % UNIT == 0 else dim


def _lines(head: np.ndarray, role: str) -> np.ndarray:
    """Rows ``[units * 64, dim]`` as ``[units, lines, group]``."""
    units, dim = len(head) // UNIT, head.shape[1]
    if role == "k":
        return head.reshape(units, UNIT, dim).swapaxes(1, 2)
    group = _group(role, dim)
    return head.reshape(units, UNIT * dim // group, group)


def _rows(lines: np.ndarray, role: str, dim: int) -> np.ndarray:
    """Inverse of `_lines`."""
    if role == "k":
        lines = lines.swapaxes(1, 2)
    return lines.reshape(-1, dim)


def _least(rows: Rows) -> float:
    """Bits of a tensor whose units all have 4 bits."""
    heads, tokens, dim = rows.spec.shape
    units, window = split(tokens)
    group = _group(rows.role, dim)
    each = 4 + 32 / group
    return heads * dim * (units * UNIT * each + (SINKS + window) * 8 * DTYPE_BYTES[rows.spec.dtype])


CODEC = Mixed()
