"""Contexts handed from one request to another, as an agent's client does it."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.harness.client import HttpError, Json
from tests.harness.compare import Answer, assert_same
from tests.harness.fleet import Fleet, ask
from tests.harness.models import WORDS, Model, text_of
from tests.harness.server import Server


def call(
    server: Server,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    timeout: float = 60.0,
) -> tuple[int, Json]:
    """Status and JSON of a request to one of the package's routes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(
            method, path, data, {"Content-Type": "application/json", **(headers or {})}
        )
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"null")
    finally:
        connection.close()


@contextlib.contextmanager
def begun(server: Server, body: Json) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """A stream once its first chunk is there: the response's id, and a way to read the rest."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        headers = {"Content-Type": "application/json"}
        body = server.fields | {"stream": True} | body
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        assert response.status == 200
        first = next(line for line in response if line.startswith(b"data: "))
        yield json.loads(first[6:])["id"], response.read
    finally:
        connection.close()


def hand_over(server: Server, **body: Any) -> Json:
    """The descriptor of a new handoff."""
    status, descriptor = call(server, "POST", "/thunder/handoff", server.fields | body)
    assert status == 200, descriptor
    return descriptor


def refused(server: Server, id: str, messages: list[Json], **body: Any) -> tuple[int, Json]:
    """Status and body of the refusal to go on from a context."""
    with pytest.raises(HttpError) as caught:
        server.chat(messages, thunder={"handoff": id}, **body)
    return caught.value.status, json.loads(caught.value.body)


def in_words(model: Model) -> Json:
    """Fields that have the answer be of whole words, so that its text has just its tokens."""
    ids = [model.tokens(f" {word}")[0] for word in WORDS]
    return {"logit_bias": {str(i): 40.0 for i in ids}}


def conversation(seed: int, system: int = 60, user: int = 40) -> list[Json]:
    return [
        {"role": "system", "content": text_of(system, seed)},
        {"role": "user", "content": text_of(user, seed + 1)},
    ]


def text_after(model: Model, messages: list[Json]) -> str:
    """What the chat template puts after an answer, for these further messages."""
    mark = "MARK"
    before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
    return model.chat([*before, *messages]).partition(mark)[2]


def goes_on(
    fleet: Fleet,
    server: Server,
    model: Model,
    expected: Json,
    handed: Json,
    *,
    cached: int | range | None = None,
    tolerance: float = 0.0,
    **request: Any,
) -> Answer:
    """The answer that goes on from a handoff: that of the stock server to the `expected` request.

    The hit is proven: as many prompt tokens went through the model as were not reported as skipped.
    """
    same = {k: v for k, v in request.items() if k not in ("messages", "prompt", "thunder")}
    thunder = {"handoff": handed["id"], **request.pop("thunder", {})}
    with server.watch() as calls:
        answer = ask(server, request | {"thunder": thunder})
    reference = fleet.expected(model, **expected, **same)
    if "prompt" in expected and "messages" in request:
        # A chat tells thinking from the rest of the same tokens.
        reference = replace(reference, text=answer.text, reasoning=answer.reasoning)
    assert_same(reference, answer, tolerance)
    assert answer.prompt_tokens is not None and answer.cached_tokens is not None
    run = calls.prompt_tokens_run(answer.usage["completion_tokens"])
    assert run == answer.prompt_tokens - answer.cached_tokens
    if cached is not None:
        allowed = cached if isinstance(cached, range) else range(cached, cached + 1)
        assert answer.cached_tokens in allowed, f"{answer.cached_tokens} not in {allowed}"
    return answer
