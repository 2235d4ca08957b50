"""Bits by dynamic programming: within the budget, better than even shares, and restored exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thunder_patches.codec import allocation
from thunder_patches.codec.allocation import allocate, cost, quantise, restore, sizes
from thunder_patches.codec.base import CodecError


def variances(rank: int, fall: float) -> np.ndarray:
    return np.exp(-np.arange(rank) * fall / rank).astype(np.float32)


@given(
    ranks=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    fall=st.floats(0.1, 20),
    share=st.floats(0.1, 6),
)
@settings(max_examples=40, deadline=None)
def test_keeps_to_the_budget(ranks: list[int], fall: float, share: float) -> None:
    budget = share * sum(ranks)
    found = allocate([variances(rank, fall) for rank in ranks], budget)
    assert sum(cost(groups) for groups in found) <= budget
    allocation.checked(found, ranks)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_better_than_the_same_bits_for_all(bits: int) -> None:
    rank, tokens = 512, 200
    spread = np.sqrt(variances(rank, 12))
    y = np.random.default_rng(0).normal(0, 1, (tokens, rank)).astype(np.float32) * spread
    even = [[64, bits]] * (rank // 64)
    budget = cost(even)
    (found,) = allocate([variances(rank, 12)], budget)
    assert 0.8 * budget < cost(found) <= budget

    def error(groups: list[list[int]]) -> float:
        return float(((y - quantise(y, groups)[1]) ** 2).sum())

    assert error(found) < 0.7 * error(even)
    ends = np.cumsum([count for count, _ in found])
    used = [b for _, b in found]
    assert used == sorted(used, reverse=True), f"most bits where most variance is: {ends} {used}"


@given(
    rank=st.integers(1, 80),
    tokens=st.integers(0, 50),
    bits=st.lists(st.sampled_from(allocation.BITS), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_what_is_stored_is_what_comes_back(rank: int, tokens: int, bits: list, seed: int) -> None:
    y = np.random.default_rng(seed).normal(0, 3, (tokens, rank)).astype(np.float32)
    each = max(1, rank // len(bits))
    groups = [[each, b] for b in bits if each * len(bits) <= rank]
    parts, back = quantise(y, groups)
    assert [part.size for part in parts] == sizes(groups, tokens)
    again = restore([part.reshape(-1) for part in parts], groups, tokens, rank)
    assert np.allclose(again.T, back)


@pytest.mark.parametrize(
    "value", [None, [], [[]] * 3, [[[0, 1]]], [[[5, 3]]], [[[200, 1]]], [[["a", 1]]], [3]]
)
def test_groups_that_make_no_sense_are_a_codec_error(value) -> None:
    with pytest.raises(CodecError):
        allocation.checked(value, [100])
