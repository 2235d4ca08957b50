"""Which codec a tensor gets, and that nothing is lossy unless asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from codec_samples import header_of, kv_like, to_bytes

from thunder_patches.cache.record import Record, TensorSpec
from thunder_patches.codec.base import CodecError, Coded
from thunder_patches.codec.policy import Policy, Stored
from thunder_patches.observe.counters import Counters

K, V = TensorSpec("k0", "BF16", (4, 256, 64)), TensorSpec("v0", "BF16", (4, 256, 64))
STATE = TensorSpec("s1.0", "F32", (1, 8, 32, 32))
NOISE = TensorSpec("logits", "U32", (4096,))


def record() -> Record:
    header = header_of(K, V, start=256)
    header = type(header)(
        header.key, header.parent, "block", 256, header.tokens, header.layout, (K, V, STATE, NOISE)
    )
    rng = np.random.default_rng(0)
    return Record(
        header,
        (
            to_bytes(kv_like(4, 256, 64), "BF16"),
            to_bytes(kv_like(4, 256, 64, seed=1), "BF16"),
            to_bytes(kv_like(8, 32, 32, seed=2), "F32"),
            rng.bytes(NOISE.nbytes),
        ),
    )


def names(stored: Stored) -> list[str]:
    return [coded.codec for coded in stored.tensors]


@pytest.mark.parametrize(
    ("mode", "fast_disk", "rows", "state"),
    [
        ("auto", True, "raw", "raw"),
        ("auto", False, "planes+zstd", "planes+zstd"),
        ("raw", False, "raw", "raw"),
        ("lossless", True, "planes+zstd", "planes+zstd"),
    ],
)
def test_new_records(mode, fast_disk: bool, rows: str, state: str) -> None:
    policy, given = Policy(mode, fast_disk=fast_disk), record()
    stored = policy.encode(given)
    assert names(stored) == [rows, rows, state, "raw"], "noise never pays"
    assert stored.lossy is None and not policy.allows_lossy
    assert [bytes(d) for d in policy.record(stored).data] == [bytes(d) for d in given.data]


def test_aging_is_lossless_and_happens_once() -> None:
    policy, given = Policy("auto"), record()
    stored = policy.encode(given)
    assert policy.ages(names(stored))
    aged = policy.age(given)
    assert aged is not None and aged.nbytes < 0.8 * stored.nbytes and aged.lossy is None
    assert [bytes(d) for d in policy.record(aged).data] == [bytes(d) for d in given.data]
    assert not policy.ages(names(aged))
    assert not Policy("raw").ages(names(stored))


def test_aging_noise_gains_nothing() -> None:
    header = header_of(NOISE)
    noise = Record(header, (np.random.default_rng(1).bytes(NOISE.nbytes),))
    assert Policy("auto").age(noise) is None


@pytest.mark.parametrize(("quality", "values"), [("balanced", "int8"), ("small", "int4")])
def test_int8_touches_attention_only_and_says_so(quality, values: str) -> None:
    policy, given = Policy("int8", quality=quality), record()
    stored = policy.encode(given)
    assert names(stored) == ["int8", values, "planes+zstd", "raw"]
    assert stored.lossy is not None and policy.allows_lossy
    back = policy.record(stored)
    assert bytes(back.data[0]) != bytes(given.data[0])
    assert [bytes(d) for d in back.data[2:]] == [bytes(d) for d in given.data[2:]]
    assert not policy.ages(names(stored)), "never encoded twice"


def test_the_tail_of_a_prompt_stays_exact() -> None:
    """Its rows become part of a block later: coded twice, they would lose twice."""
    given = record()
    tail = Record(replace(given.header, kind="snapshot"), given.data)
    stored = Policy("int8").encode(tail)
    assert stored.lossy is None and "int8" not in names(stored)


def test_nan_keeps_a_tensor_lossless() -> None:
    given, counts = record(), Counters()
    keys = np.frombuffer(given.data[0], np.uint16).copy()
    keys[77] = 0x7FC1
    stored = Policy("int8", counts=counts).encode(Record(given.header, (keys, *given.data[1:])))
    assert names(stored)[:2] == ["planes+zstd", "int8"]
    assert counts.snapshot()["codec_fallbacks"] == 1


def test_an_unknown_codec_is_a_codec_error() -> None:
    given = record()
    with pytest.raises(CodecError, match="unknown codec 'quantum'"):
        Policy().decode(K, Coded("quantum", b"", {}), given.header)


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ValueError, match="found 'tiny'"):
        Policy("tiny")  # type: ignore[arg-type]
