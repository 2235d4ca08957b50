"""Contexts in less than full precision: smaller, near, and never met by an exact look-up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.folder import wait_for
from tests.e2e.handing import begun, call, conversation, hand_over, in_words
from tests.e2e.steps import served
from tests.e2e.test_codecs import calibrated
from tests.harness.client import HttpError
from tests.harness.compare import Answer, differences
from tests.harness.fleet import Fleet
from tests.harness.models import Model, ModelFactory, text_of

NEXT = [{"role": "user", "content": text_of(20, 77)}]
FAR = 0.3
"""How far int8 may be off in tiny random models, whose attention is peaked; see also tests/bench."""


def worst(expected: Answer, found: Answer) -> float:
    """Largest difference of the logprobs up to the first other token."""
    same = [a == b for a, b in zip(expected.tokens, found.tokens, strict=True)]
    count = same.index(False) if False in same else len(same)
    off = [abs(a - b) for a, b in zip(expected.logprobs[:count], found.logprobs, strict=False)]
    return max(off, default=99.0)


def mean(expected: Answer, found: Answer, least: int = 4) -> float:
    """Mean difference of the logprobs up to the first other token, of which `least` come before it."""
    same = [a == b for a, b in zip(expected.tokens, found.tokens, strict=True)]
    count = same.index(False) if False in same else len(same)
    off = [abs(a - b) for a, b in zip(expected.logprobs[:count], found.logprobs, strict=False)]
    return sum(off) / count if count >= least else 99.0


@pytest.mark.parametrize("precision", ["int8", "mixed"])
@pytest.mark.one_hybrid
def test_near_smaller_and_apart(fleet: Fleet, model: Model, precision: str, seed: int) -> None:
    server = fleet.shared(model)
    read = conversation(seed, system=400)
    whole = [*read, *NEXT]
    exact = hand_over(server, messages=read)
    handed = hand_over(server, messages=read, precision=precision)
    assert handed["checksum"] != exact["checksum"]
    assert handed["size"] < exact["size"] * (0.75 if precision == "int8" else 0.8)
    for _ in range(2):
        with server.watch() as calls:
            answer = server.chat(NEXT, thunder={"handoff": handed["id"]})
        assert (
            answer.cached_tokens == handed["tokens"] == answer.raw["thunder"]["handoff"]["tokens"]
        )
        assert answer.prompt_tokens is not None and answer.cached_tokens is not None
        run = calls.prompt_tokens_run(answer.usage["completion_tokens"])
        assert run == answer.prompt_tokens - answer.cached_tokens
        assert answer.usage["context_pilot"]["lossy"] == precision
        expected = fleet.expected(model, messages=whole)
        assert differences(expected, answer), "a coded state gave the exact answer"
        assert precision == "mixed" or worst(expected, answer) < FAR
    # The exact answer to the very same tokens, before and after, is the stock one.
    served(fleet, server, model, messages=whole, cached=range(handed["tokens"], 999))


def test_a_wrong_context_is_far(fleet: Fleet, full: Model, seed: int) -> None:
    """The control: another context is further off than any precision."""
    server = fleet.shared(full)
    read, other = conversation(seed, system=400), conversation(seed + 5, system=400)
    handed = hand_over(server, messages=other, precision="int8")
    answer = server.chat(NEXT, thunder={"handoff": handed["id"]})
    whole = [*read, *NEXT]
    assert worst(fleet.expected(full, messages=whole), answer) > FAR


def test_its_state_is_its_own(fleet: Fleet, full: Model, seed: int, tmp_path: Path) -> None:
    """It needs nothing of the cache, serves in another process, and goes when it is released."""
    server = fleet.server(full, cache_dir=tmp_path)
    read = conversation(seed, system=200)
    handed = hand_over(server, messages=read, precision="int8")
    first = server.chat(NEXT, thunder={"handoff": handed["id"]})
    server.stop()
    for kind in ("blocks", "snapshots"):
        for file in tmp_path.glob(f"v1/{kind}/**/*.safetensors"):
            file.unlink()
    other = fleet.server(full, cache_dir=tmp_path)
    again = other.chat(NEXT, thunder={"handoff": handed["id"]})
    assert (again.tokens, again.logprobs) == (first.tokens, first.logprobs)
    (file,) = tmp_path.glob("v1/contexts/handoff/*.safetensors")
    assert file.stat().st_mode & 0o777 == 0o600
    whole = file.read_bytes()
    for damaged in (whole[:-9], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        file.write_bytes(damaged)
        with pytest.raises(HttpError) as caught:
            other.chat(NEXT, thunder={"handoff": handed["id"]})
        assert caught.value.status == 409
    assert call(other, "DELETE", f"/thunder/handoff/{handed['id']}")[1]["released"]
    assert not list(tmp_path.glob("v1/contexts/handoff/*"))


def test_after_an_answer_and_on(fleet: Fleet, full: Model, seed: int) -> None:
    """Three agents in a row, the second one on a coded context; what it says is handed on."""
    server = fleet.shared(full)
    read, words = conversation(seed, system=100), in_words(full)
    first = server.chat(read, **words)
    handed = hand_over(server, request=first.raw["id"], precision="int8")
    second = server.chat(NEXT, thunder={"handoff": handed["id"]}, **words)
    last = hand_over(server, request=second.raw["id"])
    assert last["tokens"] == (second.prompt_tokens or 0) + 12
    answer = server.chat(NEXT, thunder={"handoff": last["id"]})
    assert answer.cached_tokens == last["tokens"]


@pytest.mark.one_hybrid
def test_kvtc_after_a_calibration(
    fleet: Fleet, models: ModelFactory, model: Model, kind: str, seed: int, tmp_path: Path
) -> None:
    """Refused before it is made, which a running server notices; then near, smaller and apart."""
    cache = tmp_path / "cache"
    server = fleet.server(model, cache_dir=cache, env={"THUNDER_CODEC_QUALITY": "high"})
    read = conversation(seed, system=400)
    body = {"messages": read, "precision": "kvtc"}
    status, told = call(server, "POST", "/thunder/handoff", body)
    assert (status, told["reason"]) == (409, "calibration")
    calibrated(fleet, model, cache, tmp_path)
    exact = hand_over(server, messages=read)
    handed = hand_over(server, **body)
    assert handed["precision"] == "kvtc" and handed["checksum"] != exact["checksum"]
    assert handed["tokens"] == handed["next_position"] == handed["stored_tokens"] == exact["tokens"]
    assert handed["size"] < exact["size"] * 0.8
    with server.watch() as calls:
        answer = server.chat(NEXT, thunder={"handoff": handed["id"]})
    assert answer.cached_tokens == handed["tokens"] and answer.prompt_tokens is not None
    run = calls.prompt_tokens_run(answer.usage["completion_tokens"])
    assert run == answer.prompt_tokens - answer.cached_tokens
    assert answer.raw["thunder"]["handoff"]["precision"] == "kvtc"
    assert answer.usage["context_pilot"]["lossy"] == "kvtc"
    expected = fleet.expected(model, messages=[*read, *NEXT])
    assert differences(expected, answer), "a coded state gave the exact answer"
    # Random models come near ties, and no two calibrations are the same: one token must be.
    assert mean(expected, answer, least=1) < FAR
    served(fleet, server, model, messages=[*read, *NEXT], cached=range(handed["tokens"], 999))
    # The controls: another context is far off; and no other calibration reads this one.
    other = hand_over(server, messages=conversation(seed + 5, system=400), precision="kvtc")
    far = server.chat(NEXT, thunder={"handoff": other["id"]})
    assert far.tokens != expected.tokens
    assert kind != "full" or mean(expected, far) > FAR
    (mine,) = (cache / "calibrations").glob("*.safetensors")
    calibration = mine.read_bytes()
    calibrated(fleet, models.get("llama"), tmp_path / "llama", tmp_path)
    (others,) = (tmp_path / "llama" / "calibrations").glob("*.safetensors")
    wrong = (others.read_bytes(), calibration[:-1] + bytes([calibration[-1] ^ 1]))
    for content in wrong:
        mine.write_bytes(content)
        server.restart()
        with pytest.raises(HttpError) as caught:
            server.chat(NEXT, thunder={"handoff": handed["id"]})
        assert caught.value.status == 409 and "calibration" in caught.value.body
    mine.write_bytes(calibration)
    again = server.chat(NEXT, thunder={"handoff": handed["id"]})
    assert (again.tokens, again.logprobs) == (answer.tokens, answer.logprobs)
    (file,) = cache.glob(f"v1/contexts/handoff/{handed['id']}*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(HttpError) as caught:
        server.chat(NEXT, thunder={"handoff": handed["id"]})
    assert caught.value.status == 409 and "checksum" in caught.value.body


def test_coded_while_the_answer_is_generated(fleet: Fleet, full: Model, seed: int) -> None:
    """The prompt's blocks are coded before the answer ends; whoever uses the id early waits."""
    server = fleet.server(full)
    read = conversation(seed, system=400)
    body = {"messages": read, "max_tokens": 400, "temperature": 0.0, "stream": True}
    length = len(full.tokens(full.chat(read)))
    with begun(server, body | {"logit_bias": {"0": -100.0}}) as (id, rest):
        order = {"request": id, "precision": "int8", "wait": False}
        status, promised = call(server, "POST", "/thunder/handoff", order)
        assert (status, promised["state"]) == (202, "pending"), promised
        path = f"/thunder/handoff/{promised['id']}"
        told = wait_for(
            lambda: (
                (found := call(server, "GET", path)[1]).get("coded_blocks", 99) >= length // 32
                and found
            ),
            "coded blocks",
        )
        assert told.get("state") == "pending", told
        used = server.chat(NEXT, thunder={"handoff": promised["id"]})
        assert rest().endswith(b"data: [DONE]\n\n")
    ready = call(server, "GET", path)[1]
    assert used.cached_tokens == ready["tokens"] == length + 400


def test_a_promise_that_cannot_be_kept(fleet: Fleet, full: Model, seed: int) -> None:
    server = fleet.shared(full)
    order = {"messages": conversation(seed), "wait": False, "precision": "kvtc"}
    status, told = call(server, "POST", "/thunder/handoff", order)
    assert status == 202
    with pytest.raises(HttpError) as caught:
        server.chat(NEXT, thunder={"handoff": told["id"]})
    assert caught.value.status == 409 and "calibration" in caught.value.body
