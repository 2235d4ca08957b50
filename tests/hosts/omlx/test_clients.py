"""The official clients, while the host's keepalives and the package's progress come between."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.harness.fleet import Fleet
from tests.harness.models import Model, text_of
from tests.harness.server import Server
from tests.hosts.omlx.serving import NAME

SLOW = 5.0
"""Seconds that one model call takes, so that two signs come meanwhile."""
HOW: dict[str, dict[str, Any]] = {
    "body": {"extra_body": {"thunder": {"progress": True}}},
    "header": {"extra_headers": {"X-Thunder-Progress": "1"}},
}
"""The two ways to ask for progress."""
FORMS = {"body": "chunk", "header": "comment"}
"""Both forms of the host's own keepalive, each with one of those ways: the host reads one where it
gets a request and the other where it writes, and neither sees the other."""
COMMON: dict[str, Any] = {"model": NAME, "max_tokens": 6, "temperature": 0}


@pytest.fixture
def server(how: str, fleet: Fleet, full: Model) -> Server:
    return fleet.server(full, args=["--sse-keepalive-mode", FORMS[how]])


def told(events: list[dict[str, Any]]) -> bool:
    """Whether there was progress; what it says must be right for a prompt of 200 tokens and more."""
    found = [event["thunder"]["progress"] for event in events if event.get("thunder")]
    for progress in found:
        assert 0 <= progress["tokens_done"] < progress["tokens_total"]
        assert progress["tokens_total"] >= 200
    return len(found) >= 2


@pytest.mark.parametrize("how", HOW)
def test_openai(server: Server, seed: int, how: str) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")

    def streamed(stream: Any) -> list[dict[str, Any]]:
        return [json.loads(chunk.model_dump_json()) for chunk in stream]

    messages: Any = [{"role": "user", "content": text_of(200, seed)}]
    chat = client.chat.completions.create
    server.inject(after=0, sleep=SLOW)
    events = streamed(chat(messages=messages, stream=True, **COMMON, **HOW[how]))
    assert told(events)
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    whole = chat(messages=messages, **COMMON).choices[0].message.content
    assert text.strip() == whole != ""  # the host strips it

    prompt = text_of(200, seed + 1)
    complete = client.completions.create
    server.inject(after=0, sleep=SLOW)
    events = streamed(complete(prompt=prompt, stream=True, **COMMON, **HOW[how]))
    assert told(events)
    text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
    assert text == complete(prompt=prompt, **COMMON).choices[0].text != ""
    # Control: a client that does not ask is told nothing.
    server.inject(after=0, sleep=SLOW)
    assert not told(streamed(complete(prompt=text_of(200, seed + 2), stream=True, **COMMON)))


@pytest.mark.parametrize("how", HOW)
def test_anthropic(server: Server, seed: int, how: str) -> None:
    """Progress comes in pings, which this client passes over: they are read from its raw lines."""
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="none")

    def asked(number: int, extra: dict[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": text_of(200, seed + number)}]
        # Newer versions of the client have no argument for the temperature.
        body = extra.get("extra_body", {}) | {"temperature": 0}
        return {"model": NAME, "max_tokens": 6, "messages": messages, **extra, "extra_body": body}

    server.inject(after=0, sleep=SLOW)
    with client.messages.stream(**asked(0, HOW[how])) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason == "max_tokens"
    whole = client.messages.create(**asked(0, {})).content
    assert text.strip() == "".join(b.text for b in whole if b.type == "text").strip() != ""

    for number, extra in ((1, HOW[how]), (2, {})):
        server.inject(after=0, sleep=SLOW)
        raw = client.messages.with_streaming_response
        with raw.create(**asked(number, extra), stream=True) as response:
            lines = list(response.iter_lines())
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert told(events) == bool(extra)
