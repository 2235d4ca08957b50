"""Why a prompt missed. Each case is a kind of report, run through a real template and tokenizer."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest

from tests.core.pilot_support import TEMPLATES, TOOLS, Chat, call
from thunder_patches.pilot.boundaries import Follower
from thunder_patches.pilot.explain import CODES, Match, Miss, duration, explain
from thunder_patches.pilot.fingerprints import request_print
from thunder_patches.pilot.index import Index

GRAIN = 16
SYSTEM = (
    "You are a careful coding agent.\nRead a file before you change it, and run the tests.\n"
    "Working folder: /home/ada/project\nToday is Tuesday.\nAnswer in short sentences."
)
BASE: list[dict[str, Any]] = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Where is the cache written? I think that it is in src/main.py."},
    {"role": "assistant", "content": "In write(). The block is flushed first and renamed then."},
    {"role": "user", "content": "Does a reader ever see half a block? Please look at the tests."},
    {"role": "assistant", "content": "No. The name appears when the block is whole."},
    {"role": "user", "content": "Then add a test for that, please."},
]
AGENT: list[dict[str, Any]] = [
    *BASE[:2],
    {
        "role": "assistant",
        "content": "I look at the file.",
        "reasoning_content": "The user wants to know the place, so I should read the file first.",
        "tool_calls": [{**call("read_file", path="src/main.py", start=1), "id": "call_1"}],
    },
    {
        "role": "tool",
        "content": "def write(block):\n    flush(block)\n" * 30,
        "tool_call_id": "call_1",
    },
    {"role": "assistant", "content": "In write(), line 2."},
    {"role": "user", "content": "And where is it read?"},
]


class Run:
    """Requests through one index, reuse as exact token prefixes in steps of ``GRAIN``."""

    def __init__(
        self, template: str = "qwen3", index: Index | None = None, **variables: Any
    ) -> None:
        self.chat = Chat(TEMPLATES[template], **variables)
        self.follower = Follower(self.chat.encode)
        self.index = Index() if index is None else index
        self.stored: list[list[int]] = []

    def send(
        self,
        messages: list[dict[str, Any]],
        tools: Any = None,
        *,
        model: str = "m1",
        adapter: str = "",
        salt: str = "",
        match: Match | None = None,
        variables: dict[str, Any] | None = None,
        answer: tuple[dict[str, Any], str] | None = None,
    ) -> Miss | None:
        self.chat.variables = {**self.chat.variables, **(variables or {})}
        tokens = self.chat.tokens(messages, tools)
        found = self.follower.boundaries(self.chat.render, messages, tools, tokens)
        request = request_print(
            messages, model=model, adapter=adapter, salt=salt, tools=tools, variables=variables
        )
        if match is None:
            shared = max((common(tokens, old) for old in self.stored), default=0)
            match = Match(min(shared, len(tokens) - 1) // GRAIN * GRAIN, GRAIN)
        miss = explain(messages, tokens, request, self.index, match, found)
        number = self.index.record(request, messages, tokens, found.ends, now=1000.0)
        self.stored.append(tokens)
        if answer is not None:
            message, text = answer
            written = self.chat.encode(text)
            self.index.answered(request.salt, number, message, written)
            self.stored.append(tokens + written)
        return miss


def common(a: list[int], b: list[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def edited(messages: list[dict[str, Any]], at: int, **fields: Any) -> list[dict[str, Any]]:
    changed = copy.deepcopy(messages)
    changed[at].update(fields)
    return changed


def system(text: str) -> list[dict[str, Any]]:
    return edited(BASE, 0, content=text)


def long_system(first: str) -> str:
    return first + "\n" + SYSTEM * 3


TEXT_CASES = {
    "date": ("Today's date: 2026-03-01", "Today's date: 2026-03-02"),
    "timestamp": ("Now: 2026-03-01T10:22:31Z", "Now: 2026-03-01T10:24:02Z"),
    "time": ("It is 10:22 now.", "It is 10:25 now."),
    "epoch": ("started=1767261001", "started=1767261377"),
    "uuid": (
        "Session 0d3cf8a2-9f7e-4c1b-8a54-1f2e3d4c5b6a",
        "Session 7a1b2c3d-4e5f-4a6b-9c8d-0e1f2a3b4c5d",
    ),
    "nonce": ("request: req_8f3k29dk20aa", "request: req_77ab0c1d9e4f"),
    "billing": (
        "x-acme-billing-header: v=1; cch=aa01;",
        "x-acme-billing-header: v=1; cch=f39c;",
    ),
    "path": ("Scratch: /tmp/agent-one/work", "Scratch: /tmp/agent-two/work"),
    "counter": ("You are at step 41 of the plan.", "You are at step 42 of the plan."),
}


@pytest.mark.parametrize("code", TEXT_CASES)
def test_volatile_text_in_the_system_prompt(code: str) -> None:
    run = Run()
    before, now = TEXT_CASES[code]
    assert run.send(system(long_system(before))).code == "never_seen"
    miss = run.send(system(long_system(now)))
    assert miss.code == code
    assert (miss.message, miss.role) == (0, "system")
    place = common(list(before), list(now))
    assert f"character {place:,}" in miss.reason
    assert "looks like a" in miss.reason
    assert miss.token == common(*run.stored[-2:])


def test_chinese_date() -> None:
    run = Run()
    run.send(system("今天是2026年3月1日，星期日。\n" + SYSTEM * 3))
    assert run.send(system("今天是2026年3月2日，星期一。\n" + SYSTEM * 3)).code == "date"


def test_after_a_restart_only_hashes_are_left_and_the_date_is_still_found(tmp_path) -> None:
    path = tmp_path / "pilot.jsonl"
    run = Run(index=Index(path))
    run.send(system(SYSTEM * 2 + "\nToday's date: 2026-03-01\n" + SYSTEM))
    assert run.index.save()
    again = Run(index=Index(path))
    again.stored = run.stored
    miss = again.send(system(SYSTEM * 2 + "\nToday's date: 2026-03-02\n" + SYSTEM))
    assert miss.code == "date"
    assert f"near character {len(SYSTEM) * 2 + len('/Today s date: '):,}" in miss.reason
    assert not miss.detail["token_exact"]


def test_edited_text_names_the_character() -> None:
    run = Run()
    run.send(system(SYSTEM))
    miss = run.send(system(SYSTEM.replace("short", "plain")))
    assert miss.code == "text_edited"
    assert miss.reason.endswith(f"system prompt differs at character {SYSTEM.index('short'):,}")
    assert "short" in miss.detail["before"]
    assert "short" not in json.dumps(miss.to_json())


def test_extended_and_cut_text() -> None:
    run = Run()
    run.send(BASE)
    assert run.send(system(SYSTEM + " Be brief.")).code == "text_extended"
    run = Run()
    run.send(BASE)
    assert run.send(system(SYSTEM[:-8])).code == "text_cut"


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("whitespace", lambda text: text.replace(". ", ".  ")),
        ("line_endings", lambda text: text.replace("\n", "\r\n")),
        ("unicode", lambda text: text.replace("é", "e\u0301")),
    ],
)
def test_same_words_in_another_form(code: str, change) -> None:
    run = Run()
    text = "Café rules. Two of them. Read first.\nThen write.\n" + SYSTEM
    run.send(system(text))
    assert run.send(system(change(text))).code == code


TOOL_CASES = {
    "tools_reordered": TOOLS[::-1],
    "tools_added": [*TOOLS, {"type": "function", "function": {"name": "find", "description": "f"}}],
    "tools_removed": TOOLS[:1],
    "tools_replaced": [
        TOOLS[0],
        {"type": "function", "function": {"name": "sh", "description": "s"}},
    ],
    "tool_key_order": [dict(reversed(tool.items())) for tool in TOOLS],
    "tool_changed": json.loads(json.dumps(TOOLS).replace("return its text", "return text")),
}


@pytest.mark.parametrize("code", TOOL_CASES)
def test_tools(code: str) -> None:
    run = Run()
    run.send(BASE, TOOLS)
    miss = run.send(BASE, TOOL_CASES[code])
    assert miss.code == code
    assert miss.reason.startswith("tool list: ")
    assert miss.message == 0


def test_thinking() -> None:
    answer = {"role": "assistant", "content": "Line 40.", "reasoning_content": "It is in load()."}
    run = Run("qwen3", thinking=True)
    run.send(BASE, answer=(answer, "It is in load().\n</think>\n\nLine 40.<|im_end|>\n"))
    next_turn = [*BASE, {"role": "assistant", "content": "Line 40."}, BASE[1]]
    miss = run.send(next_turn)
    assert (miss.code, miss.message, miss.role) == ("thinking_dropped", len(BASE), "assistant")

    run = Run("chatml")
    with_thinking = edited(BASE, 2, content="<think>\nI know.\n</think>\n\n" + BASE[2]["content"])
    run.send(with_thinking)
    assert run.send(BASE).code == "thinking_dropped"
    run = Run("chatml")
    run.send(BASE)
    assert run.send(with_thinking).code == "thinking_added"
    other = edited(BASE, 2, content="<think>\nI guess.\n</think>\n\n" + BASE[2]["content"])
    run = Run("chatml")
    run.send(with_thinking)
    assert run.send(other).code == "thinking_changed"


def test_template_drops_thinking_when_the_user_writes_again() -> None:
    run = Run()
    run.send(AGENT[:4], TOOLS)
    miss = run.send(AGENT, TOOLS)
    assert (miss.code, miss.message) == ("thinking_dropped", 2)
    assert "by the template" in miss.reason


def test_answer_as_other_tokens() -> None:
    run = Run("chatml")
    answer = {"role": "assistant", "content": "the cache"}
    run.send(BASE, answer=(answer, "the"))
    # What the model wrote, token by token, is not how the tokenizer writes the same text.
    number = run.index.recent(request_print(BASE, model="m1").salt)[0].number
    salt = request_print(BASE, model="m1").salt
    run.index.answered(salt, number, answer, [run.chat.encode(c)[0] for c in "the cache"])
    miss = run.send([*BASE, answer, BASE[1]])
    assert miss.code == "retokenised"
    run = Run("chatml")
    run.send(BASE, answer=(answer, "the cache<|im_end|>\n"))
    assert run.send([*BASE, answer, BASE[1]]) is None
    run = Run("chatml")
    run.send(BASE, answer=(answer, "the cache<|im_end|>\n"))
    changed = {"role": "assistant", "content": "a file"}
    assert run.send([*BASE, changed, BASE[1]]).code == "answer_edited"


def test_thinking_in_an_answer() -> None:
    """Dropped by the client, by the template, and by a host that did not show it to anyone."""
    text = {"role": "assistant", "content": "In write(), which flushes the block and renames it."}
    thought = {**text, "reasoning_content": "The user asks for the place, so I look it up first."}
    wrote = f"{thought['reasoning_content']}\n</think>\n\n{text['content']}<|im_end|>\n"

    def said(shown: dict[str, str], back: dict[str, str], wrote: str, **variables: Any) -> Miss:
        run = Run("qwen3", **variables)
        run.send(BASE, answer=(shown, wrote))
        miss = run.send([*BASE, back, BASE[1]])
        assert miss is not None and miss.message == len(BASE)
        return miss

    for variables, start in (({"thinking": True}, ""), ({}, "<think>\n")):
        miss = said(thought, text, start + wrote, **variables)
        assert miss.code == "thinking_dropped" and miss.reason.endswith(": thinking was dropped")
        miss = said(thought, thought, start + wrote, **variables)
        assert miss.code == "thinking_dropped" and miss.reason.endswith("by the template")
    miss = said(text, text, wrote, thinking=True)
    assert miss.code == "thinking_dropped" and "that its prompt opened" in miss.reason
    spaced = {**text, "content": "\n" + text["content"]}
    miss = said(thought, spaced, wrote, thinking=True)
    assert miss.code == "thinking_dropped"  # and not the white space


def test_tool_calls() -> None:
    run = Run()
    run.send(AGENT, TOOLS)
    swapped = copy.deepcopy(AGENT)
    swapped[2]["tool_calls"][0]["function"]["arguments"] = {"start": 1, "path": "src/main.py"}
    assert run.send(swapped, TOOLS).code == "arguments_order"
    run = Run()
    run.send(AGENT, TOOLS)
    other = copy.deepcopy(AGENT)
    other[2]["tool_calls"][0]["function"]["arguments"] = {"path": "src/main.py", "start": 2}
    assert run.send(other, TOOLS).code == "arguments_changed"
    cleared = edited(AGENT, 3, content="[older tool result removed]")
    run = Run()
    run.send(AGENT, TOOLS)
    miss = run.send(cleared, TOOLS)
    assert (miss.code, miss.message, miss.role) == ("tool_result_cleared", 3, "tool")


def test_call_ids_that_a_template_shows() -> None:
    ids = TEMPLATES["chatml"].replace("'<|im_end|>", "(m.tool_call_id or '') + '<|im_end|>")
    run = Run()
    run.chat.template = ids
    run.send(AGENT)
    assert run.send(edited(AGENT, 3, tool_call_id="call_9")).code == "call_ids"


def test_string_arguments_and_parts_are_the_same_content() -> None:
    """C5: these are one content, so the prompts hit and nothing is explained."""
    run = Run()
    run.send(AGENT, TOOLS)
    other = copy.deepcopy(AGENT)
    function = other[2]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    assert run.send(other, TOOLS) is None
    assert request_print(other, model="m").hashes == request_print(AGENT, model="m").hashes
    parts = edited(BASE, 1, content=[{"type": "text", "text": BASE[1]["content"]}])
    assert request_print(parts, model="m").hashes == request_print(BASE, model="m").hashes


def test_content_form_that_a_template_writes_differently() -> None:
    parts = TEMPLATES["chatml"].replace(
        "(m.content or '')",
        "(m.content if m.content is string else '[parts] ' + m.content[0].text)",
    )
    run = Run()
    run.chat.template = parts
    run.send(BASE)
    miss = run.send(edited(BASE, 1, content=[{"type": "text", "text": BASE[1]["content"]}]))
    assert miss.code == "content_form"
    assert miss.message == 1
    assert "parts instead of a string" in miss.reason


def test_images() -> None:
    look = TEMPLATES["chatml"].replace(
        "(m.content or '')",
        "(m.content if m.content is string else m.content[0].image_url.url + m.content[1].text)",
    )

    def chat(image: str) -> list[dict[str, Any]]:
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
        return edited(BASE, 1, content=[url, {"type": "text", "text": "What is this?"}])

    run = Run()
    run.chat.template = look
    run.send(chat("AAAA"))
    assert run.send(chat("BBBB")).code == "image_changed"


def test_history() -> None:
    run = Run()
    run.send(BASE)
    again = {"role": "user", "content": "And one more for the reader."}
    miss = run.send([BASE[0], *BASE[3:], {"role": "assistant", "content": "Done."}, again])
    assert (miss.code, miss.message) == ("history_truncated", 1)
    assert "messages 1 to 2 were left out" in miss.reason

    run = Run()
    run.send(BASE)
    inserted = [*BASE[:3], {"role": "user", "content": "Wait."}, *BASE[3:]]
    assert run.send(inserted).code == "message_inserted"

    run = Run()
    run.send(BASE)
    assert run.send([BASE[0], BASE[3], BASE[2], BASE[1], *BASE[4:]]).code == "messages_reordered"

    run = Run()
    run.send(BASE)
    summary = {"role": "user", "content": "Summary of what was said: the block is renamed."}
    assert run.send([BASE[0], summary]).code == "history_replaced"


def test_roles_and_system_prompt() -> None:
    run = Run("chatml")
    run.send(BASE)
    assert run.send(edited(BASE, 0, role="developer")).code == "role_changed"
    run = Run()
    run.send(BASE)
    assert run.send(BASE[1:]).code == "system_removed"
    run = Run()
    run.send(BASE[1:])
    assert run.send(BASE).code == "system_added"


def test_template_variables() -> None:
    run = Run("qwen3")
    run.chat.template = "{{- mode }}" + run.chat.template
    run.send(BASE, variables={"mode": "fast and loose"})
    miss = run.send(BASE, variables={"mode": "slow and careful"})
    assert miss.code == "template_variables"
    assert "mode" in miss.reason


def test_date_that_the_template_writes() -> None:
    run = Run("chatml")
    original = run.chat.template
    run.chat.template = original.replace("m.role +", "m.role + ' 1 March' +", 1)
    run.send(BASE)
    run.chat.template = original.replace("m.role +", "m.role + ' 2 March' +", 1)
    miss = run.send(BASE)
    assert (miss.code, miss.message) == ("template_text", 0)
    assert "a date in the template?" in miss.reason


def test_model_and_adapter() -> None:
    run = Run()
    run.send(BASE, model="m1")
    nothing = Match(0, GRAIN)
    assert run.send(BASE, model="m2", match=nothing).code == "model_changed"
    assert run.send(BASE, model="m2", adapter="a", match=nothing).code == "adapter_changed"
    # Back to the first: its own prompt explains it, not the other model's.
    assert run.send(BASE, model="m1", match=nothing).code == "not_kept"


def test_state_that_is_gone() -> None:
    run = Run()
    run.send(BASE)
    miss = run.send(BASE, match=Match(32, GRAIN, evicted_seconds=12 * 60))
    assert (miss.code, miss.token) == ("evicted", 32)
    assert miss.reason == "evicted 12 minutes ago"
    assert run.send(BASE, match=Match(32, GRAIN, damaged=True)).code == "damaged"
    assert run.send(BASE, match=Match(32, GRAIN, dropped=True)).code == "not_kept"
    assert run.send(BASE, match=Match(32, GRAIN)).code == "not_kept"


def test_no_miss_where_nothing_more_could_be_reused() -> None:
    run = Run()
    tokens = len(run.chat.tokens(BASE))
    run.send(BASE)
    assert run.send(BASE, match=Match(tokens, GRAIN)) is None
    assert run.send([*BASE, {"role": "assistant", "content": "Done."}, BASE[1]]) is None
    assert run.send(BASE[:4]) is None  # a beginning of what is known


def test_other_tenants_are_never_shown() -> None:
    """C19: the same prompt under another salt, and nothing at all, give the same answer."""
    run = Run()
    run.send(BASE, salt="tenant-a")
    other = run.send(BASE, salt="tenant-b", match=Match(0, GRAIN))
    alone = Run().send(BASE, salt="tenant-b", match=Match(0, GRAIN))
    assert other == alone
    assert other.code == "never_seen"
    near = Run()
    near.send(system(long_system("Today's date: 2026-03-01")), salt="tenant-a")
    other_day, nothing = system(long_system("Today's date: 2026-03-02")), Match(0, GRAIN)
    assert near.send(other_day, salt="b", match=nothing).code == "never_seen"


def test_almost_the_same_prompt_is_said_to_be_almost_the_same() -> None:
    run = Run()
    run.send(system(long_system("Today's date: 2026-03-01")))
    miss = run.send(system(long_system("Today's date: 2026-03-02")))
    assert miss.reason.startswith("almost the same prompt: ")
    # A control: a prompt that shares nothing is not called similar.
    other = [{"role": "system", "content": "All about boats."}, {"role": "user", "content": "Hi"}]
    assert run.send(other).code == "never_seen"
    trains = {"role": "system", "content": "All about trains, and nothing else."}
    assert run.send([trains, *BASE[1:3]]).code == "system_replaced"


def test_unknown_boundaries_still_give_a_reason_and_claim_no_message() -> None:
    run = Run()
    run.send(BASE, TOOLS)
    tokens = run.chat.tokens(BASE, TOOLS[::-1])
    from thunder_patches.pilot.boundaries import unknown

    request = request_print(BASE, model="m1", tools=TOOLS[::-1])
    found = unknown("not followed", len(BASE), len(tokens))
    reused = Match(common(tokens, run.stored[0]) // GRAIN * GRAIN, GRAIN)
    miss = explain(BASE, np.asarray(tokens), request, run.index, reused, found)
    assert (miss.code, miss.message, miss.role) == ("tools_reordered", None, None)


def test_enough_reasons() -> None:
    assert len(CODES) >= 15


def test_duration() -> None:
    assert [duration(s) for s in (0, 1, 59, 60, 720, 3600, 90000)] == [
        "moments",
        "1 second",
        "59 seconds",
        "1 minute",
        "12 minutes",
        "1 hour",
        "1 day",
    ]
