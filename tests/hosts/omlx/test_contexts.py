"""Exact contexts of chats on oMLX: the stock answer to one long conversation; what does not fit is refused."""

from __future__ import annotations

import json

import pytest

from tests.e2e.handing import call, conversation
from tests.e2e.steps import served
from tests.harness.client import HttpError
from tests.harness.compare import assert_same
from tests.harness.models import Model, ModelFactory, text_of
from tests.hosts.omlx.serving import NAME, OmlxFleet

NEXT = [{"role": "user", "content": text_of(20, 77)}]


def test_handed_messages(fleet: OmlxFleet, model: Model, seed: int) -> None:
    server = fleet.shared(model)
    read = [*conversation(seed), {"role": "assistant", "content": text_of(9, seed + 2)}]
    order = {"model": NAME, "messages": read}
    status, handed = call(server, "POST", "/thunder/handoff", order)
    assert status == 200, handed
    with server.watch() as calls:
        answer = server.chat(NEXT, thunder={"handoff": handed["id"]})
    assert_same(fleet.expected(model, messages=[*read, *NEXT]), answer)
    assert answer.prompt_tokens is not None and answer.cached_tokens is not None
    # What is kept reaches into the header of the next message.
    assert handed["tokens"] == handed["stored_tokens"]
    assert 0 <= answer.cached_tokens - handed["tokens"] <= 3
    run = calls.prompt_tokens_run(answer.usage["completion_tokens"])
    assert run == answer.prompt_tokens - answer.cached_tokens
    path = f"/thunder/handoff/{handed['id']}"
    assert call(server, "GET", path)[1]["holders"] == ["maker"]
    assert call(server, "DELETE", path)[1]["released"] is True
    with pytest.raises(HttpError) as caught:
        server.chat(NEXT, thunder={"handoff": handed["id"]})
    assert caught.value.status == 404
    server.chat(NEXT, thunder={"handoff": handed["id"], "fallback_text": "text"})


def test_an_earlier_answer_and_a_named_cache(fleet: OmlxFleet, full: Model, seed: int) -> None:
    server = fleet.shared(full)
    read = conversation(seed)
    first = server.chat(read)
    order = {"request": first.raw["id"], "thinking": "cut"}
    status, handed = call(server, "POST", "/thunder/handoff", order)
    assert status == 200, handed
    said = {"role": "assistant", "content": first.text}
    answer = server.chat(NEXT, thunder={"handoff": handed["id"]})
    assert_same(fleet.expected(full, messages=[*read, said, *NEXT]), answer)
    assert answer.cached_tokens is not None
    assert 0 <= answer.cached_tokens - handed["tokens"] <= 3
    order = {"model": NAME, "messages": read}
    assert call(server, "POST", "/thunder/caches/base", order)[0] == 200
    assert call(server, "GET", "/thunder/caches")[1]["caches"][0]["name"] == "base"
    answer = server.chat(NEXT, thunder={"cache": "base"})
    assert_same(fleet.expected(full, messages=[*read, *NEXT]), answer)
    assert call(server, "DELETE", "/thunder/caches/base")[1]["released"] is True


def test_refusals(fleet: OmlxFleet, models: ModelFactory, full: Model, seed: int) -> None:
    """Another model, hostile ids, orders that make no sense; nothing else is touched."""
    server = fleet.server(full)
    order = {"model": NAME, "messages": conversation(seed)}
    status, handed = call(server, "POST", "/thunder/handoff", order)
    assert status == 200, handed
    other = fleet.server(models.get("llama"), cache_dir=server.cache_dir)
    for one, id, expected, words in (
        (other, handed["id"], 409, "expected model"),
        (server, "../x", 404, "48 hex digits"),
        (server, "0" * 48, 404, "known"),
    ):
        with pytest.raises(HttpError) as caught:
            one.chat(NEXT, thunder={"handoff": id})
        assert caught.value.status == expected
        assert words in json.loads(caught.value.body)["error"]
    for wrong in ({"precision": "int3"}, {"prompt": "x"}, {"messages": None, "prompt": ["x"]}):
        status, told = call(server, "POST", "/thunder/handoff", order | wrong)
        assert (status, told["reason"]) == (400, "request"), wrong
    served(fleet, server, full, prompt=text_of(60, seed))
