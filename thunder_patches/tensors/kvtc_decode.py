"""The matrix half of KVTC decoding: all blocks of a restore in one batch.

On a GPU by MLX. On a CPU by numpy, whose wheels bring a fast BLAS: products by the BLAS of MLX's own Linux
wheel took 34 times as long there, and the rotation of strided halves ten times.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import mlx.core as mx
import numpy as np

from ..codec.calibration import Basis, Calibration
from ..codec.kvtc import Numbers
from ..codec.rotary import Rotary
from ..codec.symbols import ALPHABETS, TABLES, WIDEST, Alphabet, Unpacked

STRIPE = 64
"""Tokens that are rotated at once in numpy: their rows fit a core's cache."""


def decode(
    name: str, blocks: Sequence[Numbers], dtype: mx.Dtype, numpy: bool | None = None
) -> list[mx.array]:
    """Rows ``[heads, tokens, dim]`` of one row tensor for each block, sinks included.

    One product with each basis for all blocks together; the products run in float32. All blocks
    must be of one calibration. What MLX does of it is lazy: evaluate the results of all tensors with one
    ``mx.eval``.

    Args:
        numpy: whether numpy multiplies; by default where MLX's device is a CPU.
    """
    heads, dim = blocks[0].calibration.rows[name]
    counts = [block.tokens for block in blocks]
    if numpy is None:
        numpy = mx.default_device().type == mx.DeviceType.cpu
    found = mx.array(_by_numpy(name, blocks)) if numpy else _by_mlx(name, blocks)
    whole, ends = (found.transpose(1, 0, 2) if numpy else found).astype(dtype), np.cumsum(counts)
    return [
        _with_sinks(whole[:, end - n : end], block, dtype, heads, dim)
        for block, n, end in zip(blocks, counts, ends, strict=True)
    ]


def _by_numpy(name: str, blocks: Sequence[Numbers]) -> np.ndarray:
    """Float32 rows ``[tokens, heads, dim]`` of all blocks, without sinks."""
    calibration, units = blocks[0].calibration, _units(blocks)
    (heads, dim), whole = calibration.rows[name], _whole(name, blocks)
    out = np.empty((units.shape[1], heads, dim), np.float32)
    flat, first = out.reshape(-1, heads * dim), 0
    for i, basis in enumerate(calibration.bases[name]):
        used = max(block.used[i] for block in blocks)
        y = whole[first : first + used]
        y *= units[i]
        first += basis.rank
        x = flat[:, basis.first * dim : (basis.first + basis.heads) * dim]
        np.matmul(y.T, basis.decode[:used], out=x)
        x += basis.mean.reshape(-1)
    for head, heads, rotary in calibration.rotary.get(name, ()):
        cos, sin = _angles(rotary, blocks)
        for start in range(0, len(out), STRIPE):
            some = slice(start, start + STRIPE)
            _rotate_in_place(out[some, head : head + heads], rotary, cos[some], sin[some])
    return out


def _rotate_in_place(x: np.ndarray, rotary: Rotary, cos: np.ndarray, sin: np.ndarray) -> None:
    """As `Rotary.turn`, for ``[tokens, heads, dim]``."""
    pairs, cos, sin = len(rotary.rates), cos[:, None], sin[:, None]
    if rotary.interleaved:
        a, b = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    else:
        a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    turned = a * cos
    turned -= b * sin
    b *= cos
    b += a * sin
    a[...] = turned


def _by_mlx(name: str, blocks: Sequence[Numbers]) -> mx.array:
    """Float32 rows ``[heads, tokens, dim]`` of all blocks, without sinks, lazy."""
    calibration = blocks[0].calibration
    _, dim = calibration.rows[name]
    packed = [block.coded for block in blocks if isinstance(block.coded, Unpacked)]
    together = len(packed) == len(blocks)
    whole = _taken_apart(packed) if together else mx.array(_whole(name, blocks))
    units = mx.array(_units(blocks))
    pieces, first = [], 0
    for i, basis in enumerate(calibration.bases[name]):
        used = max(1, *(block.used[i] for block in blocks))
        matrix, mean = _on_device(basis)
        y = whole[first : first + used].T * units[i][:, None]
        first += basis.rank
        x = y @ matrix[:used] + mean
        pieces.append(x.reshape(-1, basis.heads, dim).transpose(1, 0, 2))
    return _turn(mx.concatenate(pieces, axis=0), calibration, name, blocks)


def _whole(name: str, blocks: Sequence[Numbers]) -> np.ndarray:
    """The numbers of all blocks, float32 ``[rows of y, tokens]``."""
    rows = sum(basis.rank for basis in blocks[0].calibration.bases[name])
    whole, at = np.zeros((rows, sum(block.tokens for block in blocks)), np.float32), 0
    for block in blocks:
        block.put(whole[:, at : at + block.tokens])
        at += block.tokens
    return whole


