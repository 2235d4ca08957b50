"""What clients see in each API form: reuse told, routes, progress, refusals, tenants."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.harness.client import HttpError
from tests.harness.fleet import Fleet
from tests.harness.models import Model, text_of
from tests.harness.server import Server
from tests.hosts.omlx.serving import NAME

Json = dict[str, Any]
SYSTEM = {"role": "system", "content": text_of(90, 1)}


def chat(text: str) -> Json:
    return {"messages": [SYSTEM, {"role": "user", "content": text}], "max_tokens": 4}


def message(text: str) -> Json:
    # Some versions split the usage for clients that ask for caching only.
    system = {"type": "text", "text": SYSTEM["content"], "cache_control": {"type": "ephemeral"}}
    asked = {"system": [system], "messages": [{"role": "user", "content": text}]}
    return {**asked, "max_tokens": 4}


def response(text: str) -> Json:
    return {"instructions": SYSTEM["content"], "input": text, "max_output_tokens": 4}


FORMS: dict[str, tuple[str, Callable[[str], Json]]] = {
    "chat": ("/v1/chat/completions", chat),
    "completion": ("/v1/completions", lambda text: {"prompt": text, "max_tokens": 4}),
    "message": ("/v1/messages", message),
    "response": ("/v1/responses", response),
}


@pytest.fixture
def server(fleet: Fleet, full: Model) -> Server:
    return fleet.shared(full)


def ask(
    server: Server, path: str, body: Json, *, stream: bool = False, **headers: str
) -> tuple[Json, list[str]]:
    """The usage of an answer, and the lines of its stream."""
    body = {"model": NAME, "temperature": 0, **body}
    if stream:
        body["stream"] = True
        if "completions" in path:
            body["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(
        "POST", path, json.dumps(body), {"Content-Type": "application/json", **named}
    )
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    if answer.status != 200:
        raise HttpError(answer.status, text)
    if not stream:
        return dict(json.loads(text)["usage"]), []
    usages = [
        found
        for event in events(text)
        if (found := event.get("usage") or (event.get("response") or {}).get("usage"))
    ]
    return dict(usages[-1]), text.splitlines()


def events(text: str) -> Iterator[Json]:
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def cached(usage: Json) -> int:
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return int(details["cached_tokens"])


def total(usage: Json) -> int:
    if "cache_read_input_tokens" in usage:
        parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        return sum(int(usage[part]) for part in parts)
    return int(usage.get("prompt_tokens") or usage["input_tokens"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("form", FORMS)
def test_reuse_is_told(server: Server, seed: int, form: str, stream: bool) -> None:
    """A first prompt, the same again, and one with another user message."""
    path, body = FORMS[form]
    text = text_of(60, seed)
    first, _ = ask(server, path, body(text), stream=stream)
    again, _ = ask(server, path, body(text), stream=stream)
    other, _ = ask(server, path, body(text_of(60, seed + 1)), stream=stream)

    assert cached(first) < total(first)
    told = again["context_pilot"]
    assert (told["skip"], told["source"]) == ("full", "ram")
    assert told["cached_tokens"] == cached(again) == total(again) == total(first)
    told = other["context_pilot"]
    assert told["skip"] == "none"
    assert told["cached_tokens"] == cached(other) < total(other)
    assert told["miss"]["reason"]
    if form == "completion":
        assert told["total_message_count"] == 0
    else:
        assert told["total_message_count"] == 2
        assert told["aligned_message_count"] == 1, told
        assert told["miss"]["role"] == "user"
        assert len(told["system_prompt_hash"]) == 16


def test_several_prompts_in_one_request(server: Server, seed: int) -> None:
    prompts = [text_of(60, seed), text_of(70, seed + 1)]
    body = {"prompt": prompts, "max_tokens": 3}
    ask(server, "/v1/completions", body)
    usage, _ = ask(server, "/v1/completions", body)
    assert cached(usage) == usage["context_pilot"]["cached_tokens"] == total(usage) == 130


def test_the_pilot_can_be_off(fleet: Fleet, full: Model, seed: int) -> None:
    server = fleet.server(full, env={"THUNDER_CONTEXT_PILOT": "0"})
    for path, body in FORMS.values():
        for stream in (False, True):
            usage, _ = ask(server, path, body(text_of(40, seed)), stream=stream)
            assert "context_pilot" not in usage
        assert cached(usage) == total(usage) if "/messages" not in path else True


def test_progress_for_those_that_ask(server: Server, seed: int) -> None:
    """One slow chunk: events come meanwhile, in a form that each API's clients pass over."""
    for number, (form, (path, body)) in enumerate(FORMS.items()):
        text = text_of(60, seed + number)
        # The host's own sign comes later than one of ours.
        server.inject(after=0, sleep=5.0 if form == "response" else 3.0)
        asked = {**body(text), "thunder": {"progress": True}}
        _, lines = ask(server, path, asked, stream=True)
        if form == "response":
            assert any(line.startswith(": keepalive") for line in lines)
            continue
        told = [
            event["thunder"]["progress"] for event in events("\n".join(lines)) if "thunder" in event
        ]
        assert told and told[0]["tokens_total"] >= 60, form
        assert told[0]["tokens_done"] < told[0]["tokens_total"]
        server.inject(after=0, sleep=2.5)
        _, lines = ask(server, path, body(text + " end"), stream=True)
        assert not any('"thunder"' in line for line in lines)


