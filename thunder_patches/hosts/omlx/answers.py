"""What oMLX answered, read from the response's body, in the form of a chat's messages.

A client sends an answer back in the next turn as it got it; so that is what is remembered. An answer
that was broken off, and a refusal, give nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Json = dict[str, Any]


def events(body: bytes) -> Iterator[Json]:
    """The JSON objects of a body: a whole one, after any white space, or those of an event stream."""
    if body.lstrip().startswith(b"{"):
        yield json.loads(body)
        return
    for line in body.splitlines():
        data = line.removeprefix(b"data:").strip()
        if data.startswith(b"{"):
            yield json.loads(data)


def chat(body: bytes) -> list[Json]:
    """``/v1/chat/completions``: the message, or the deltas of a stream."""
    choices = [choice for event in events(body) for choice in event.get("choices") or ()]
    if not any(choice.get("finish_reason") for choice in choices):
        return []
    return [choice.get("message") or choice.get("delta") or {} for choice in choices]


def message(body: bytes) -> list[Json]:
    """``/v1/messages``: blocks of a content, or the events that build them."""
    blocks: list[Json] = []
    for event in events(body):
        match event.get("type"):
            case "message":
                return [_of_blocks(event["content"])]
            case "content_block_start":
                blocks.append(dict(event["content_block"], input=""))
            case "content_block_delta":
                for name, more in event["delta"].items():
                    field = "input" if name == "partial_json" else name
                    if field in ("text", "thinking", "input"):
                        blocks[-1][field] = blocks[-1].get(field, "") + more
            case "message_delta" if event["delta"].get("stop_reason"):
                return [_of_blocks(blocks)]
    return []


def response(body: bytes) -> list[Json]:
    """``/v1/responses``: items of an output, which a stream tells once more at its end."""
    for event in events(body):
        whole = event.get("response") if event.get("type") == "response.completed" else event
        if isinstance(whole, dict) and whole.get("status") == "completed" and "output" in whole:
            return [_of_items(whole["output"])]
    return []


READERS: dict[str, Callable[[bytes], list[Json]]] = {
    "/v1/chat/completions": chat,
    "/v1/messages": message,
    "/v1/responses": response,
}
"""By the path of the request; forms without a history are not there."""


def _of_blocks(blocks: Iterable[Json]) -> Json:
    text, thinking, calls = "", "", []
    for block in blocks:
        match block.get("type"):
            case "text":
                text += block["text"]
            case "thinking":
                thinking += block["thinking"]
            case "tool_use":
                calls.append(_call(block["id"], block["name"], block["input"]))
    return {"content": text, "reasoning_content": thinking, "tool_calls": calls}


def _of_items(items: Iterable[Json]) -> Json:
    text, thinking, calls = "", "", []
    for item in items:
        match item.get("type"):
            case "message":
                text += "".join(part.get("text") or "" for part in item["content"])
            case "reasoning":
                thinking += "".join(part.get("text") or "" for part in item.get("summary") or ())
            case "function_call":
                calls.append(_call(item["call_id"], item["name"], item["arguments"]))
    return {"content": text, "reasoning_content": thinking, "tool_calls": calls}


def _call(id: str, name: str, arguments: Any) -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
