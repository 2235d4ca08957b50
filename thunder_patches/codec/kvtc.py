"""KVTC: keys and values as small whole numbers in a basis that was fitted to the model.

After "KV Cache Transform Coding" (arXiv 2511.01815), with these choices, all measured: keys before
RoPE; one basis for a group of layers; errors weighted by the model's own sensitivity; one step for
all coordinates, times a gain for each token, and an entropy coder that makes rare numbers expensive
and zeros nearly free (mode "steps"). The first tokens of a prompt stay exact.

Decoding has two halves: `Kvtc.unpack`, bytes to whole numbers, for any thread; and a matrix product
with the basis, here in numpy and, for all blocks of a restore at once, in `tensors.kvtc_decode`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from thunder_patches.cache.record import DTYPE_BYTES, Buffer, Header, TensorSpec, flat

from . import allocation
from .base import CodecError, Coded, Params, Refused, take
from .calibration import Calibration
from .layout import rows_of
from .numbers import from_float32, to_float32
from .planes import join_parts, split_parts
from .symbols import LARGEST, Unpacked, pack, unpack

GAIN_STEPS = 8  # gains are powers of 2 ** (1 / GAIN_STEPS)
GAIN_RANGE = (-2 * GAIN_STEPS, 3 * GAIN_STEPS)
GROUP_RATIOS = {"high": 4.4, "balanced": 8.9, "small": 18.0}  # to BF16, before DEFLATE
FINER = (1.0, 0.5)  # shares of the quality's step that are tried before giving up


@dataclass(frozen=True, slots=True)
class Numbers:
    """A tensor as whole numbers, before the matrix product.

    Args:
        sinks: the first tokens as raw bytes, ``[heads, sinks, dim]`` of the tensor's dtype.
        coded: ``[rows of y, tokens]``, the bases' rows one after another; in mode "groups" float32.
        used: per basis, how many of its rows there are up to the last that isn't all zero.
        gains: ``[bases, tokens]``, int8, see `gain_for`.
        step: what one unit is worth at gain 0.
        start: position of the first coded token.
    """

    calibration: Calibration
    sinks: Buffer
    coded: Unpacked | np.ndarray
    used: tuple[int, ...]
    gains: np.ndarray
    step: float
    start: int

    @property
    def tokens(self) -> int:
        """How many are coded."""
        return self.gains.shape[1]

    def put(self, out: np.ndarray) -> None:
        """Write the numbers to ``[rows of y, tokens]`` of zeros."""
        if isinstance(self.coded, Unpacked):
            self.coded.put(out)
        else:
            out[...] = self.coded

    def units(self) -> np.ndarray:
        """What one is worth, ``[bases, tokens]``, float32."""
        return (self.step * gain_of(self.gains)).astype(np.float32)


class Kvtc:
    """The codec for one quality; decodes what any quality and any known calibration has made.

    Args:
        lookup: a calibration by id; raises CodecError when there is none.
        calibration: the one to encode with; None refuses to encode.
        mode: "steps", or "groups" for the paper's own form (see `allocation`), which is larger.
    """

    name: ClassVar[str] = "kvtc"
    lossy: ClassVar[bool] = True

    def __init__(
        self,
        lookup: Callable[[str], Calibration],
        calibration: Calibration | None = None,
        quality: str = "balanced",
        mode: str = "steps",
    ) -> None:
        self._lookup = lookup
        self.calibration = calibration
        self._quality = quality
        self._mode = mode

    @property
    def calibrated(self) -> bool:
        """Whether it can encode."""
        return self.calibration is not None

    def encode(self, spec: TensorSpec, data: Buffer, header: Header) -> Coded:
        calibration = self.calibration
        rows = rows_of(header.layout).get(spec.name)
        if calibration is None or rows is None or not rows.attention:
            raise Refused(f"{spec.name}: no calibration, or no attention keys or values")
        if calibration.rows.get(spec.name) != (rows.heads, rows.dim):
            raise Refused(f"{spec.name} isn't as in calibration {calibration.id}")
        tokens = spec.shape[1]
        sinks = min(tokens, max(0, calibration.sinks - header.start))
        values = to_float32(flat(data), spec.dtype).reshape(spec.shape)
        if not np.isfinite(values).all():
            raise Refused(f"{spec.name} holds NaN or infinity")
        exact = _sink_bytes(spec, data, sinks)
        coded, weighted = project(calibration, spec.name, values[:, sinks:], header.start + sinks)
        if self._mode == "groups":
            params, payload, error = self._groups(calibration, spec.name, coded, weighted)
            accepted = error <= self._limit(calibration, spec.name) * (tokens - sinks)
        else:
            params, payload, accepted = self._steps(calibration, spec.name, coded, weighted)
        if not accepted:
            raise Refused(f"{spec.name}: error above the limit of quality {self._quality}")
        params |= {"calibration": calibration.id, "mode": self._mode, "sinks": sinks}
        return Coded(self.name, exact + payload, params)

    def _limit(self, calibration: Calibration, name: str) -> float:
        return calibration.limits[self._quality][name]

    def _steps(
        self,
        calibration: Calibration,
        name: str,
        coded: list[np.ndarray],
        weighted: list[float],
    ) -> tuple[Params, bytes, bool]:
        limit = self._limit(calibration, name) * len(coded[0])
        for share in FINER:
            step = calibration.steps[self._quality] * share
            numbers, gains, error = quantise(calibration, name, coded, weighted, step)
            if error <= limit:
                break
        else:
            return {}, b"", False
        parts, payload = pack(numbers)
        gain_parts, gain_payload = join_parts([gains])
        return {"step": step, "gains": gain_parts, "numbers": parts}, gain_payload + payload, True

    def _groups(
        self,
        calibration: Calibration,
        name: str,
        coded: list[np.ndarray],
        weighted: list[float],
    ) -> tuple[Params, bytes, float]:
        heads, dim = calibration.rows[name]
        budget = heads * dim * 16 / GROUP_RATIOS[self._quality]
        variances = [basis.variance for basis in calibration.bases[name]]
        groups = allocation.allocate(variances, budget)
        parts, error = [], 0.0
        for y, energy, group in zip(coded, weighted, groups, strict=True):
            more, back = allocation.quantise(y, group)
            parts += more
            error += max(0.0, energy - float(np.vdot(y, y))) + float(np.vdot(y - back, y - back))
        entries, payload = join_parts(parts, "deflate")
        return {"groups": groups, "parts": entries}, payload, error

    def unpack(self, spec: TensorSpec, coded: Coded, header: Header) -> Numbers:
        """The first half of decoding; raises CodecError."""
        params, payload = coded.params, flat(coded.data)
        calibration = self._lookup(take(params, "calibration", str))
        if len(spec.shape) != 3 or calibration.rows.get(spec.name) != spec.shape[::2]:
            raise CodecError(f"{spec.name} {spec.shape} isn't as in calibration {calibration.id}")
        heads, tokens, dim = spec.shape
        sinks, mode = take(params, "sinks", int), take(params, "mode", str)
        if not 0 <= sinks <= tokens:
            raise CodecError(f"{spec.name}: {sinks} sinks of {tokens} tokens")
        at = heads * sinks * dim * DTYPE_BYTES[spec.dtype]
        if len(payload) < at:
            raise CodecError(f"{spec.name}: the payload ends inside the sinks")
        ranks = [basis.rank for basis in calibration.bases[spec.name]]
        found: Unpacked | np.ndarray
        if mode == "steps":
            step, gains, found = _unpack_steps(params, payload[at:], ranks, tokens - sinks)
            used = _used(found.classes > 0, ranks)
        elif mode == "groups":
            step, gains = 1.0, np.zeros((len(ranks), tokens - sinks), np.int8)
            found, used = _unpack_groups(params, payload[at:], ranks, tokens - sinks), tuple(ranks)
        else:
            raise CodecError(f"{spec.name}: unknown mode {mode!r}")
        start = header.start + sinks
        return Numbers(calibration, payload[:at], found, used, gains, step, start)

    def decode(self, spec: TensorSpec, coded: Coded, header: Header) -> Buffer:
        numbers = self.unpack(spec, coded, header)
        heads, tokens, dim = spec.shape
        sinks = tokens - numbers.tokens
        values = np.empty(spec.shape, np.float32)
        values[:, :sinks] = to_float32(numbers.sinks, spec.dtype).reshape(heads, sinks, dim)
        first = 0
        coded_part = np.empty((heads, tokens - sinks, dim), np.float32)
        bases = numbers.calibration.bases[spec.name]
        whole = np.zeros((sum(basis.rank for basis in bases), numbers.tokens), np.float32)
        numbers.put(whole)
        for basis, used, unit in zip(bases, numbers.used, numbers.units(), strict=True):
            y = np.ascontiguousarray(whole[first : first + used].T) * unit[:, None]
            first += basis.rank
            x = y @ basis.decode[:used] + basis.mean.reshape(-1)
            part = slice(basis.first, basis.first + basis.heads)
            coded_part[part] = x.reshape(tokens - sinks, basis.heads, dim).transpose(1, 0, 2)
        values[:, sinks:] = numbers.calibration.turn(spec.name, coded_part, numbers.start)
        return _with_sinks(spec, from_float32(values, spec.dtype), numbers.sinks, sinks)


def project(
    calibration: Calibration, name: str, values: np.ndarray, start: int
) -> tuple[list[np.ndarray], list[float]]:
    """Rows ``[heads, tokens, dim]`` to y ``[tokens, rank]`` for each basis.

    Also the sum of squares of all weighted features, of which y keeps the largest part.
    """
    values = calibration.turn(name, values.copy(), start, inverse=True)
    coded, weighted = [], []
    for basis in calibration.bases[name]:
        x = values[basis.first : basis.first + basis.heads] - basis.mean[:, None]
        z = np.matmul(x, basis.weight).transpose(1, 0, 2).reshape(len(x[0]), basis.mean.size)
        coded.append(z @ basis.axes)
        weighted.append(float(np.vdot(z, z)))
    return coded, weighted


def quantise(
    calibration: Calibration, name: str, coded: list[np.ndarray], weighted: list[float], step: float
) -> tuple[np.ndarray, np.ndarray, float]:
    """Whole numbers ``[rows of y, tokens]``, gains ``[bases, tokens]``, weighted squared error."""
    numbers, gains, error = [], [], 0.0
    for basis, y, energy in zip(calibration.bases[name], coded, weighted, strict=True):
        kept = np.einsum("tr,tr->t", y, y)
        gain = gain_for(np.sqrt(kept), basis.size)
        unit = (step * gain_of(gain)).astype(np.float32)[:, None]
        whole = np.rint(y / unit)
        np.clip(whole, -LARGEST, LARGEST, out=whole)
        rest = y - whole * unit
        error += max(0.0, energy - float(kept.sum())) + float(np.vdot(rest, rest))
        numbers.append(whole.T.astype(np.int16))
        gains.append(gain)
    return np.concatenate(numbers), np.stack(gains), error


def gain_for(norm: np.ndarray, usual: float) -> np.ndarray:
    """The gain of tokens with this norm, int8: larger tokens bear a larger step, by the root."""
    ratio = np.maximum(norm, 1e-30) / max(usual, 1e-30)
    return np.clip(np.rint(np.log2(ratio) / 2 * GAIN_STEPS), *GAIN_RANGE).astype(np.int8)


def gain_of(gain: np.ndarray) -> np.ndarray:
    """The factor on the step that a gain stands for."""
    return np.exp2(gain.astype(np.float64) / GAIN_STEPS)


def _sink_bytes(spec: TensorSpec, data: Buffer, sinks: int) -> bytes:
    if not sinks:
        return b""
    rows = np.frombuffer(flat(data), np.uint8).reshape(*spec.shape[:2], -1)
    return rows[:, :sinks].tobytes()


def _with_sinks(spec: TensorSpec, data: memoryview, exact: Buffer, sinks: int) -> memoryview:
    """The tensor's bytes with the first tokens put back exactly."""
    if sinks:
        rows = np.frombuffer(data, np.uint8).reshape(*spec.shape[:2], -1)
        kept = np.frombuffer(exact, np.uint8).reshape(spec.shape[0], sinks, -1)
        rows = rows.copy()
        rows[:, :sinks] = kept
        return rows.reshape(-1).data
    return data