def test_c23_a_prompt_that_cannot_fit(fleet: Fleet, full: Model, seed: int) -> None:
    """Refused with the numbers before anything is sent; the next small request passes."""
    server = fleet.server(full, env={"THUNDER_MEMORY_LIMIT_GB": "0.004"})
    ask(server, "/v1/completions", {"prompt": text_of(20, seed), "max_tokens": 2})
    for path, body in FORMS.values():
        with pytest.raises(HttpError) as refusal:
            ask(server, path, body(text_of(3000, seed)), stream=True)
        assert refusal.value.status == 413
        assert "tokens needs about" in refusal.value.body
        usage, _ = ask(server, path, body(text_of(20, seed)))
        assert total(usage) >= 20


def test_stabiliser(server: Server, seed: int) -> None:
    """C6: the first system line has a new nonce each time, and a user's message quotes it."""

    def nonce(number: int) -> list[Json]:
        line = f"Session ID: {1000 * number + 7:08x}-52d4-4b6f-9c1d-7f3c9a1e0001"
        system = f"{line}\n{text_of(120, seed)}"
        return [
            {"role": "system", "content": system},
            {"role": "user", "content": f"What is {line}?"},
        ]

    for wanted in (False, True):
        usages = []
        for number in range(2):
            body = {"messages": nonce(1 + number + 10 * wanted), "max_tokens": 3}
            body |= {"thunder": {"stabilize": wanted}}
            usages.append(ask(server, "/v1/chat/completions", body)[0])
        told = usages[1]["context_pilot"]
        if wanted:
            assert cached(usages[1]) >= 100, told
            assert told["stabilized"]
        else:
            assert cached(usages[1]) < 30
            assert told["miss"]["message"] == 0


def test_c19_tenants(fleet: Fleet, full: Model, seed: int) -> None:
    """Two API keys, the same prompt: no hit across, a hit within, in whatever header the key is."""
    server = fleet.server(full, env={"THUNDER_SALT": "api-key"})
    body = {"prompt": text_of(80, seed), "max_tokens": 3}
    known = []
    for headers in (
        {"Authorization": "Bearer one"},
        {"Authorization": "Bearer two"},
        {"Authorization": "Bearer one"},
        {"x_api_key": "two"},
        {},
    ):
        usage, _ = ask(server, "/v1/completions", body, **headers)
        known.append(cached(usage))
    assert known == [0, 0, 80, 80, 0]


def test_routes_under_the_hosts_key(fleet: Fleet, full: Model, seed: int) -> None:
    server = fleet.server(full, args=["--api-key", "secret"])

    def get(path: str, **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        found = answer.status, answer.read().decode()
        connection.close()
        return found

    for headers in ({}, {"Authorization": "Bearer wrong"}):
        status, text = get("/thunder/status", **headers)
        assert status == 401
        assert "features" not in text
    key = {"Authorization": "Bearer secret"}
    status, text = get("/thunder/status", **key)
    assert status == 200
    found = json.loads(text)
    assert found["host"]["name"] == "omlx"
    states = {name: feature["state"] for name, feature in found["features"].items()}
    for name in (
        "ssd_cache",
        "skip_logic",
        "context_pilot",
        "chunked_prefill",
        "progress",
        "routes",
    ):
        assert states[name] == "applied", found["features"][name]
    assert get("/thunder/nothing", **key)[0] == 404
    # A request without a key is the host's to refuse, and changes nothing of ours.
    with pytest.raises(HttpError) as refusal:
        ask(server, "/v1/completions", {"prompt": text_of(20, seed), "max_tokens": 2})
    assert refusal.value.status == 401
