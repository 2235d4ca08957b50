"""Answers are remembered, so that the next turn of a chat that changes one is told why it misses."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from omlx.api import anthropic_utils, openai_models, responses_utils

from tests.harness.models import Model, ModelFactory, text_of
from tests.harness.server import Server
from tests.hosts.omlx.serving import NAME, OmlxFleet, OmlxServer
from tests.hosts.omlx.test_api import cached, total
from thunder_patches.hosts.omlx import answers
from thunder_patches.hosts.pilot import Chat, _record_answer, joined
from thunder_patches.patching import guard
from thunder_patches.pilot.fingerprints import message_hash

Json = dict[str, Any]


@dataclass
class Said:
    """An answer as a client gets it."""

    text: str
    thinking: str
    usage: Json
    id: str


def chat_body(turns: list[Said | str], thinking: int) -> Json:
    """Each turn is the user's text or an answer that goes back."""
    messages: list[Json] = []
    for turn in turns:
        if isinstance(turn, str):
            messages.append({"role": "user", "content": turn})
        else:
            more = {"reasoning_content": turn.thinking} if turn.thinking else {}
            messages.append({"role": "assistant", "content": turn.text, **more})
    wanted: Json = {"thinking_budget": thinking}
    if not thinking:
        wanted = {"chat_template_kwargs": {"enable_thinking": False}}
    return {"messages": messages, "max_tokens": thinking + 8 if thinking else 1, **wanted}


def message_body(turns: list[Said | str], thinking: int) -> Json:
    messages: list[Json] = []
    for turn in turns:
        if isinstance(turn, str):
            messages.append({"role": "user", "content": turn})
        else:
            blocks = [{"type": "text", "text": turn.text}]
            if turn.thinking:
                thought = {"type": "thinking", "thinking": turn.thinking, "signature": "s"}
                blocks.insert(0, thought)
            messages.append({"role": "assistant", "content": blocks})
    wanted: Json = {"type": "enabled", "budget_tokens": thinking}
    if not thinking:
        wanted = {"type": "disabled"}
    return {
        "messages": messages,
        "max_tokens": thinking + 8 if thinking else 1,
        "thinking": wanted,
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
    }


def response_body(turns: list[Said | str], thinking: int) -> Json:
    items: list[Json] = []
    for turn in turns:
        if isinstance(turn, str):
            items.append({"role": "user", "content": turn})
            continue
        if turn.thinking:
            summary = [{"type": "summary_text", "text": turn.thinking}]
            items.append({"type": "reasoning", "summary": summary})
        text = [{"type": "output_text", "text": turn.text}]
        items.append({"type": "message", "role": "assistant", "content": text})
    wanted: Json = {"thinking_budget": thinking}
    if not thinking:
        wanted = {"chat_template_kwargs": {"enable_thinking": False}}
    return {"input": items, "max_output_tokens": thinking + 8 if thinking else 1, **wanted}


FORMS: dict[str, tuple[str, Callable[[list[Said | str], int], Json]]] = {
    "chat": ("/v1/chat/completions", chat_body),
    "message": ("/v1/messages", message_body),
    "response": ("/v1/responses", response_body),
}
THINKING = 8


def told(body: bytes, path: str) -> Said:
    """What a client makes of a body, read independently of the package for the text."""
    found = joined(answers.READERS[path](body))
    events = list(answers.events(body))
    whole = [event.get("response", event) for event in events]
    usage = next(event["usage"] for event in reversed(whole) if event.get("usage"))
    id = next((event["id"] for event in whole if event.get("id")), "")
    return Said(found.get("content", ""), found.get("reasoning_content", ""), usage, id)


