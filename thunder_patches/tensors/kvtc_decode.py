"""The matrix half of KVTC decoding: all blocks of a restore in one batch.

On a GPU by MLX. On a CPU by numpy, whose wheels bring a fast BLAS: products by the BLAS of MLX's own Linux
wheel took 34 times as long there, and the rotation of strided halves ten times.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..codec.calibration import Basis, Calibration
from ..codec.kvtc import Numbers, gain_of
from ..codec.rotary import Rotary

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
    counts = [block.values.shape[1] for block in blocks]
    if numpy is None:
        numpy = mx.default_device().type == mx.DeviceType.cpu
    found = mx.array(_by_numpy(name, blocks)) if numpy else _by_mlx(name, blocks, counts)
    whole, ends = (found.transpose(1, 0, 2) if numpy else found).astype(dtype), np.cumsum(counts)
    return [
        _with_sinks(whole[:, end - n : end], block, dtype, heads, dim)
        for block, n, end in zip(blocks, counts, ends, strict=True)
    ]


def _by_numpy(name: str, blocks: Sequence[Numbers]) -> np.ndarray:
    """Float32 rows ``[tokens, heads, dim]`` of all blocks, without sinks."""
    calibration, positions = blocks[0].calibration, _positions(blocks)
    out = np.empty((len(positions), *calibration.rows[name]), np.float32)
    flat, first = out.reshape(len(positions), -1), 0
    for i, basis in enumerate(calibration.bases[name]):
        used, at = max(block.used[i] for block in blocks), 0
        y = np.empty((used, len(positions)), np.float32)
        for block in blocks:
            values = block.values[first : first + used]
            part = y[:, at : at + values.shape[1]]
            part[...] = values
            row, column, value = block.large_in(first, used)
            part[row, column] = value
            part *= (block.step * gain_of(block.gains[i])).astype(np.float32)
            at += values.shape[1]
        first += basis.rank
        _, dim = calibration.rows[name]
        x = flat[:, basis.first * dim : (basis.first + basis.heads) * dim]
        np.matmul(y.T, basis.decode[:used], out=x)
        x += basis.mean.reshape(-1)
    for head, heads, rotary in calibration.rotary.get(name, ()):
        cos, sin = _angles(rotary, positions)
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


def _by_mlx(name: str, blocks: Sequence[Numbers], counts: Sequence[int]) -> mx.array:
    """Float32 rows ``[heads, tokens, dim]`` of all blocks, without sinks, lazy."""
    calibration = blocks[0].calibration
    _, dim = calibration.rows[name]
    pieces, first = [], 0
    for i, basis in enumerate(calibration.bases[name]):
        used = max(1, *(block.used[i] for block in blocks))
        rows = [mx.array(block.values[first : first + used]) for block in blocks]
        y = mx.concatenate(rows, axis=1).T.astype(mx.float32)
        y = _with_large(y, blocks, counts, first, used)
        first += basis.rank
        units = np.concatenate([block.step * gain_of(block.gains[i]) for block in blocks])
        y = y * mx.array(units.astype(np.float32))[:, None]
        x = y @ _matrix(basis)[:used] + mx.array(basis.mean.reshape(-1))
        pieces.append(x.reshape(-1, basis.heads, dim).transpose(1, 0, 2))
    return _turn(mx.concatenate(pieces, axis=0), calibration, name, _positions(blocks))


def _positions(blocks: Sequence[Numbers]) -> np.ndarray:
    """Of the coded tokens."""
    return np.concatenate(
        [np.arange(block.start, block.start + block.values.shape[1]) for block in blocks]
    )


def _angles(rotary: Rotary, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines ``[tokens, pairs]``, scaled, float32."""
    angle = np.outer(positions, np.array(rotary.rates, np.float64))
    cos, sin = np.cos(angle) * rotary.scale, np.sin(angle) * rotary.scale
    return cos.astype(np.float32), sin.astype(np.float32)


def _with_large(
    y: mx.array, blocks: Sequence[Numbers], counts: Sequence[int], first: int, used: int
) -> mx.array:
    """Put the numbers that int8 can't hold into y ``[tokens, rows]``, which has zeros there."""
    rows, tokens, values, at = [], [], [], 0
    for block, count in zip(blocks, counts, strict=True):
        row, column, value = block.large_in(first, used)
        rows.append(row)
        tokens.append(column + at)
        values.append(value)
        at += count
    large = np.concatenate(values).astype(np.float32)
    if not len(large):
        return y
    where = mx.array(np.concatenate(tokens)), mx.array(np.concatenate(rows))
    return y.at[where].add(mx.array(large))


def _turn(x: mx.array, calibration: Calibration, name: str, positions: np.ndarray) -> mx.array:
    runs = calibration.rotary.get(name, ())
    if not runs:
        return x
    parts, at = [], 0
    for first, heads, rotary in runs:
        parts += [x[at:first], _rotate(x[first : first + heads], rotary, positions)]
        at = first + heads
    return mx.concatenate([part for part in [*parts, x[at:]] if part.shape[0]], axis=0)


def _rotate(x: mx.array, rotary: Rotary, positions: np.ndarray) -> mx.array:
    """As `Rotary.turn`, for ``[heads, tokens, dim]`` at these positions."""
    pairs = len(rotary.rates)
    cos, sin = (mx.array(table) for table in _angles(rotary, positions))
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


_matrices: dict[int, tuple[Basis, mx.array]] = {}


def _matrix(basis: Basis) -> mx.array:
    """The basis' decoding matrix as an array, made once (on the generation thread, as all here)."""
    known = _matrices.get(id(basis))
    if known is None or known[0] is not basis:
        known = _matrices[id(basis)] = (basis, mx.array(basis.decode))
        mx.eval(known[1])
    return known[1]
