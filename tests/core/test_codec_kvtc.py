"""KVTC: round trips, exact sinks, error limits, calibrations as files, damage."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import replace

import numpy as np
import pytest
from codec_samples import calibration_for, header_of, kv_like, to_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from thunder_patches.cache.record import Record, TensorSpec
from thunder_patches.codec.base import CodecError, Coded, Refused
from thunder_patches.codec.calibration import Calibration, Shelf
from thunder_patches.codec.codecs import CODECS, decode
from thunder_patches.codec.kvtc import Kvtc
from thunder_patches.codec.numbers import to_float32
from thunder_patches.codec.policy import Policy
from thunder_patches.codec.rotary import Rotary
from thunder_patches.observe.counters import Counters

HEADS, DIM = 4, 32
K, V = TensorSpec("k0", "BF16", (HEADS, 256, DIM)), TensorSpec("v0", "BF16", (HEADS, 256, DIM))
ROTARY = Rotary(tuple(10000 ** (-np.arange(0, DIM, 2) / DIM)))
KNOWN = calibration_for(K, V, rotary=ROTARY)


def codec(quality: str = "balanced", known: Calibration = KNOWN, mode: str = "steps") -> Kvtc:
    return Kvtc(lambda id: known, known, quality, mode)


def keys(tokens: int, start: int = 0, seed: int = 0) -> np.ndarray:
    return ROTARY.turn(kv_like(HEADS, 600, DIM, seed)[:, start % 300 :][:, :tokens], start)


def round_trip(
    values: np.ndarray, name: str, start: int, with_codec: Kvtc, dtype: str = "BF16"
) -> tuple[np.ndarray, Coded]:
    spec = TensorSpec(name, dtype, values.shape)
    header = header_of(spec, start=start)
    coded = with_codec.encode(spec, to_bytes(values, dtype), header)
    data = decode(spec, coded, header, {"kvtc": with_codec})
    return to_float32(data, dtype).reshape(values.shape), coded


def error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("mode", ["steps", "groups"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 70, 256])
@pytest.mark.parametrize("start", [0, 2, 256])
def test_any_number_of_tokens(mode: str, dtype: str, tokens: int, start: int) -> None:
    values = keys(tokens, start)
    back, _ = round_trip(values, "k0", start, codec("high", mode=mode), dtype)
    assert back.shape == values.shape
    if tokens:
        assert error(back, values) < (0.15 if mode == "steps" else 0.5)


def test_coarser_is_smaller_and_worse() -> None:
    values = keys(256, 256)
    found = [round_trip(values, "k0", 256, codec(q)) for q in ("high", "balanced", "small")]
    errors = [error(back, values) for back, _ in found]
    sizes = [coded.nbytes for _, coded in found]
    assert errors == sorted(errors) and errors[0] < 0.02 < 0.05 < errors[2]
    assert sizes == sorted(sizes, reverse=True) and sizes[2] < K.nbytes / 8


def test_the_rotation_is_undone_with_the_position_it_was_done_with() -> None:
    values = keys(256, 1024)
    right, coded = round_trip(values, "k0", 1024, codec("high"))
    elsewhere = decode(K, coded, header_of(K, start=1280), {"kvtc": codec()})
    wrong = to_float32(elsewhere, "BF16").reshape(values.shape)
    assert error(right, values) < 0.1 < 0.5 < error(wrong, values)
    unrotated = replace(KNOWN, rotary={})
    _, larger = round_trip(values, "k0", 1024, codec("high", unrotated))
    assert larger.nbytes > 1.1 * coded.nbytes, "rotated keys compress worse"


@pytest.mark.parametrize(("start", "exact"), [(0, 4), (3, 1), (4, 0), (256, 0)])
def test_the_first_tokens_of_a_prompt_are_exact(start: int, exact: int) -> None:
    values = to_float32(to_bytes(keys(64, start), "BF16"), "BF16").reshape(HEADS, 64, DIM)
    back, _ = round_trip(values, "k0", start, codec("small"))
    same = (back == values).all(axis=(0, 2))
    assert same[:exact].all() and not same[exact:].any()


def test_a_block_unlike_the_calibration_is_refused_not_spoilt() -> None:
    tight = {
        q: dict.fromkeys(("k0", "v0"), 0.5 * s**2 * HEADS * DIM) for q, s in KNOWN.steps.items()
    }
    strict = replace(KNOWN, limits=tight)
    usual = keys(256, 256)
    round_trip(usual, "k0", 256, codec("balanced", strict))
    rng = np.random.default_rng(3)
    strange = usual + 10 * rng.normal(0, 1, usual.shape).astype(np.float32)
    strange[:, :, ::2] *= 1e4
    with pytest.raises(Refused, match="limit"):
        round_trip(strange, "k0", 256, codec("balanced", strict))
    policy_codecs = {**CODECS, "kvtc": codec("balanced", strict)}
    counts = Counters()
    policy = Policy("kvtc", codecs=policy_codecs, counts=counts)
    header = header_of(K, V, start=256)
    data = (to_bytes(strange, "BF16"), to_bytes(kv_like(HEADS, 256, DIM, 1), "BF16"))
    stored = policy.encode(Record(header, data))
    assert [c.codec for c in stored.tensors] == ["int8", "kvtc"]
    assert counts.snapshot()["codec_fallbacks"] == 1 and stored.lossy


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_is_refused(bad: float) -> None:
    values = keys(64)
    values[2, 60, 3] = bad
    with pytest.raises(Refused):
        round_trip(values, "k0", 0, codec())


def test_other_shapes_and_unknown_calibrations() -> None:
    other = TensorSpec("k0", "BF16", (HEADS, 8, DIM * 2))
    with pytest.raises(Refused):
        codec().encode(other, bytes(other.nbytes), header_of(other))
    with pytest.raises(Refused, match="no calibration"):
        Kvtc(lambda id: KNOWN).encode(K, bytes(K.nbytes), header_of(K))
    coded = codec().encode(K, to_bytes(keys(256), "BF16"), header_of(K))
    with pytest.raises(CodecError):
        decode(other, coded, header_of(other), {"kvtc": codec()})


def test_a_policy_without_calibration_stays_lossless(tmp_path) -> None:
    counts = Counters()
    policy = Policy("kvtc", shelf=Shelf(tmp_path), counts=counts)
    record = Record(header_of(K), (to_bytes(keys(256), "BF16"),))
    stored = policy.encode(record)
    assert stored.lossy is None and stored.tensors[0].codec == "planes+zstd"
    assert not counts.snapshot().get("codec_fallbacks"), "nothing was tried"

    KNOWN.write(tmp_path)
    assert policy.use_model("another model") is None
    assert policy.encode(record).lossy is None
    assert policy.use_model("a model") is not None
    coded = policy.encode(record)
    assert coded.lossy == "kvtc" and coded.nbytes < stored.nbytes / 2
    assert Policy("auto", shelf=Shelf(tmp_path)).record(coded).header == record.header


class TestFile:
    def test_comes_back_and_is_private(self, tmp_path) -> None:
        shelf = Shelf(tmp_path / "calibrations")
        written = shelf.add(KNOWN)
        path = tmp_path / "calibrations" / f"{written.id}.safetensors"
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700
        read = Shelf(path.parent).of_model("a model")
        assert read is not None and read.id == written.id and read.rotary == KNOWN.rotary
        values = keys(256, 256)
        _, coded = round_trip(values, "k0", 256, codec(known=written))
        assert coded.params["calibration"] == written.id
        header = header_of(K, start=256)
        first = decode(K, coded, header, {"kvtc": codec(known=written)})
        assert bytes(first) == bytes(decode(K, coded, header, {"kvtc": codec(known=read)}))

    def test_damage_is_noticed(self, tmp_path) -> None:
        written = KNOWN.write(tmp_path)
        path = tmp_path / f"{written.id}.safetensors"
        data = bytearray(path.read_bytes())
        for at in (5, 300, len(data) // 2, len(data) - 3):
            damaged = bytearray(data)
            damaged[at] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(CodecError):
                Calibration.read(path)
        for cut in (0, 7, 100, len(data) - 1):
            path.write_bytes(data[:cut])
            with pytest.raises(CodecError):
                Calibration.read(path)
        assert Shelf(tmp_path).of_model("a model") is None

    def test_another_under_its_name_is_refused(self, tmp_path) -> None:
        mine, other = (replace(KNOWN, measured={"run": i}).write(tmp_path) for i in range(2))
        assert Shelf(tmp_path).get(mine.id).id == mine.id
        shutil.copy(tmp_path / f"{other.id}.safetensors", tmp_path / f"{mine.id}.safetensors")
        with pytest.raises(CodecError, match=other.id):
            Shelf(tmp_path).get(mine.id)

    def test_the_newest_of_each_model_is_found_without_reading_the_others(
        self, tmp_path, monkeypatch
    ) -> None:
        shelf = Shelf(tmp_path)
        ids = {}
        for i, model in enumerate(("one", "two", "two")):
            ids[i] = shelf.add(replace(KNOWN, model=model, measured={"run": i})).id
            os.utime(tmp_path / f"{ids[i]}.safetensors", (i, i))
        (tmp_path / "0123456789abcdef.safetensors").write_bytes(b"\xff" * 40)
        read: list[str] = []
        really = Calibration.read.__func__  # type: ignore[attr-defined]

        def reading(cls, path):
            read.append(path.stem)
            return really(cls, path)

        monkeypatch.setattr(Calibration, "read", classmethod(reading))
        fresh = Shelf(tmp_path)
        assert fresh.of_model("two").id == ids[2]  # type: ignore[union-attr]
        assert fresh.of_model("three") is None and read == [ids[2]]
        assert [found.id for found in fresh.all()] == [ids[2], ids[1], ids[0]]

    def test_ids_are_no_paths(self, tmp_path) -> None:
        for id in ("../../etc/passwd", "", "0" * 15, "G" * 16):
            with pytest.raises(CodecError):
                Shelf(tmp_path).get(id)


@pytest.mark.parametrize("mode", ["steps", "groups"])
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_payloads_are_a_codec_error_or_the_right_size(mode: str, data) -> None:
    spec = TensorSpec("k0", "BF16", (HEADS, 20, DIM))
    header = header_of(spec)
    coded = codec(mode=mode).encode(spec, to_bytes(keys(20), "BF16"), header)
    payload, params = bytearray(bytes(coded.data)), dict(coded.params)
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        payload = payload[: data.draw(st.integers(0, len(payload)))]
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(params)))
        params[name] = data.draw(
            st.sampled_from(
                [
                    None,
                    -1,
                    0,
                    1 << 40,
                    1e300,
                    float("nan"),
                    "",
                    "steps",
                    "groups",
                    [],
                    [[]],
                    {},
                    True,
                ]
            )
        )
    try:
        out = decode(spec, Coded("kvtc", bytes(payload), params), header, {"kvtc": codec()})
    except CodecError:
        return
    assert memoryview(out).nbytes == spec.nbytes


def test_each_of_several_models_is_coded_with_its_own_calibration(tmp_path) -> None:
    """A record doesn't say whose it is: the calibration that fits it is the one."""
    shelf = Shelf(tmp_path)
    unlike = calibration_for(K, V, rotary=Rotary(ROTARY.rates, interleaved=True))
    mine = shelf.add(replace(KNOWN, model="mine"))
    shelf.add(replace(unlike, model="other", measured={"other": 1}))
    policy = Policy("kvtc", shelf=shelf)
    record = Record(header_of(K, start=256), (to_bytes(keys(256, 256), "BF16"),))
    for order in (["other", "mine"], ["mine", "other"]):
        for model in order:
            policy.use_model(model)
        assert policy.encode(record).tensors[0].params["calibration"] == mine.id


def test_what_the_status_says(tmp_path) -> None:
    shelf = Shelf(tmp_path)
    policy = Policy("kvtc", quality="small", shelf=shelf)
    policy.use_model("a model")
    told = policy.describe()
    assert told["lossy"] is None and "thunder calibrate" in told["reason"]
    known = shelf.add(replace(KNOWN, measured={"held_out": {"small": {"kl": 0.01}}}))
    policy.use_model("a model")
    told = policy.describe()
    assert (told["mode"], told["quality"], told["lossy"], told["reason"]) == (
        ("kvtc", "small", "kvtc", "")
    )
    assert told["calibrations"] == [{"id": known.id, "model": "a model", **known.measured}]
    record = Record(header_of(K, start=256), (to_bytes(keys(256, 256), "BF16"),))
    stored = policy.encode(record)

    exact = Policy("auto", shelf=shelf)
    exact.use_model("a model")
    assert exact.describe()["lossy"] is None and exact.describe()["reason"] == ""
    (tmp_path / f"{known.id}.safetensors").unlink()
    later = Policy("kvtc", shelf=shelf)
    later.use_model("another")
    assert later.lossy is None
    later.record(stored)
    assert later.lossy == "kvtc", "it has read a lossy record"
