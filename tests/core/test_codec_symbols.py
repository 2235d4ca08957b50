"""Packing of small whole numbers: every matrix comes back, near the entropy, and rubbish doesn't."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thunder_patches.codec import symbols
from thunder_patches.codec.base import CodecError
from thunder_patches.codec.symbols import LARGEST, pack, unpack
from thunder_patches.tensors.kvtc_decode import _taken_apart

STORED = (
    [
        [6, 2],
        ["raw", 8],
        ["raw", 12],
        ["raw", 12],
        ["raw", 12],
        ["raw", 2],
        ["raw", 7],
        ["raw", 13],
        ["raw", 13],
        ["raw", 50],
    ],
    base64.b85decode(
        "OG`Q^7y|<U000000000000000000311po{H4ge4UIR97wt^ia2PXB-Z1~UdjP7*gs4Gjeg3IYfQ7X%g#"
        "6AWJ?m~6nHxvAY@mN`QJ0JKk+0HdYll!1Ey`T(y0joFl3(S$c<pGjo&#?l<y*b~FC*+U{b&0?qTtf%B#"
        "M*"
    ),
)
"""What the first version of this format made of the numbers in the last test."""


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


def test_gaps_come_as_rows_of_the_second_alphabet() -> None:
    """Also at lengths that don't fill their last byte, and across gaps longer than a byte holds."""
    rng = np.random.default_rng(0)
    for length in (1, 3, 255, 256, 600):
        numbers = np.where(rng.random((50, length)) < 0.01, rng.choice([-1, 1], (50, length)), 0)
        data = symbols._gaps(numbers.astype(np.int8))
        assert (data == 2 * symbols.SKIP).any() == (length > 3)
        wanted = symbols._squeeze(numbers, symbols.ALPHABETS[1]).reshape(-1)
        assert (symbols._fill(data, 50, length) == wanted).all()
        numbers[-1, -1] ^= 1
        assert (symbols._squeeze(numbers, symbols.ALPHABETS[1]).reshape(-1) != wanted).any()


def test_a_gpu_takes_apart_to_the_same_numbers() -> None:
    """Blocks of several lengths together; all alphabets, and numbers too large for int8."""
    rng = np.random.default_rng(1)
    spread = np.exp(np.linspace(5, -5, 300))[:, None]
    matrices = [
        np.rint(rng.laplace(0, 1, (300, length)) * spread).astype(np.int16)
        for length in (252, 256, 256, 33)
    ]
    blocks = [unpack(*pack(numbers), *numbers.shape) for numbers in matrices]
    assert all(len(data) for data in blocks[0].packed) and (np.abs(matrices[0]) > 127).any()
    assert any(0 < c <= symbols.SPARSE for c in blocks[0].classes) and 0 in blocks[0].classes
    apart = np.array(_taken_apart(blocks))
    assert apart.dtype == np.float32 and (apart == np.concatenate(matrices, axis=1)).all()
    blocks[2] = replace(blocks[2], order=blocks[2].order[::-1])
    assert (np.array(_taken_apart(blocks)) != apart).any(), "the control: rows in wrong places"


def test_what_earlier_versions_stored_is_read() -> None:
    """All alphabets and a large number, packed by the first version of this format."""
    reach = np.array([200, 100, 7, 2, 1, 1, 1, 0])[:, None]
    numbers = np.arange(8 * 25).reshape(8, 25) ** 2 * 31 % 1009 % (2 * reach + 1) - reach
    numbers[5:7] = np.arange(50).reshape(2, 25) % 26 == 3
    numbers[6] *= -1
    found = unpack(*STORED, *numbers.shape)
    assert (found.whole() == numbers).all()
