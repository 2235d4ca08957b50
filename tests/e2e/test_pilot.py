"""C5, C6 and C19: what keeps a prompt from being reused, said and, where asked for, mended."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.steps import MISS, served
from tests.harness.compare import Answer, assert_same
from tests.harness.fleet import Fleet
from tests.harness.models import Model, text_of
from tests.harness.server import Server
from thunder_patches.pilot.stabilize import load_rules, stabilize


def miss_of(answer: Answer) -> dict[str, Any]:
    """The response's own words on why not more was reused."""
    found: dict[str, Any] = answer.usage["context_pilot"]["miss"]
    return found


def stable(
    fleet: Fleet, server: Server, model: Model, messages: list[dict[str, Any]], **body: Any
) -> Answer:
    """The stabilised server's answer, which must be the stock one to the stabilised request."""
    form = stabilize(messages, body.get("tools"), load_rules())
    kept = body | ({"tools": form.tools} if "tools" in body else {})
    answer = server.chat(messages, **body)
    assert_same(fleet.expected(model, messages=list(form.messages), telling=False, **kept), answer)
    return answer


@pytest.mark.one_hybrid
def test_c5_one_part_or_a_string(fleet: Fleet, model: Model, seed: int) -> None:
    """The same text in both shapes of content: the same tokens, a hit."""
    server = fleet.shared(model)
    text = text_of(100, seed)
    parts = [{"type": "text", "text": text}]
    first = served(fleet, server, model, messages=[{"role": "user", "content": text}], cached=MISS)
    length = first.prompt_tokens
    served(fleet, server, model, messages=[{"role": "user", "content": parts}], cached=length)


def test_c5_tool_arguments(fleet: Fleet, full: Model, seed: int) -> None:
    """Arguments as an object and as the string that clients send."""
    server = fleet.shared(full)

    def messages(arguments: Any) -> list[dict[str, Any]]:
        call = {"type": "function", "id": "1", "function": {"name": "look", "arguments": arguments}}
        return [
            {"role": "user", "content": text_of(60, seed)},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "nothing", "tool_call_id": "1"},
        ]

    value = {"where": "home", "depth": 2}
    text = server.chat(messages(json.dumps(value)))
    same = server.chat(messages(json.dumps(value)))
    assert same.cached_tokens == text.prompt_tokens
    assert_same(text, same)


def _tools(*, turned: bool) -> list[dict[str, Any]]:
    def tool(name: str) -> dict[str, Any]:
        function = {"name": name, "description": f"to {name}", "parameters": {"type": "object"}}
        keys = reversed(function) if turned else iter(function)
        return {"type": "function", "function": {key: function[key] for key in keys}}

    names = ["read", "write", "search"]
    return [tool(name) for name in (reversed(names) if turned else names)]


@pytest.mark.parametrize("stabilize", ["0", "1"], ids=["default", "stabilised"])
def test_c5_tools_in_another_order(fleet: Fleet, full: Model, seed: int, stabilize: str) -> None:
    """A right miss that is explained, and a hit with the stabiliser."""
    server = fleet.shared(full, env={"THUNDER_STABILIZE": stabilize})
    messages = [{"role": "user", "content": text_of(100, seed)}]
    first = server.chat(messages, tools=_tools(turned=False))
    if stabilize == "1":
        again = stable(fleet, server, full, messages, tools=_tools(turned=True))
        assert again.cached_tokens == first.prompt_tokens
        assert again.usage["context_pilot"]["stabilized"]
    else:
        request = {"messages": messages, "tools": _tools(turned=True)}
        again = served(fleet, server, full, telling=False, **request)
        assert again.cached_tokens is not None and again.cached_tokens < 80
        assert miss_of(again)["reason"].startswith("tool list: ")
        assert "another order" in miss_of(again)["reason"]


@pytest.mark.one_hybrid
@pytest.mark.parametrize("stabilize", ["0", "1"], ids=["default", "stabilised"])
def test_c6_nonce(fleet: Fleet, model: Model, seed: int, stabilize: str) -> None:
    """A nonce in the first system line, quoted by the user, whose text stays as it is."""
    server = fleet.shared(model, env={"THUNDER_STABILIZE": stabilize})

    def messages(nonce: str) -> list[dict[str, Any]]:
        line = f"Request id: {nonce}"
        return [
            {"role": "system", "content": f"{line}\n{text_of(200, seed)}"},
            {"role": "user", "content": f"What does '{line}' mean?"},
        ]

    one = messages("7f3a9c21d4e85b60a1f2c3d4e5f60718")
    other = messages("09b8d7e6f5a4132200ffeeddccbbaa99")
    if stabilize == "1":
        stable(fleet, server, model, one)
        answer = stable(fleet, server, model, other)
        assert answer.cached_tokens is not None and answer.cached_tokens >= 150
        assert answer.usage["context_pilot"]["stabilized"]
        assert stabilize_user(other) == other[1]
    else:
        served(fleet, server, model, messages=one, cached=MISS, telling=False)
        answer = served(fleet, server, model, messages=other, cached=range(40), telling=False)
        miss = miss_of(answer)
        assert miss["role"] == "system" and miss["message"] == 0
        assert "system prompt differs" in miss["reason"]
        assert answer.cached_tokens is not None and miss["token"] >= answer.cached_tokens


def stabilize_user(messages: list[dict[str, Any]]) -> Any:
    """The user's message as the stabiliser leaves it."""
    return stabilize(messages, None, load_rules()).messages[1]


def test_c19_tenants(fleet: Fleet, full: Model, seed: int) -> None:
    """Two API keys: nothing is shared, not even what the misses tell."""
    server = fleet.server(full, env={"THUNDER_SALT": "api-key"}, host_cache=True)
    prompt = text_of(150, seed)
    for key in ("one", "two"):
        server.headers["Authorization"] = f"Bearer {key}"
        first = served(fleet, server, full, prompt=prompt, cached=0)
        assert miss_of(first)["reason"].startswith("never seen")
        served(fleet, server, full, prompt=prompt, cached=150)
    server.headers["Authorization"] = "Bearer one"
    served(fleet, server, full, prompt=prompt, cached=150)


def test_evicted_is_said(fleet: Fleet, full: Model, seed: int) -> None:
    """A folder for two prompts and no RAM: the first one has gone, and the response says so."""
    env = {"THUNDER_CACHE_MAX_GB": "0.001", "THUNDER_RAM_CACHE_MB": "0"}
    server = fleet.server(full, env=env)
    chats = [[{"role": "user", "content": text_of(250, seed + number)}] for number in range(8)]
    for messages in chats:
        served(fleet, server, full, messages=messages, cached=MISS)
    again = served(fleet, server, full, messages=chats[0], cached=range(200))
    assert "evicted" in miss_of(again)["reason"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_changed_answer_is_said(fleet: Fleet, full: Model, seed: int, stream: bool) -> None:
    """The next turn brings the model's last answer in other words: that message is named."""
    server = fleet.shared(full)
    messages = [{"role": "user", "content": text_of(120, seed)}]
    if stream:
        server.stream(messages=messages, max_tokens=16)
    else:
        server.chat(messages, max_tokens=16)
    messages += [
        {"role": "assistant", "content": text_of(12, seed + 1)},
        {"role": "user", "content": text_of(12, seed + 2)},
    ]
    again = served(fleet, server, full, messages=messages, cached=range(64, 200))
    miss = miss_of(again)
    assert (miss["message"], miss["role"]) == (1, "assistant")
    assert "assistant message 1" in miss["reason"]
