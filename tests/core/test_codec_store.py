"""Codecs in the store: every setting, dtype and tier; unknown codecs; what is damaged behind a checksum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from codec_samples import calibration_for, header_of, kv_like, to_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.cache_support import counts, file_of, job, open_store
from thunder_patches.cache.record import Coded, Record, TensorSpec
from thunder_patches.cache.store import CacheStore
from thunder_patches.codec.base import CodecError
from thunder_patches.codec.calibration import Shelf
from thunder_patches.codec.codecs import CODECS
from thunder_patches.codec.kvtc import Kvtc
from thunder_patches.codec.numbers import to_float32
from thunder_patches.codec.planes import PlanesZstd
from thunder_patches.codec.policy import Policy
from thunder_patches.tensors.kvtc_decode import decode

HEADS, DIM = 4, 32
MODES = ("auto", "raw", "lossless", "int8", "kvtc")
FULL = TensorSpec("k0", "BF16", (HEADS, 256, DIM))
KNOWN = calibration_for(FULL, replace(FULL, name="v0"))


def policy(mode: str, folder: Path) -> Policy:
    made = Policy(mode, shelf=Shelf(folder), fast_disk=mode != "auto")  # type: ignore[arg-type]
    made._shelf.add(replace(KNOWN, id=""))  # type: ignore[union-attr]
    made.use_model(KNOWN.model)
    return made


def record_of(dtype: str, tokens: int, special: float | None = None) -> Record:
    specs = [TensorSpec(name, dtype, (HEADS, tokens, DIM)) for name in ("k0", "v0")]
    rows = [kv_like(HEADS, 600, DIM, seed)[:, :tokens].copy() for seed in (0, 1)]
    if special is not None:
        rows[0][1, tokens // 2, 3] = special
    data = tuple(to_bytes(values, dtype) for values in rows)
    return Record(header_of(*specs, start=256), data)


def brought_back(store: CacheStore, record: Record) -> tuple[str | None, list[bytes]]:
    wanted, into = job(record.header)
    (source,) = store.read_many([wanted])
    return source, [bytes(into[spec.name]) for spec in record.header.tensors]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "U32"])
@pytest.mark.parametrize("tokens", [0, 1, 256])
def test_every_tier_gives_back_what_was_stored(
    tmp_path: Path, mode: str, dtype: str, tokens: int
) -> None:
    """From memory and from the queue exactly, from the disk within what the setting allows."""
    given = record_of(dtype, tokens)
    exact = [bytes(data) for data in given.data]
    store = open_store(tmp_path / "v1", codec=policy(mode, tmp_path), ram_budget=1 << 24)
    store.put(given, 1)
    assert brought_back(store, given) == ("ram", exact)
    assert store.flush(60)
    store.close()
    store = open_store(tmp_path / "v1", codec=policy(mode, tmp_path))
    source, found = brought_back(store, given)
    assert source == "ssd" and counts(store)["corrupt"] == 0
    store.close()
    lossy = mode in ("int8", "kvtc") and dtype != "U32" and tokens
    assert (found == exact) == (not lossy)
    if lossy:
        for a, b in zip(found, exact, strict=True):
            a, b = to_float32(a, dtype), to_float32(b, dtype)
            assert np.linalg.norm(a - b) < (0.02 if mode == "int8" else 0.3) * np.linalg.norm(b)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_tensor_with_nan_or_infinity_is_exact(
    tmp_path: Path, mode: str, special: float, dtype: str
) -> None:
    given = record_of(dtype, 64, special)
    store = open_store(tmp_path / "v1", codec=policy(mode, tmp_path))
    store.put(given, 1)
    assert store.flush(60)
    store.close()
    store = open_store(tmp_path / "v1", codec=policy(mode, tmp_path))
    source, found = brought_back(store, given)
    assert source == "ssd" and found[0] == bytes(given.data[0])
    store.close()


def test_a_codec_of_a_later_version_is_a_miss(tmp_path: Path) -> None:
    class Later(PlanesZstd):
        name = "planes+later"

    codecs = {**CODECS, "planes+zstd": Later(), "planes+later": Later()}
    store = open_store(tmp_path / "v1", codec=Policy("lossless", codecs=codecs))
    given = record_of("BF16", 256)
    store.put(given, 1)
    assert store.flush(60) and brought_back(store, given)[0] == "ssd"
    store.close()
    store = open_store(tmp_path / "v1", codec=Policy("lossless"))
    assert brought_back(store, given)[0] is None
    assert counts(store)["corrupt"] == counts(store)["set_aside"] == 1
    assert "unknown codec 'planes+later'" in store.stats()["last_fault"]
    store.put(given, 2)
    assert store.flush(60) and brought_back(store, given)[0] == "ssd"
    store.close()


def test_a_lossy_file_is_a_miss_where_nothing_lossy_is_allowed(tmp_path: Path) -> None:
    given = record_of("BF16", 256)
    store = open_store(tmp_path / "v1", codec=policy("kvtc", tmp_path))
    store.put(given, 1)
    assert store.flush(60)
    assert file_of(tmp_path / "v1", given.header).stat().st_size < given.nbytes / 3
    store.close()
    store = open_store(tmp_path / "v1", codec=policy("lossless", tmp_path))
    assert brought_back(store, given)[0] is None and counts(store)["corrupt"] == 0
    store.close()


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_damage_behind_the_checksum_gives_an_error_or_the_right_shape(data: st.DataObject) -> None:
    """Both halves of decoding, as a restore does them."""
    codec = Kvtc(lambda id: KNOWN, KNOWN)
    spec = TensorSpec("k0", "BF16", (HEADS, 20, DIM))
    header = header_of(spec, start=data.draw(st.sampled_from([0, 256])))
    coded = codec.encode(spec, to_bytes(kv_like(HEADS, 20, DIM), "BF16"), header)
    payload = bytearray(bytes(coded.data))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    params = dict(coded.params)
    if data.draw(st.booleans()):
        params["sinks"] = data.draw(st.integers(-1, 30))
    try:
        numbers = codec.unpack(spec, Coded("kvtc", bytes(payload), params), header)
    except (CodecError, ValueError):
        return
    (rows,) = decode("k0", [numbers], mx.bfloat16, data.draw(st.booleans()))
    mx.eval(rows)
    assert rows.shape == spec.shape