def _taken_apart(blocks: Sequence[Unpacked]) -> mx.array:
    """As `_whole`: what goes to the device is the packed bytes, a quarter as many, and where rows belong."""
    width = -(-max(block.length for block in blocks) // WIDEST) * WIDEST
    rows, count = [mx.zeros((1, width), mx.int8)], 1
    places = np.zeros((len(blocks[0].classes), len(blocks)), np.int32)  # in `rows`: first its zeros
    taken = [0] * len(blocks)
    for i, alphabet in enumerate(ALPHABETS[1:]):
        parts = [block.packed[i] for block in blocks]
        data = np.zeros((sum(map(len, parts)), width // alphabet.each), np.uint8)
        start = 0
        for j, (block, part) in enumerate(zip(blocks, parts, strict=True)):
            end = start + len(part)
            data[start:end, : part.shape[1]] = part
            where = block.order[taken[j] : taken[j] + len(part)]
            places[where, j] = np.arange(count + start, count + end)
            start, taken[j] = end, taken[j] + len(part)
        if len(data):
            count += len(data)
            items = mx.array(data)
            rows.append((_table(alphabet)[items] if alphabet.each > 1 else items).view(mx.int8))
    found = mx.concatenate(rows)[mx.array(places)]
    columns = [found[:, j, : block.length] for j, block in enumerate(blocks)]
    return _with_large(mx.concatenate(columns, axis=1).astype(mx.float32), blocks)


def _with_large(whole: mx.array, blocks: Sequence[Unpacked]) -> mx.array:
    """Put the numbers that don't fit their alphabet where there are zeros."""
    rows, tokens, values, at = [], [], [], 0
    for block in blocks:
        row, column, value = block.large
        rows.append(row.astype(np.int32))
        tokens.append(column.astype(np.int32) + at)
        values.append(value.astype(np.float32))
        at += block.length
    if not sum(map(len, rows)):
        return whole
    where = mx.array(np.concatenate(rows)), mx.array(np.concatenate(tokens))
    return whole.at[where].add(mx.array(np.concatenate(values)))


def _units(blocks: Sequence[Numbers]) -> np.ndarray:
    return np.concatenate([block.units() for block in blocks], axis=1)


def _angles(rotary: Rotary, blocks: Sequence[Numbers]) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines ``[tokens, pairs]``, see `Rotary.table`."""
    tables = [_rotation(rotary, block.start, block.tokens) for block in blocks]
    cos, sin = (np.concatenate(part) for part in zip(*tables, strict=True))
    return cos, sin


@lru_cache(maxsize=128)
def _rotation(rotary: Rotary, start: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    return rotary.table(start, tokens)


def _turn(x: mx.array, calibration: Calibration, name: str, blocks: Sequence[Numbers]) -> mx.array:
    runs = calibration.rotary.get(name, ())
    if not runs:
        return x
    parts, at = [], 0
    for first, heads, rotary in runs:
        parts += [x[at:first], _rotate(x[first : first + heads], rotary, blocks)]
        at = first + heads
    return mx.concatenate([part for part in [*parts, x[at:]] if part.shape[0]], axis=0)


def _rotate(x: mx.array, rotary: Rotary, blocks: Sequence[Numbers]) -> mx.array:
    """As `Rotary.turn`, for ``[heads, tokens, dim]``."""
    pairs = len(rotary.rates)
    cos, sin = (mx.array(table) for table in _angles(rotary, blocks))
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if rotary.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        both = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(turned.shape)
    else:
        a, b = turned[..., :pairs], turned[..., pairs:]
        both = mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return mx.concatenate([both, rest], axis=-1) if rest.shape[-1] else both


def _with_sinks(x: mx.array, block: Numbers, dtype: mx.Dtype, heads: int, dim: int) -> mx.array:
    sinks = memoryview(block.sinks).nbytes // (heads * dim * dtype.size)
    if not sinks:
        return x
    exact = mx.array(np.frombuffer(block.sinks, np.uint8)).view(dtype).reshape(heads, sinks, dim)
    return mx.concatenate([exact, x], axis=1)


_on_device_already: dict[int, tuple[Basis, mx.array, mx.array]] = {}


def _on_device(basis: Basis) -> tuple[mx.array, mx.array]:
    """The basis' decoding matrix and mean, made once (on the generation thread, as all here)."""
    known = _on_device_already.get(id(basis))
    if known is None or known[0] is not basis:
        known = basis, mx.array(basis.decode), mx.array(basis.mean.reshape(-1))
        _on_device_already[id(basis)] = known
        mx.eval(known[1:])
    return known[1:]


@cache
def _table(alphabet: Alphabet) -> mx.array:
    return mx.array(TABLES[alphabet])
