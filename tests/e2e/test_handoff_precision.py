"""Contexts in less than full precision: smaller, near, and never met by an exact look-up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.coded import (
    FAR,
    calibrated,
    goes_on_near,
    in_another_process,
    mean,
    promised,
    smaller,
    spoiled,
    worst,
)
from tests.e2e.handing import call, conversation, hand_over, in_words, refused
from tests.e2e.steps import served
from tests.harness.fleet import Fleet
from tests.harness.models import Model, ModelFactory, text_of

NEXT = [{"role": "user", "content": text_of(20, 77)}]


@pytest.mark.parametrize("precision", ["int8", "mixed"])
@pytest.mark.one_hybrid
def test_near_smaller_and_apart(fleet: Fleet, model: Model, precision: str, seed: int) -> None:
    server = fleet.shared(model)
    read = conversation(seed, system=400)
    whole = [*read, *NEXT]
    handed = smaller(server, read, precision, 0.75 if precision == "int8" else 0.8)
    expected = fleet.expected(model, messages=whole)
    for _ in range(2):
        answer = goes_on_near(server, handed, expected, NEXT, precision)
        assert answer.raw["thunder"]["handoff"]["tokens"] == handed["tokens"]
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
    read = conversation(seed, system=200)
    other, handed, file = in_another_process(fleet, full, tmp_path, read, NEXT)
    assert file.stat().st_mode & 0o777 == 0o600
    for _ in spoiled(file):
        assert refused(other, handed["id"], NEXT)[0] == 409
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
    server = fleet.server(model, cache_dir=cache)
    read = conversation(seed, system=400)
    body = {"messages": read, "precision": "kvtc"}
    status, told = call(server, "POST", "/thunder/handoff", body)
    assert (status, told["reason"]) == (409, "calibration")
    calibrated(fleet, model, cache)
    handed = smaller(server, read, "kvtc", 0.8)
    assert handed["tokens"] == handed["next_position"]
    expected = fleet.expected(model, messages=[*read, *NEXT])
    answer = goes_on_near(server, handed, expected, NEXT, "kvtc")
    assert answer.raw["thunder"]["handoff"]["precision"] == "kvtc"
    # The random hybrid is near a tie at its fourth token; the calibration is the same in every run.
    assert mean(expected, answer, least=3 if kind.startswith("hybrid") else 12) < FAR
    served(fleet, server, model, messages=[*read, *NEXT], cached=range(handed["tokens"], 999))
    # The controls: another context is far off; and no other calibration reads this one.
    other = hand_over(server, messages=conversation(seed + 5, system=400), precision="kvtc")
    far = server.chat(NEXT, thunder={"handoff": other["id"]})
    assert far.tokens != expected.tokens
    assert kind != "full" or mean(expected, far) > FAR
    (mine,) = (cache / "calibrations").glob("*.safetensors")
    calibration = mine.read_bytes()
    calibrated(fleet, models.get("llama"), tmp_path / "llama")
    (others,) = (tmp_path / "llama" / "calibrations").glob("*.safetensors")
    wrong = (others.read_bytes(), calibration[:-1] + bytes([calibration[-1] ^ 1]))
    for content in wrong:
        mine.write_bytes(content)
        server.restart()
        status, told = refused(server, handed["id"], NEXT)
        assert status == 409 and "calibration" in told["error"]
    mine.write_bytes(calibration)
    again = server.chat(NEXT, thunder={"handoff": handed["id"]})
    assert (again.tokens, again.logprobs) == (answer.tokens, answer.logprobs)
    (file,) = cache.glob(f"v1/contexts/handoff/{handed['id']}*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    status, told = refused(server, handed["id"], NEXT)
    assert status == 409 and "checksum" in told["error"]


def test_coded_while_the_answer_is_generated(fleet: Fleet, full: Model, seed: int) -> None:
    """The prompt's blocks are coded before the answer ends; whoever uses the id early waits."""
    server = fleet.server(full)
    read = conversation(seed, system=400)
    body = {"messages": read, "max_tokens": 400, "temperature": 0.0, "stream": True}
    length = len(full.tokens(full.chat(read)))
    body |= {"logit_bias": {"0": -100.0}}
    with promised(server, body, length // 32) as (promise, path, rest):
        used = server.chat(NEXT, thunder={"handoff": promise["id"]})
        assert rest().endswith(b"data: [DONE]\n\n")
    ready = call(server, "GET", path)[1]
    assert used.cached_tokens == ready["tokens"] == length + 400


def test_a_promise_that_cannot_be_kept(fleet: Fleet, full: Model, seed: int) -> None:
    server = fleet.shared(full)
    order = {"messages": conversation(seed), "wait": False, "precision": "kvtc"}
    status, told = call(server, "POST", "/thunder/handoff", order)
    assert status == 202
    status, told = refused(server, told["id"], NEXT)
    assert (status, told["reason"]) == (409, "calibration")
