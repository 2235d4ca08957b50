"""Contexts on oMLX beyond exact ones of chats: coded, of completions, with an answer's own tokens.

The host merges messages of one role that follow each other, so contexts here end with an assistant's, where
the answer is to be that of one conversation.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
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
from tests.e2e.folder import CacheFolder, wait_for
from tests.e2e.handing import call, conversation, goes_on, hand_over, refused, text_after
from tests.e2e.steps import MISS, served
from tests.harness.client import Json
from tests.harness.compare import Answer, assert_same, differences
from tests.harness.fleet import ask
from tests.harness.models import Model, text_of
from tests.harness.server import Server
from tests.hosts.omlx.serving import NAME, OmlxFleet

NEXT = [{"role": "user", "content": text_of(20, 77)}]
WORDS = 3
"""Tokens of an answer that is to have just the tokens of its text."""


def reading(seed: int, system: int = 400) -> list[Json]:
    said = {"role": "assistant", "content": text_of(9, seed + 2)}
    return [*conversation(seed, system=system), said]


def header(server: Server, messages: list[Json], thunder: Json) -> Json:
    """What the response's header says of the context."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        body = {"model": NAME, "messages": messages, "max_tokens": 2, "thunder": thunder}
        path, kind = "/v1/chat/completions", {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), kind)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read()
        return dict(json.loads(response.headers["x-thunder-context"]))
    finally:
        connection.close()


# Less than full precision


@pytest.mark.parametrize("precision", ["int8", "mixed"])
def test_near_smaller_and_apart(fleet: OmlxFleet, model: Model, precision: str, seed: int) -> None:
    server = fleet.shared(model)
    read = reading(seed)
    whole = [*read, *NEXT]
    handed = smaller(server, read, precision, 0.75 if precision == "int8" else 0.8)
    folder = CacheFolder(server.cache_dir)
    wait_for(lambda: not server.status()["cache"]["queue"]["blocks"], "the writers")
    before = folder.records()
    expected = fleet.expected(model, messages=whole)
    for _ in range(2):
        answer = goes_on_near(server, handed, expected, NEXT, precision)
        assert precision == "mixed" or worst(expected, answer) < FAR
    told = header(server, NEXT, {"handoff": handed["id"]})["handoff"]
    assert (told["used"], told["precision"]) == (True, precision)
    wait_for(lambda: not server.status()["cache"]["queue"]["blocks"], "the writers")
    assert folder.records() == before, "something computed after a coded state was stored"
    # The exact answer to the very same tokens is the stock one, from exact state.
    answer = served(fleet, server, model, messages=whole, cached=range(handed["tokens"], 999))
    assert "lossy" not in answer.usage["context_pilot"]


def test_a_wrong_context_is_far(fleet: OmlxFleet, full: Model, seed: int) -> None:
    """The control: another context is further off than any precision."""
    server = fleet.shared(full)
    read, other = reading(seed), reading(seed + 5)
    handed = hand_over(server, messages=other, precision="int8")
    answer = server.chat(NEXT, thunder={"handoff": handed["id"]})
    assert worst(fleet.expected(full, messages=[*read, *NEXT]), answer) > FAR


def test_its_state_is_its_own(fleet: OmlxFleet, full: Model, seed: int, tmp_path: Path) -> None:
    """It needs nothing of the cache, serves in another process, and damaged it is not used."""
    read = reading(seed, system=200)
    other, handed, file = in_another_process(fleet, full, tmp_path, read, NEXT)
    for _ in spoiled(file):
        assert refused(other, handed["id"], NEXT)[0] == 409
    text = text_of(12, seed + 3)
    answer = other.chat(NEXT, thunder={"handoff": handed["id"], "fallback_text": text})
    instead = [{"role": "user", "content": text}, *NEXT]
    assert_same(fleet.expected(full, messages=instead), answer)
    assert call(other, "DELETE", f"/thunder/handoff/{handed['id']}")[1]["released"]
    assert not list(tmp_path.glob("v1/contexts/handoff/*"))


