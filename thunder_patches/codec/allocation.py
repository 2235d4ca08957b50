"""The paper's way to spend bits: groups of coordinates with few bits each, found by dynamic programming.

KVTC (arXiv 2511.01815): coordinates in order of variance are parted into groups, each with a number of
bits; a token keeps one scale for a group and its coordinates at that many bits; DEFLATE comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .base import CodecError

SIZES = (16, 64, 256, 1024)
BITS = (0, 1, 2, 4, 8)
SCALE_BITS = 16

Allocation = list[list[int]]
"""[coordinates, bits] of each group of one basis, in order; what is left over has no bits."""


def allocate(variances: Sequence[np.ndarray], budget: float) -> list[Allocation]:
    """The groups of each basis with the least expected error within ``budget`` bits a token.

    Args:
        variances: of each basis' coordinates, most first.
        budget: bits for all bases together, scales included.

    One price of a bit for all bases is found by bisection; for a given price the best groups of a
    basis follow from those of its shorter prefixes.
    """
    low, high = 1e-12, float(max(v.max(initial=0) for v in variances)) * 1e3 + 1e-9
    best = [_groups(v, high) for v in variances]
    for _ in range(40):
        price = (low * high) ** 0.5
        tried = [_groups(v, price) for v in variances]
        if sum(map(cost, tried)) <= budget:
            best, high = tried, price
        else:
            low = price
    return best


def cost(allocation: Allocation) -> int:
    """Bits a token, scales included."""
    return sum(SCALE_BITS + count * bits for count, bits in allocation if bits)


def quantise(y: np.ndarray, allocation: Allocation) -> tuple[list[np.ndarray], np.ndarray]:
    """y ``[tokens, rank]`` to packed codes and scales per group, uint8, and what they stand for."""
    parts, back, first = [], np.zeros_like(y), 0
    for count, bits in allocation:
        part = slice(first, first + count)
        first += count
        if not bits:
            continue
        half = 1 << (bits - 1)
        largest = np.abs(y[:, part]).max(axis=1, initial=0)
        scale = np.minimum(largest / (half - 0.5), 65000).astype("<f2")
        unit = np.maximum(scale.astype(np.float32), 1e-7)[:, None]
        codes = np.clip(np.floor(y[:, part] / unit), -half, half - 1)
        back[:, part] = (codes + 0.5) * unit
        parts += [scale.view(np.uint8), _pack((codes + half).astype(np.uint8), bits)]
    return parts, back


def sizes(allocation: Allocation, tokens: int) -> list[int]:
    """Bytes of each part that `quantise` makes."""
    out = []
    for count, bits in allocation:
        if bits:
            out += [2 * tokens, -(-count * tokens * bits // 8)]
    return out


def restore(
    parts: Sequence[np.ndarray], allocation: Allocation, tokens: int, rank: int
) -> np.ndarray:
    """float32 ``[rank, tokens]`` of the parts that `quantise` made."""
    out, first, left = np.zeros((rank, tokens), np.float32), 0, iter(parts)
    for count, bits in allocation:
        if bits:
            scale, codes = next(left).view("<f2").astype(np.float32), next(left)
            scale = np.maximum(np.nan_to_num(scale, posinf=0, neginf=0), 1e-7)
            numbers = _unpack(codes, bits, count * tokens).reshape(tokens, count)
            half = 1 << (bits - 1)
            out[first : first + count] = (numbers.T.astype(np.float32) - half + 0.5) * scale
        first += count
    return out


def checked(value: Any, ranks: Sequence[int]) -> list[Allocation]:
    """Allocations as they come from a file; raises CodecError."""
    if isinstance(value, list) and len(value) == len(ranks):
        for allocation, rank in zip(value, ranks, strict=True):
            if not _sound(allocation, rank):
                break
        else:
            return value
    raise CodecError(f"expected groups of coordinates for {ranks}, found {str(value)[:80]}")


def _sound(allocation: Any, rank: int) -> bool:
    if not isinstance(allocation, list):
        return False
    for entry in allocation:
        match entry:
            case [int(count), int(bits)] if count > 0 and bits in BITS:
                rank -= count
            case _:
                return False
    return rank >= 0


def _groups(variance: np.ndarray, price: float) -> Allocation:
    """The groups of one basis for which error + price * bits is least."""
    rank, unit = len(variance), SIZES[0]
    ends = [*range(0, rank, unit), rank]
    tail = np.concatenate([np.cumsum(variance[::-1].astype(np.float64))[::-1], [0.0]])
    best = np.full(len(ends), np.inf)
    best[0] = 0.0
    via: list[tuple[int, int]] = [(0, 0)] * len(ends)
    for i in range(1, len(ends)):
        for size in SIZES:
            back = max(0, i - size // unit)
            count, top = ends[i] - ends[back], float(variance[ends[back]])
            spread = 8 * np.log(max(2, count)) * top / 12  # error of steps over a group's range
            for bits in BITS[1:]:
                error = count * min(spread / 4.0**bits, top)
                total = best[back] + error + price * (SCALE_BITS + count * bits)
                if total < best[i]:
                    best[i], via[i] = total, (back, bits)
    last = int(np.argmin(best + tail[ends]))
    found: Allocation = []
    while last:
        back, bits = via[last]
        found.insert(0, [ends[last] - ends[back], bits])
        last = back
    return found


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    flat = codes.reshape(-1)
    if bits == 8:
        return flat
    each = 8 // bits
    padded = np.zeros(-(-len(flat) // each) * each, np.uint8)
    padded[: len(flat)] = flat
    out = np.zeros(len(padded) // each, np.uint8)
    for i in range(each):
        out |= padded[i::each] << (i * bits)
    return out


def _unpack(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    if bits == 8:
        return data
    each, mask = 8 // bits, (1 << bits) - 1
    out = np.empty(len(data) * each, np.uint8)
    for i in range(each):
        out[i::each] = (data >> (i * bits)) & mask
    return out[:count]
