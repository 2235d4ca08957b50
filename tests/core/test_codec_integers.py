"""int8 and int4: errors stay within half a step, groups lie where they should, no NaN."""

from __future__ import annotations

import numpy as np
import pytest
from codec_samples import header_of, kv_like, to_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from thunder_patches.cache.record import TensorSpec
from thunder_patches.codec.base import CodecError, Coded, Refused
from thunder_patches.codec.codecs import CODECS, decode
from thunder_patches.codec.numbers import to_float32


def round_trip(name: str, values: np.ndarray, dtype: str, tensor: str) -> tuple[np.ndarray, Coded]:
    spec = TensorSpec(tensor, dtype, values.shape)
    header = header_of(spec)
    coded = CODECS[name].encode(spec, to_bytes(values, dtype), header)
    return to_float32(decode(spec, coded, header), dtype).reshape(values.shape), coded


def half_steps(values: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The largest error allowed for each value: half a step, and something for rounding."""
    out = np.empty_like(values)
    for first in range(0, values.shape[axis], 64):
        part = np.take(values, range(first, min(first + 64, values.shape[axis])), axis)
        span = np.ptp(part, axis=axis, keepdims=True)
        size = np.abs(part).max(axis, keepdims=True)
        at = [slice(None)] * 3
        at[axis] = slice(first, first + 64)
        out[tuple(at)] = 0.51 * (span + size / 128) / (2**bits - 1) + size / 256
    return out


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
@pytest.mark.parametrize(("tensor", "axis"), [("k0", 1), ("v0", 2)])
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(0, 130), st.integers(1, 130)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None)
def test_error_is_within_half_a_step(dtype, name, bits, tensor, axis, shape, seed) -> None:
    values = to_float32(to_bytes(kv_like(*shape, seed=seed), dtype), dtype).reshape(shape)
    back, _ = round_trip(name, values, dtype, tensor)
    assert back.shape == values.shape
    assert (np.abs(back - values) <= half_steps(values, bits, axis)).all()


def test_groups_follow_the_role() -> None:
    """One huge channel spoils a token's group but not another channel's: keys stay exact."""
    values = np.tile(np.linspace(-1, 1, 64, dtype=np.float32)[None, :, None], (1, 1, 64))
    values[0, :, 0] = 10000 * values[0, :, 1]
    keys, _ = round_trip("int8", values, "F32", "k0")
    spoiled, _ = round_trip("int8", values, "F32", "v0")
    assert np.abs(keys - values)[..., 1:].max() < 0.01
    assert np.abs(spoiled - values)[..., 1:].max() > 0.5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_what_no_step_can_hold_is_refused(name: str, bad: float) -> None:
    values = kv_like(2, 64, 64)
    values[1, 3, 5] = bad
    with pytest.raises(Refused):
        round_trip(name, values, "F32", "k0")
    values[1, 3, 5], values[1, 4, 5] = 3e38, -3e38
    with pytest.raises(Refused):
        round_trip(name, values, "F32", "k0")


def test_state_and_packed_rows_are_refused() -> None:
    header = header_of(TensorSpec("kq0", "U32", (2, 64, 8)))
    for spec in (header.tensors[0], TensorSpec("s0.0", "F32", (1, 4, 4))):
        with pytest.raises(Refused):
            CODECS["int8"].encode(spec, bytes(spec.nbytes), header)


def test_sizes() -> None:
    values = np.random.default_rng(0).uniform(-1, 1, (4, 256, 64)).astype(np.float32)
    raw = values.size * 2
    assert 1.88 <= raw / round_trip("int8", values, "BF16", "k0")[1].nbytes < 2.1
    assert 3.55 <= raw / round_trip("int4", values, "BF16", "v0")[1].nbytes < 4


@pytest.mark.parametrize("name", ["int8", "int4"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_payloads_are_a_codec_error_or_the_right_size(name: str, data) -> None:
    spec = TensorSpec("k0", "BF16", (2, 70, 16))
    header = header_of(spec)
    coded = CODECS[name].encode(spec, to_bytes(kv_like(2, 70, 16), "BF16"), header)
    payload = bytearray(bytes(coded.data))
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    payload = payload[: data.draw(st.integers(len(payload) // 2, len(payload)))]
    params = dict(coded.params)
    if data.draw(st.booleans()):
        params[data.draw(st.sampled_from(["axis", "parts"]))] = data.draw(
            st.sampled_from(["channels", "", None, 3, [], [["raw", 1 << 60]] * 3, [["zstd", -1]]])
        )
    try:
        out = decode(spec, Coded(name, bytes(payload), params), header)
    except CodecError:
        return
    assert memoryview(out).nbytes == spec.nbytes