def test_words_that_do_not_follow_a_coded_state(fleet: OmlxFleet, full: Model, seed: int) -> None:
    """Found out when the host has rendered the messages, and still refused with its own status."""
    server = fleet.shared(full)
    handed = hand_over(server, messages=reading(seed, system=60), precision="int8")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    status, told = refused(server, handed["id"], NEXT, tools=tools)
    assert (status, told["reason"]) == (422, "template"), told
    text = text_of(12, seed + 3)
    thunder = {"handoff": handed["id"], "fallback_text": text}
    answer = server.chat(NEXT, thunder=thunder, tools=tools)
    instead = [{"role": "user", "content": text}, *NEXT]
    assert_same(fleet.expected(full, messages=instead, tools=tools), answer)
    told = header(server, NEXT, thunder)["handoff"]
    assert told["used"] is True, "without the tools it follows"


def test_a_user_after_a_user(fleet: OmlxFleet, full: Model, seed: int) -> None:
    """The host would merge them; after a coded state the template's own form goes on from its tokens."""
    server = fleet.shared(full)
    read = conversation(seed, system=400)
    handed = hand_over(server, messages=read, precision="int8")
    answer = server.chat(NEXT, thunder={"handoff": handed["id"]})
    assert answer.cached_tokens == handed["tokens"]
    told = header(server, NEXT, {"handoff": handed["id"]})["handoff"]
    assert (told["form"], told["used"]) == ("continuation", True)
    expected = fleet.expected(full, prompt=full.chat([*read, *NEXT]))
    assert answer.prompt_tokens == expected.prompt_tokens
    assert worst(expected, answer) < FAR and expected.logprobs != answer.logprobs


def test_kvtc(fleet: OmlxFleet, full: Model, seed: int, tmp_path: Path) -> None:
    """After a calibration; before it, and when it has gone, it is refused."""
    cache = tmp_path / "cache"
    read = reading(seed)
    server = fleet.server(full, cache_dir=cache)
    order = {"model": NAME, "messages": read, "precision": "kvtc"}
    status, told = call(server, "POST", "/thunder/handoff", order)
    assert (status, told["reason"]) == (409, "calibration")
    calibrated(fleet, full, cache)
    handed = smaller(server, read, "kvtc", 0.75)
    expected = fleet.expected(full, messages=[*read, *NEXT])
    answer = goes_on_near(server, handed, expected, NEXT, "kvtc")
    assert mean(expected, answer) < FAR
    other = hand_over(server, messages=reading(seed + 5), precision="kvtc")
    assert mean(expected, server.chat(NEXT, thunder={"handoff": other["id"]})) > FAR, "the control"
    served(fleet, server, full, messages=[*read, *NEXT], cached=range(handed["tokens"], 999))
    (file,) = (cache / "calibrations").glob("*.safetensors")
    file.unlink()
    server.restart()
    status, told = refused(server, handed["id"], NEXT)
    assert status == 409 and "calibration" in told["error"]


# Text completions


def test_a_completions_prompt(fleet: OmlxFleet, model: Model, seed: int) -> None:
    server = fleet.shared(model)
    read, more = text_of(70, seed), text_of(20, seed + 1)
    handed = hand_over(server, prompt=read)
    assert handed["tokens"] == handed["stored_tokens"] == 70
    goes_on(fleet, server, model, {"prompt": read + more}, handed, prompt=more, cached=70)
    other = hand_over(server, prompt=text_of(70, seed + 9))
    answer = server.complete(more, thunder={"handoff": other["id"]})
    assert differences(fleet.expected(model, prompt=read + more), answer), "the control"
    assert refused(server, handed["id"], NEXT)[1]["reason"] == "form"


def round_trips(
    server: Server,
    model: Model,
    request: Callable[[int], Json],
    before: Callable[[int], str],
    after: str,
) -> tuple[int, Answer, str]:
    """A request whose answer's text has just its tokens: its number, the answer, and the whole text."""
    for i in range(20):
        first = ask(server, request(i))
        whole = before(i) + model.text(list(first.tokens)) + after
        ids = [*model.tokens(before(i)), *first.tokens, *model.tokens(after)]
        if model.tokens(whole) == ids and len(first.tokens) == WORDS:
            return i, first, whole
    raise AssertionError("no answer's text has just its tokens")


