"""Lossless codecs: every dtype and shape comes back bit for bit; KV-like values get smaller."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from codec_samples import header_of, kv_like, to_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from thunder_patches.cache.record import DTYPE_BYTES, TensorSpec
from thunder_patches.codec.base import CodecError, Coded
from thunder_patches.codec.codecs import CODECS, decode

LOSSLESS = [name for name, codec in CODECS.items() if not codec.lossy]
SHAPES = st.lists(st.integers(0, 9), min_size=0, max_size=4).map(tuple)


@pytest.mark.parametrize("name", LOSSLESS)
@given(dtype=st.sampled_from(sorted(DTYPE_BYTES)), shape=SHAPES, seed=st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_any_bytes_of_any_shape_come_back(name: str, dtype: str, shape: tuple, seed: int) -> None:
    """Random bytes hold every NaN and infinity of every dtype."""
    spec = TensorSpec("x", dtype, shape)
    data = np.random.default_rng(seed).bytes(spec.nbytes)
    header = header_of(spec)
    coded = CODECS[name].encode(spec, data, header)
    assert bytes(decode(spec, coded, header)) == data


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "U32"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 256])
def test_keys_and_values_come_back(name: str, dtype: str, tokens: int) -> None:
    spec = TensorSpec("k0", dtype, (6, tokens, 64))
    data = to_bytes(kv_like(6, tokens, 64), dtype)
    header = header_of(spec)
    coded = CODECS[name].encode(spec, data, header)
    assert bytes(decode(spec, coded, header)) == data


@pytest.mark.parametrize("special", [np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-45])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_special_values_are_kept_to_the_bit(special: float, dtype: str) -> None:
    values = kv_like(2, 64, 64)
    values[1, 5, 7] = special
    spec, data = TensorSpec("v0", dtype, values.shape), to_bytes(values, dtype)
    for name in LOSSLESS:
        coded = CODECS[name].encode(spec, data, header_of(spec))
        assert bytes(decode(spec, coded, header_of(spec))) == data


def test_beats_zlib_on_bf16_keys() -> None:
    spec = TensorSpec("k0", "BF16", (12, 256, 64))
    data = to_bytes(kv_like(12, 256, 64), "BF16")
    size = CODECS["planes+zstd"].encode(spec, data, header_of(spec)).nbytes
    assert size < len(zlib.compress(data, 6))
    assert size < 0.75 * len(data)
    assert CODECS["planes+lz4"].encode(spec, data, header_of(spec)).nbytes < 0.9 * len(data)


def test_noise_is_not_made_larger_than_its_header() -> None:
    spec = TensorSpec("x", "U32", (64, 256))
    data = np.random.default_rng(0).bytes(spec.nbytes)
    assert CODECS["planes+zstd"].encode(spec, data, header_of(spec)).nbytes == len(data)


@pytest.mark.parametrize("name", LOSSLESS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_payloads_are_a_codec_error_or_the_right_size(name: str, data) -> None:
    spec = TensorSpec("k0", "BF16", (2, 32, 16))
    header = header_of(spec)
    coded = CODECS[name].encode(spec, to_bytes(kv_like(2, 32, 16), "BF16"), header)
    payload = bytearray(bytes(coded.data))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for damaged in (bytes(payload), bytes(payload[:cut]), bytes(payload) + b"x"):
        try:
            out = decode(spec, Coded(name, damaged, coded.params), header)
        except CodecError:
            continue
        assert memoryview(out).nbytes == spec.nbytes


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("name", [*LOSSLESS, "no such codec"])
@given(parts=JSON, payload=st.binary(max_size=64))
@settings(max_examples=100, deadline=None)
def test_hostile_parameters_are_a_codec_error(name: str, parts, payload: bytes) -> None:
    spec = TensorSpec("k0", "BF16", (2, 3, 4))
    coded = Coded(name, payload, {"parts": parts})
    if name == "raw" and len(payload) == spec.nbytes:
        return
    with pytest.raises(CodecError):
        decode(spec, coded, header_of(spec))


def test_a_frame_that_promises_too_much_is_refused_before_it_is_unpacked() -> None:
    import zstandard

    spec = TensorSpec("k0", "U8", (1, 1, 1000))
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    with pytest.raises(CodecError):
        decode(spec, Coded("planes+zstd", bomb, {"parts": [["zstd", len(bomb)]]}), header_of(spec))
