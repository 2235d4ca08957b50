"""Contexts in Anthropic's messages and in responses: the stock answer to the whole, in the same form."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from tests.e2e.coded import FAR
from tests.e2e.handing import call, conversation
from tests.harness.client import Json
from tests.harness.compare import assert_same
from tests.harness.models import Model, text_of
from tests.harness.server import Server
from tests.hosts.omlx.serving import NAME, OmlxFleet, OmlxServer
from tests.hosts.omlx.test_api import cached, events, total
from tests.hosts.omlx.test_handoff import NEXT, hand_over, reading

_unasked = count(5_000_000)
LOOK = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "x", "parameters": LOOK}}]


def message(messages: list[Json]) -> Json:
    system = [m["content"] for m in messages if m["role"] == "system"]
    rest = [m for m in messages if m["role"] != "system"]
    # Some versions split the usage for clients that ask for caching only.
    rest[-1] = rest[-1] | {
        "content": [
            {
                "type": "text",
                "text": rest[-1]["content"],
                "cache_control": {"type": "ephemeral"},
            }
        ]
    }
    return {"messages": rest, "max_tokens": 6} | ({"system": system[0]} if system else {})


def response(messages: list[Json]) -> Json:
    system = [m["content"] for m in messages if m["role"] == "system"]
    rest = [{"type": "message", **m} for m in messages if m["role"] != "system"]
    return {"input": rest, "max_output_tokens": 6} | ({"instructions": system[0]} if system else {})


@dataclass(frozen=True)
class Form:
    path: str
    body: Callable[[list[Json]], Json]
    tool: Json


FORMS = {
    "message": Form(
        "/v1/messages", message, {"name": "look", "description": "x", "input_schema": LOOK}
    ),
    "response": Form("/v1/responses", response, {"type": "function", **TOOLS[0]["function"]}),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


@dataclass(frozen=True)
class Said:
    """An answer in any form."""

    status: int
    id: str
    usage: Json
    told: Json
    """The header that says how a context was used; of a refusal, its body."""
    rows: list[Any]
    """Tokens and their logprobs."""


def asked(server: Server, form: Form, messages: list[Json], **fields: Any) -> Said:
    assert isinstance(server, OmlxServer)
    start = server.answers_file.stat().st_size if server.answers_file.exists() else 0
    body = {"model": NAME, "temperature": 0, **form.body(messages), **fields}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        kind = {"Content-Type": "application/json"}
        connection.request("POST", form.path, json.dumps(body), kind)
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    if answer.status != 200:
        return Said(answer.status, "", {}, json.loads(text), [])
    found = list(events(text)) if fields.get("stream") else [json.loads(text)]
    wholes = [e.get("message") or e.get("response") or e for e in found]
    with server.answers_file.open() as file:
        file.seek(start)
        rows = [(r["token"], r["logprob"]) for r in map(json.loads, file)]
    return Said(
        200,
        next(w["id"] for w in wholes if w.get("id")),
        [u for w in wholes if (u := w.get("usage"))][-1],
        json.loads(answer.headers.get("x-thunder-context", "null")),
        rows,
    )


def expected(fleet: OmlxFleet, model: Model, form: Form, messages: list[Json], **more: Any) -> Said:
    """The stock server's answer, computed without a cache; the server is the references' own."""
    # A question never asked before starts it where it isn't running.
    fleet.expected(model, prompt=text_of(20, next(_unasked)), telling=False)
    found = [s for key, s in fleet._idle.items() if "reference" in key and str(model.path) in key]
    said = asked(found[0], form, messages, **more)
    assert said.status == 200 and len({token for token, _ in said.rows}) > 1
    return said


def same(one: Said, other: Said) -> bool:
    return one.rows == other.rows and total(one.usage) == total(other.usage)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_goes_on(fleet: OmlxFleet, model: Model, form: Form, stream: bool, seed: int) -> None:
    server = fleet.shared(model)
    read = reading(seed, system=100)
    handed = hand_over(server, messages=read)
    stock = expected(fleet, model, form, [*read, *NEXT])
    with server.watch() as calls:
        answer = asked(server, form, NEXT, thunder={"handoff": handed["id"]}, stream=stream)
    assert same(stock, answer), (stock, answer)
    assert answer.told["handoff"]["used"] is True and answer.told["handoff"]["form"]
    skipped = cached(answer.usage)
    assert 0 <= skipped - handed["tokens"] <= 3
    # The last token of an answer is computed, but not told.
    assert calls.prompt_tokens_run(len(answer.rows)) == total(answer.usage) - skipped
    assert answer.usage["context_pilot"]["cached_tokens"] == skipped
    other = hand_over(server, messages=reading(seed + 5, system=100))
    wrong = asked(server, form, NEXT, thunder={"handoff": other["id"]}, stream=stream)
    assert wrong.rows != stock.rows, "the control: another context"


def test_coded(fleet: OmlxFleet, full: Model, form: Form, seed: int) -> None:
    server = fleet.shared(full)
    read = reading(seed)
    handed = hand_over(server, messages=read, precision="int8")
    answer = asked(server, form, NEXT, thunder={"handoff": handed["id"]})
    assert cached(answer.usage) == handed["tokens"]
    assert answer.usage["context_pilot"]["lossy"] == "int8"
    stock = expected(fleet, full, form, [*read, *NEXT])
    assert answer.rows != stock.rows and answer.rows[0][0] == stock.rows[0][0]
    assert abs(answer.rows[0][1] - stock.rows[0][1]) < FAR


def test_a_name_a_refusal_and_a_text_in_its_place(
    fleet: OmlxFleet, full: Model, form: Form, seed: int
) -> None:
    server = fleet.server(full)
    read = reading(seed, system=100)
    order = {"model": NAME, "messages": read}
    assert call(server, "POST", "/thunder/caches/base", order)[0] == 200
    stock = expected(fleet, full, form, [*read, *NEXT])
    assert same(stock, asked(server, form, NEXT, thunder={"cache": "base"}))
    assert call(server, "DELETE", "/thunder/caches/base")[1]["released"] is True
    refused = asked(server, form, NEXT, thunder={"cache": "base"})
    assert (refused.status, refused.told["reason"]) == (404, "unknown"), refused
    text = text_of(12, seed + 3)
    answer = asked(server, form, NEXT, thunder={"cache": "base", "fallback_text": text})
    instead = [{"role": "user", "content": text}, *NEXT]
    assert same(expected(fleet, full, form, instead), answer)
    assert answer.told["cache"]["used"] is False
    completion = hand_over(server, prompt=text_of(60, seed))
    refused = asked(server, form, NEXT, thunder={"handoff": completion["id"]})
    assert (refused.status, refused.told["reason"]) == (422, "form")


def test_its_tools_come_along(fleet: OmlxFleet, full: Model, form: Form, seed: int) -> None:
    server = fleet.shared(full)
    read = reading(seed, system=100)
    handed = hand_over(server, messages=read, tools=TOOLS)
    stock = expected(fleet, full, form, [*read, *NEXT], tools=[form.tool])
    answer = asked(server, form, NEXT, thunder={"handoff": handed["id"]})
    assert same(stock, answer), (stock, answer)
    assert not same(expected(fleet, full, form, [*read, *NEXT]), answer), "the control"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_after_its_answer(
    fleet: OmlxFleet, full: Model, form: Form, stream: bool, seed: int
) -> None:
    """What was answered in this form is handed over, and a chat goes on from it."""
    server = fleet.shared(full)
    read = conversation(seed)
    first = asked(server, form, read, stream=stream)
    handed = hand_over(server, request=first.id, answer=False)
    answer = server.chat(NEXT, thunder={"handoff": handed["id"]})
    assert_same(fleet.expected(full, messages=[*read, *NEXT]), answer)
    handed = hand_over(server, request=first.id)
    assert handed["tokens"] >= total(first.usage) + len(first.rows) - 1
    answer = asked(server, form, NEXT, thunder={"handoff": handed["id"]})
    assert answer.told["handoff"]["used"] and cached(answer.usage) >= handed["tokens"]