def test_a_completion_after_its_answer(fleet: OmlxFleet, full: Model, seed: int) -> None:
    server = fleet.shared(full)
    more = text_of(20, seed + 1)

    def read(i: int) -> str:
        return text_of(70, seed + 10 * i)

    _, first, whole = round_trips(
        server, full, lambda i: {"prompt": read(i), "max_tokens": WORDS}, read, more
    )
    handed = hand_over(server, request=first.raw["id"])
    count = 70 + WORDS
    assert handed["tokens"] == count
    goes_on(fleet, server, full, {"prompt": whole}, handed, prompt=more, cached=count)
    coded = hand_over(server, request=first.raw["id"], precision="int8")
    near = server.complete(more, thunder={"handoff": coded["id"]})
    assert near.usage["context_pilot"]["lossy"] == "int8" and near.cached_tokens == count
    expected = fleet.expected(full, prompt=whole)
    assert expected.logprobs != near.logprobs and worst(expected, near) < FAR


def test_a_completion_that_a_stop_string_cut(fleet: OmlxFleet, full: Model, seed: int) -> None:
    """The host ends it by itself: its text is handed over."""
    server = fleet.shared(full)
    read, more = text_of(70, seed), text_of(20, seed + 1)
    text = server.complete(read).text
    cut = server.complete(read, stop=[text[6:9]])
    assert len(cut.text) < len(text)
    handed = hand_over(server, request=cut.raw["id"])
    assert handed["tokens"] == len(full.tokens(read + cut.text))
    answer = server.complete(more, thunder={"handoff": handed["id"]})
    assert_same(fleet.expected(full, prompt=read + cut.text + more), answer)
    assert answer.cached_tokens == handed["tokens"]


# An answer's own tokens


def test_after_an_answer_with_its_own_tokens(fleet: OmlxFleet, model: Model, seed: int) -> None:
    """The template leaves no thinking in earlier turns; the handed context has it all the same."""
    server = fleet.shared(model)

    def read(i: int) -> list[Json]:
        return conversation(seed + 10 * i)

    _, first, whole = round_trips(
        server,
        model,
        lambda i: {"messages": read(i), "max_tokens": WORDS},
        lambda i: model.chat(read(i)),
        text_after(model, NEXT),
    )
    handed = hand_over(server, request=first.raw["id"])
    assert first.prompt_tokens is not None
    count = first.prompt_tokens + WORDS
    assert handed["tokens"] == count
    goes_on(
        fleet,
        server,
        model,
        {"prompt": whole},
        handed,
        messages=NEXT,
        cached=count,
        tolerance=1e-4 if model.spec.arch == "gemma3" else 0.0,
    )
    told = header(server, NEXT, {"handoff": handed["id"]})["handoff"]
    assert (told["form"], told["tokens"]) == ("continuation", count)


# While it is generated


def test_coded_while_the_answer_is_generated(fleet: OmlxFleet, full: Model, seed: int) -> None:
    """The prompt's blocks are coded before the answer ends; whoever uses the id early waits."""
    server = fleet.server(full)
    read = conversation(seed, system=400)
    length = len(full.tokens(full.chat(read)))
    server.chat(conversation(seed + 9), max_tokens=1)  # loads the model
    body = {"messages": read, "max_tokens": 400, "temperature": 0.0}
    with promised(server, body, length // 32) as (promise, path, rest):
        assert call(server, "DELETE", path)[0] == 409
        used = server.chat(NEXT, thunder={"handoff": promise["id"]})
        assert b"data: [DONE]" in rest()
    ready = call(server, "GET", path)[1]
    assert used.cached_tokens == ready["tokens"] > length
    assert used.usage["context_pilot"]["lossy"] == "int8"


def test_a_promise_that_cannot_be_kept(fleet: OmlxFleet, full: Model, seed: int) -> None:
    server = fleet.shared(full)
    order = {
        "model": NAME,
        "messages": conversation(seed),
        "wait": False,
        "precision": "kvtc",
    }
    status, told = call(server, "POST", "/thunder/handoff", order)
    assert status == 202
    status, told = refused(server, told["id"], NEXT)
    assert (status, told["reason"]) == (409, "calibration")


def test_nothing_is_kept_where_asked(fleet: OmlxFleet, full: Model, seed: int) -> None:
    server = fleet.shared(full)
    prompt = text_of(100, seed)
    served(fleet, server, full, prompt=prompt, thunder={"keep": False}, cached=MISS)
    served(fleet, server, full, prompt=prompt, cached=MISS)
    served(fleet, server, full, prompt=prompt, cached=100)
