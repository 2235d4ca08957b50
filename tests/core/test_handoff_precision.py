"""States in less than full precision: what comes back, how large it is, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from thunder_patches.cache.record import Coded, Header, Record, TensorSpec
from thunder_patches.codec.base import CodecError
from thunder_patches.codec.numbers import from_float32, to_float32
from thunder_patches.handoff import mixed
from thunder_patches.handoff.precision import decoded, encode, joined

HEADS, DIM = 3, 64


def layout(dtype: str = "BF16", dim: int = DIM) -> str:
    rows = {"k0": [dtype, HEADS, dim], "v0": [dtype, HEADS, dim]}
    layer = {"path": "0", "class": "KVCache", "meta": {}, "rows": [["k0", 0, 3], ["v0", 0, 3]]}
    return json.dumps({"rows": rows, "layers": [layer]})


def values(tokens: int, seed: int, dim: int = DIM) -> np.ndarray:
    """Like keys: a few channels are large, and the first token is."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal((HEADS, tokens, dim), np.float32)
    found[..., :3] *= 12
    found[:, :1] *= 5
    return found


def record(tokens: int, start: int = 0, dtype: str = "BF16", dim: int = DIM) -> Record:
    arrays = [values(tokens, seed + start, dim) for seed in (1, 2)]
    specs = tuple(TensorSpec(n, dtype, a.shape) for n, a in zip(("k0", "v0"), arrays, strict=True))
    data = tuple(bytes(from_float32(a, dtype)) for a in arrays)
    ids = np.arange(start, start + tokens, dtype="<i8").tobytes()
    return Record(Header(b"", b"", "block", start, ids, layout(dtype, dim), specs), data)


def floats(record: Record, i: int) -> np.ndarray:
    spec = record.header.tensors[i]
    return to_float32(record.data[i], spec.dtype).reshape(spec.shape)


@pytest.mark.parametrize("tokens", [1, 67, 68, 131, 132, 500])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("dim", [64, 32, 128, 24])
def test_what_comes_back_of_mixed(tokens: int, dtype: str, dim: int) -> None:
    """The first and last tokens to the bit, the rest within a step of 4 bits."""
    before = record(tokens, dtype=dtype, dim=dim)
    after = decoded(before.header, encode(before, "mixed"))
    if tokens < mixed.SINKS + mixed.WINDOW + mixed.UNIT:
        assert [bytes(d) for d in after.data] == [bytes(d) for d in before.data]
        return
    _, window = mixed.split(tokens)
    assert mixed.WINDOW <= window < mixed.WINDOW + mixed.UNIT
    for i in range(2):
        old, new = floats(before, i), floats(after, i)
        assert np.array_equal(old[:, : mixed.SINKS], new[:, : mixed.SINKS])
        assert np.array_equal(old[:, -window:], new[:, -window:])
        middle = slice(mixed.SINKS, -window)
        assert not np.array_equal(old[:, middle], new[:, middle])
        reach = np.abs(old).max() * 2 / 15
        assert np.abs(old - new).max() <= reach


def test_bits_buy_precision() -> None:
    before = record(1000)
    sizes, errors = [], []
    for bits in (4.0, 6.0, 8.0, 9.0):
        coded = encode(before, "mixed", bits=bits)
        after = decoded(before.header, coded)
        sizes.append(sum(c.nbytes for c in coded))
        errors.append(sum(np.square(floats(before, i) - floats(after, i)).mean() for i in (0, 1)))
    assert sizes == sorted(sizes) and errors == sorted(errors, reverse=True)
    elements = sum(np.prod(s.shape) for s in before.header.tensors)
    assert sizes[1] * 8 <= 6.1 * elements


def test_a_unit_that_needs_it_gets_8_bits() -> None:
    """Values that 4 bits spoil come before those that they don't; the control is the other unit."""
    rows = values(mixed.SINKS + mixed.WINDOW + 2 * mixed.UNIT, 7)[:1]
    rows[0, mixed.SINKS : mixed.SINKS + mixed.UNIT] = 0.0
    spec = TensorSpec("v0", "BF16", rows.shape)
    found = mixed.gain(mixed.Rows(spec, "v", rows))
    assert found[0, 0] == 0 < found[0, 1]


@pytest.mark.parametrize("precision", ["int8", "mixed"])
def test_state_and_logits_stay_verbatim(precision: Any) -> None:
    inner = layout()
    text = json.dumps({"layout": inner, "state": {"1": {"arrays": 1}}})
    block = record(256)
    state, logits = np.random.default_rng(3).bytes(4096), np.random.default_rng(4).bytes(64)
    specs = (
        *record(0).header.tensors,
        TensorSpec("s1.0", "F32", (32, 32)),
        TensorSpec("logits", "F32", (16,)),
    )
    header = Header(b"s", b"p", "snapshot", 256, b"", text, specs, True)
    whole = joined([block, Record(header, (b"", b"", state, logits))], block.header.tokens)
    assert [s.shape for s in whole.header.tensors[:2]] == [(HEADS, 256, DIM)] * 2
    after = decoded(whole.header, encode(whole, precision))
    assert [bytes(d) for d in after.data[2:]] == [state, logits]
    assert bytes(after.data[0]) != bytes(whole.data[0])


def test_joined_in_order() -> None:
    parts = [record(256), record(256, 256), record(30, 512)]
    tokens = b"".join(part.header.tokens for part in parts)
    whole = joined(parts, tokens)
    for i in range(2):
        expected = np.concatenate([floats(part, i) for part in parts], axis=1)
        assert np.array_equal(floats(whole, i), expected)
    with pytest.raises(ValueError, match="expected a record from token 256"):
        joined([parts[0], parts[2]], tokens)


def test_nan_stays_exact() -> None:
    before = record(500)
    spoiled = bytearray(before.data[0])
    spoiled[2000:2002] = b"\xff\x7f"
    before = Record(before.header, (bytes(spoiled), before.data[1]))
    for precision in ("int8", "mixed"):
        after = decoded(before.header, encode(before, precision))
        assert bytes(after.data[0]) == bytes(spoiled)


def test_damaged_payloads_are_refused() -> None:
    before = record(500)
    (coded, *rest) = encode(before, "mixed")
    eights = coded.params["eights"]
    for bad in (
        replace(coded, data=bytes(coded.data)[:-1]),
        replace(coded, params=coded.params | {"eights": eights + 1}),
        replace(coded, params=coded.params | {"eights": -1}),
        replace(coded, params=coded.params | {"eights": "7"}),
        replace(coded, params=coded.params | {"parts": []}),
        Coded("mixed", b""),
        replace(coded, codec="unheard"),
    ):
        with pytest.raises(CodecError):
            decoded(before.header, [bad, *rest])
    spec = replace(before.header.tensors[0], shape=(HEADS, 10, DIM))
    with pytest.raises(CodecError):
        decoded(replace(before.header, tensors=(spec, before.header.tensors[1])), [coded, *rest])