def _unpack_steps(
    params: Params, payload: memoryview, ranks: list[int], tokens: int
) -> tuple[float, np.ndarray, Unpacked]:
    step = float(take(params, "step", (int, float)))
    if not 0 < step < float("inf"):
        raise CodecError(f"expected a positive step, found {step}")
    parts = take(params, "gains", list)
    middle = sum(_stored(part) for part in parts)
    gains = split_parts(Coded("", payload[:middle], {"parts": parts}), [len(ranks) * tokens])[0]
    numbers = unpack(params.get("numbers"), payload[middle:], sum(ranks), tokens)
    signed = np.clip(gains.view(np.int8), *GAIN_RANGE).reshape(len(ranks), tokens)
    return step, signed, numbers


def _used(busy: np.ndarray, ranks: list[int]) -> tuple[int, ...]:
    """For each basis the number of rows up to its last busy one."""
    parts = np.split(busy, np.cumsum(ranks)[:-1])
    return tuple(int(np.flatnonzero(part)[-1]) + 1 if part.any() else 0 for part in parts)


def _unpack_groups(
    params: Params, payload: memoryview, ranks: list[int], tokens: int
) -> np.ndarray:
    groups = allocation.checked(params.get("groups"), ranks)
    sizes = [allocation.sizes(group, tokens) for group in groups]
    coded = Coded("", payload, {"parts": params.get("parts")})
    parts = iter(split_parts(coded, [n for group in sizes for n in group]))
    return np.concatenate(
        [
            allocation.restore([next(parts) for _ in size], group, tokens, rank)
            for group, size, rank in zip(groups, sizes, ranks, strict=True)
        ]
    )


def _stored(part: Any) -> int:
    match part:
        case [str(), int(stored)] if stored >= 0:
            return stored
    raise CodecError(f"expected [packer, bytes], found {part!r}")
