"""Packing of small whole numbers: every matrix comes back, near the entropy, and rubbish doesn't."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thunder_patches.codec.base import CodecError
from thunder_patches.codec.symbols import LARGEST, pack, unpack


@given(
    rows=st.integers(0, 40),
    length=st.integers(0, 300),
    scale=st.sampled_from([0.0, 0.01, 0.2, 1.0, 5.0, 80.0, 5000.0]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=150, deadline=None)
def test_any_matrix_comes_back(rows: int, length: int, scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spread = scale * np.exp(rng.normal(0, 1, (rows, 1)))
    numbers = np.rint(np.clip(rng.laplace(0, 1, (rows, length)) * spread, -LARGEST, LARGEST))
    numbers = numbers.astype(np.int16)
    parts, payload = pack(numbers)
    assert (unpack(parts, payload, rows, length).whole() == numbers).all()


@pytest.mark.parametrize("value", [-LARGEST, LARGEST, 127, 128, -128, 7, 8, 2, 3, 1])
def test_each_alphabets_edge(value: int) -> None:
    numbers = np.zeros((3, 256), np.int16)
    numbers[0, ::3], numbers[1], numbers[2, 255] = value, value, -value
    parts, payload = pack(numbers)
    assert (unpack(parts, payload, 3, 256).whole() == numbers).all()


def test_close_to_the_entropy_of_rows_of_known_spread() -> None:
    rng = np.random.default_rng(0)
    spread = np.exp(np.linspace(1, -2.5, 2000))[:, None]
    numbers = np.rint(rng.laplace(0, 1, (2000, 256)) * spread).astype(np.int16)
    bits = 0.0
    for row in numbers:
        _, counts = np.unique(row, return_counts=True)
        bits -= (counts * np.log2(counts / 256)).sum()
    assert len(pack(numbers)[1]) * 8 < 1.12 * bits


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_payloads_are_a_codec_error_or_the_right_shape(data) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 5)))
    spread = np.exp(np.linspace(2, -4, 60))[:, None]
    numbers = np.rint(rng.laplace(0, 1, (60, 100)) * spread).astype(np.int16)
    parts, payload = pack(numbers)
    payload = bytearray(payload)
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        payload = payload[: data.draw(st.integers(0, len(payload)))]
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(parts) - 1))
        parts[at] = data.draw(
            st.sampled_from([[], [0], [1, 2, 3], [-1], [1 << 50], ["raw", 5], ["zstd", -1], None])
        )
    try:
        out = unpack(parts, bytes(payload), 60, 100).whole()
    except CodecError:
        return
    assert out.shape == (60, 100)