def ask(server: Server, path: str, body: Json, stream: bool) -> Said:
    body = {"model": NAME, "temperature": 0, "stream": stream, **body}
    if stream and "completions" in path:
        body["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    assert answer.status == 200, text
    return told(text, path)


def miss_of(said: Said) -> Json | None:
    found: Json | None = said.usage["context_pilot"].get("miss")
    return found


@pytest.fixture
def server(fleet: OmlxFleet, full: Model) -> OmlxServer:
    server = fleet.shared(full)
    assert isinstance(server, OmlxServer)
    # An engine takes a limit of thinking from the second such request on.
    server.post("/v1/chat/completions", chat_body(["hello"], THINKING))
    return server


forms = pytest.mark.parametrize("form", FORMS)
streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@forms
@streams
def test_a_changed_answer_is_said(server: Server, seed: int, form: str, stream: bool) -> None:
    path, body = FORMS[form]
    question = text_of(120, seed)
    ask(server, path, body([question], 0), stream)
    other = Said(text_of(12, seed + 1), "", {}, "")
    again = ask(server, path, body([question, other, text_of(12, seed + 2)], 0), stream)

    miss = miss_of(again)
    assert miss is not None
    at = 2 if form == "message" else 1
    assert (miss["message"], miss["role"], miss["code"]) == (at, "assistant", "answer_edited")
    assert miss["reason"].startswith(f"assistant message {at} is not what the model answered")
    assert 100 < cached(again.usage) < total(again.usage)


@forms
@streams
def test_the_same_answer_hits(
    fleet: OmlxFleet, models: ModelFactory, seed: int, form: str, stream: bool
) -> None:
    """The control: the answer comes back as it was, and all of it is reused without a word.

    A random model also writes what its tokenizer would write otherwise; that is said.
    """
    plain = models.get("qwen3", template="plain")
    server = fleet.shared(plain)
    assert isinstance(server, OmlxServer)
    path, body = FORMS[form]
    hit = False
    for number in range(12):
        question = text_of(120, seed + number)
        start = server.answers_file.stat().st_size if server.answers_file.exists() else 0
        first = ask(server, path, body([question], 0), stream)
        with server.answers_file.open() as file:
            file.seek(start)
            wrote = [json.loads(line)["token"] for line in file]
        again = ask(server, path, body([question, first, text_of(12, seed + 2)], 0), stream)
        miss = miss_of(again)
        hit = plain.tokens(first.text) == wrote
        if hit:
            assert miss is None
            assert cached(again.usage) >= total(first.usage)
            break
        assert miss is not None and miss["code"] == "retokenised", (first.text, wrote)
    assert hit


@forms
@streams
def test_dropped_thinking_is_said(server: Server, seed: int, form: str, stream: bool) -> None:
    """By the client, which sends the text alone, and by the template, which leaves older thinking out."""
    path, body = FORMS[form]
    at = 2 if form == "message" else 1
    for number, keeps in enumerate((False, True)):
        question = text_of(120, seed + number)
        first = ask(server, path, body([question], THINKING), stream)
        # Some builds show no thinking in responses, and have it dropped themselves.
        shown = bool(first.thinking)
        assert first.text and (shown or form == "response")
        back = Said(first.text, first.thinking if keeps else "", {}, "")
        again = ask(server, path, body([question, back, text_of(12, seed + 2)], THINKING), stream)
        miss = miss_of(again)
        assert miss is not None
        assert (miss["message"], miss["role"]) == (at, "assistant")
        assert miss["code"] == "thinking_dropped", miss
        if shown:
            by = " by the template" if keeps else ""
            assert miss["reason"] == f"assistant message {at}: thinking was dropped{by}"
        else:
            assert "the thinking that its prompt opened was dropped" in miss["reason"]


def test_a_history_that_the_server_keeps(server: Server, seed: int) -> None:
    """``previous_response_id``: the client sends no history at all."""
    path, body = FORMS["response"]
    first = ask(server, path, body([text_of(120, seed)], THINKING), False)
    more = {"previous_response_id": first.id}
    again = ask(server, path, body([text_of(12, seed + 2)], THINKING) | more, False)
    miss = miss_of(again)
    assert miss is not None
    assert (miss["message"], miss["code"]) == (1, "thinking_dropped")


# The readers, on what the host itself writes

CALL = {"name": "look", "arguments": '{"where": "home"}'}


def test_tool_calls_in_every_form() -> None:
    """The same answer, in each form that a client can get it in."""
    call = openai_models.ToolCall(
        id="call_1", type="function", function=openai_models.FunctionCall(**CALL)
    )
    message = openai_models.AssistantMessage(
        content="I look.", reasoning_content="Where?", tool_calls=[call]
    )
    choice = openai_models.ChatCompletionChoice(message=message, finish_reason="tool_calls")
    whole = openai_models.ChatCompletionResponse(
        model="m", choices=[choice], usage=openai_models.Usage()
    )
    sent = anthropic_utils.convert_internal_to_anthropic_response(
        "I look.", "m", 9, 9, "tool_calls", [call], "Where?"
    )
    blocks = [
        anthropic_utils.create_message_start_event("msg_1", "m"),
        anthropic_utils.create_content_block_start_event(0, "thinking"),
        anthropic_utils.create_thinking_delta_event(0, "Whe"),
        anthropic_utils.create_thinking_delta_event(0, "re?"),
        anthropic_utils.create_content_block_start_event(1, "text"),
        anthropic_utils.create_text_delta_event(1, "I look."),
        anthropic_utils.create_content_block_start_event(2, "tool_use", id="call_1", name="look"),
        anthropic_utils.create_input_json_delta_event(2, '{"where": '),
        anthropic_utils.create_input_json_delta_event(2, '"home"}'),
        anthropic_utils.create_message_delta_event("tool_use", 9),
    ]
    items = [
        responses_utils.build_reasoning_output_item("Where?"),
        responses_utils.build_message_output_item("I look."),
        responses_utils.build_function_call_output_item(CALL["name"], CALL["arguments"], "call_1"),
    ]
    output = [item.model_dump(exclude_none=True) for item in items]
    response = {"object": "response", "status": "completed", "output": output}
    done = {"type": "response.completed", "response": response}
    last = responses_utils.format_sse_event("response.completed", done)
    bodies = [
        (answers.chat, " " + whole.model_dump_json()),
        (answers.message, sent.model_dump_json()),
        (answers.message, "".join(blocks)),
        (answers.response, json.dumps(response)),
        (answers.response, last),
    ]
    hashes = {message_hash(joined(read(body.encode()))) for read, body in bodies}
    history = {"role": "assistant", "content": "I look.", "reasoning_content": "Where?"}
    history["tool_calls"] = [call.model_dump()]
    assert hashes == {message_hash(history)}
    assert hashes != {message_hash(history | {"content": "I look"})}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", '{"error": {"message": "no"}}'),
        ("/v1/chat/completions", 'data: {"choices": [{"delta": {"content": "I"}}]}\n\n'),
        ("/v1/messages", anthropic_utils.create_text_delta_event(0, "I").replace("text_", "x_")),
        ("/v1/messages", '{"type": "error", "error": {}}'),
        ("/v1/responses", '{"object": "response", "status": "failed", "output": []}'),
        ("/v1/responses", ""),
    ],
)
def test_what_is_no_whole_answer_is_not_remembered(path: str, body: str) -> None:
    if path == "/v1/messages" and "content_block_delta" in body:
        body = anthropic_utils.create_content_block_start_event(0, "text") + body
    assert answers.READERS[path](body.encode()) == []


def test_a_fault_costs_nothing() -> None:
    """An answer in a form that we can't read is the client's all the same; the fault is counted."""
    guard.reset()
    _record_answer(Chat(), lambda: answers.message(b'{"type": "message"}'), [], None)
    assert guard.faults("context_pilot").count == 1
    assert "KeyError" in guard.faults("context_pilot").last
    guard.reset()
