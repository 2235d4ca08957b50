"""The stabiliser: what it does, what it never does, and that doing it twice does nothing more."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.pilot_support import TEMPLATES, TOOLS, Chat, call
from tests.core.test_pilot_explain import AGENT, BASE, SYSTEM, Run, common, edited
from thunder_patches.pilot.fingerprints import SYSTEM_ROLES
from thunder_patches.pilot.stabilize import check_rules, hint, load_rules, stabilize

RULES = load_rules()


def clean(messages: list[dict[str, Any]], tools: Any = None) -> list[Any]:
    return stabilize(messages, tools, RULES).messages


def test_the_rules_pass_their_own_tests_and_a_wrong_test_is_told(tmp_path: Path) -> None:
    assert RULES.problems == ()
    assert check_rules(RULES) == []
    assert all(rule.tests and rule.why for rule in RULES.rules)
    user = tmp_path / "rules.toml"
    user.write_text(
        '[[rule]]\nname = "x"\npattern = "^X.*\\n"\naction = "drop"\n'
        'test = [{ before = "X1\\nY", after = "wrong" }]\n'
    )
    assert len(check_rules(load_rules(user))) == 1


def test_nonce_in_the_first_line_c6() -> None:
    """Stabiliser on: hit, the user's text untouched. Off: miss, and the place is told."""
    nonces = ("5b1f09aa77c1", "99e0d2c4b1a0")
    chats = [
        [
            {"role": "system", "content": f"Request-ID: {nonce}\n{SYSTEM}"},
            {"role": "user", "content": f"The log says 'Request-ID: {nonce}'. What is that?"},
        ]
        for nonce in nonces
    ]
    off = Run()
    off.send(chats[0])
    miss = off.send(chats[1])
    assert (miss.code, miss.message) == ("nonce", 0)

    chat = Chat(TEMPLATES["qwen3"])
    on = [clean(messages) for messages in chats]
    assert [m[1] for m in on] == [m[1] for m in chats]
    assert on[0][0] == on[1][0] == {"role": "system", "content": SYSTEM}
    shared = common(chat.tokens(on[0]), chat.tokens(on[1]))
    assert shared > len(chat.encode(SYSTEM))
    assert common(chat.tokens(chats[0]), chat.tokens(chats[1])) < 20


def test_tools_in_another_order_c5() -> None:
    shuffled = [dict(reversed(tool.items())) for tool in reversed(TOOLS)]
    shuffled[0]["function"] = dict(reversed(shuffled[0]["function"].items()))
    run = Run()
    run.send(BASE, TOOLS)
    assert run.send(BASE, shuffled) is not None
    first, second = stabilize(BASE, TOOLS, RULES), stabilize(BASE, shuffled, RULES)
    assert json.dumps(first.tools) == json.dumps(second.tools)
    assert second.did == ("tools put in the order of their names", "keys of tools put in one order")
    assert stabilize(BASE, first.tools, RULES).did == ()


def test_arguments_and_parts() -> None:
    swapped = copy.deepcopy(AGENT)
    swapped[2]["tool_calls"][0]["function"]["arguments"] = {"start": 1, "path": "src/main.py"}
    assert json.dumps(clean(swapped)) == json.dumps(clean(AGENT))
    text = copy.deepcopy(AGENT)
    text[2]["tool_calls"][0]["function"]["arguments"] = '{"start": 1, "path": "src/main.py"}'
    arguments = clean(text)[2]["tool_calls"][0]["function"]["arguments"]
    assert arguments == '{"path": "src/main.py", "start": 1}'
    # Already in order, or no JSON: left to the letter as the model wrote it.
    for written in ('{"a":1,  "b":2}', "{broken", '"text"'):
        text[2]["tool_calls"][0]["function"]["arguments"] = written
        assert clean(text)[2]["tool_calls"][0]["function"]["arguments"] == written
    parts = edited(BASE, 0, content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert clean(parts)[0]["content"] == "ab"
    image = edited(BASE, 2, content=[{"type": "image_url", "image_url": {"url": "x"}}])
    assert clean(image) == image


def test_hint_says_which_rules_would_have_helped() -> None:
    pair = [f"Request-ID: req_{n}\nToday's date: 2026-03-0{n}\n{SYSTEM}" for n in (1, 2)]
    assert hint(*pair, RULES) == ("request id", "date or time")
    assert hint(pair[0], pair[1] + " More.", RULES) == ()
    assert hint(pair[0], pair[0], RULES) == ()


def test_values_moved_to_the_end_of_the_last_system_message_only() -> None:
    messages = [
        {"role": "system", "content": "Today's date: 2026-03-01\nOne."},
        {"role": "developer", "content": "Session ID: 7a1b2c3d\nTwo."},
        *BASE[1:],
        {"role": "system", "content": "Today's date: 2026-03-01\nLate."},
    ]
    done = stabilize(messages, None, RULES)
    assert done.messages[0]["content"] == "One."
    assert done.messages[1]["content"] == (
        "Two.\n\nValues of this request:\nToday's date: 2026-03-01\nSession ID: 7a1b2c3d"
    )
    assert done.messages[-1] == messages[-1]
    assert done.did == (
        "date or time moved to the end of the system prompt",
        "session id moved to the end of the system prompt",
    )


def test_users_rules(tmp_path: Path) -> None:
    user = tmp_path / "rules.toml"
    user.write_text(
        'disable = ["session id", "no such rule"]\n'
        "[canonical]\ntools = false\nwrong = 1\n"
        '[[rule]]\nname = "branch"\npattern = "^Branch: .*$"\naction = "move"\nleave = "Branch: below"\n'
        '[[rule]]\nname = "bad"\npattern = "("\naction = "drop"\n'
        '[[rule]]\nname = "empty"\npattern = "x*"\naction = "drop"\n'
        '[[rule]]\nname = "verb"\npattern = "x"\naction = "burn"\n'
        '[[rule]]\nname = "loop"\npattern = "x"\naction = "drop"\nleave = "xx"\n'
    )
    rules = load_rules(user)
    assert not rules.tools
    problems = "\n".join(rules.problems)
    for expected in ("no such rule", "wrong = 1", "rule 2", "rule 3", "burn", "leaves behind"):
        assert expected in problems
    # The leave text matches "^Branch: .*$" itself: refused, for it would be moved for ever.
    assert "rule 1" in problems
    user.write_text(
        '[[rule]]\nname = "b"\npattern = "main-\\\\d+"\naction = "move"\nleave = "main"\n'
    )
    done = stabilize([{"role": "system", "content": "On main-17 now."}], None, load_rules(user))
    assert done.messages[0]["content"] == "On main now.\n\nValues of this request:\nmain-17"
    for broken in ("= = =", "disable = 3", "rule = 1", "canonical = 2"):
        user.write_text(broken)
        assert load_rules(user).rules[0] == RULES.rules[0]
    assert load_rules(tmp_path / "missing.toml") == RULES


LINES = st.sampled_from(
    [
        "Today's date: 2026-03-01",
        "The current date and time is Tuesday, June 9, 2026, 3:04 PM.",
        "Request-ID: req_8f3k29dk20",
        "nonce: 12ab34cd",
        "Session ID: 7a1b2c3d",
        "x-acme-billing-header: v=1; cch=aa01;",
        "x-acme-billing-header: v=1; cch=aa01;You are it.",
        "0d3cf8a2-9f7e-4c1b-8a54-1f2e3d4c5b6a",
        "## Current Time",
        "2026-02-06 14:23 (Friday)",
        "<current_date>2026-02-06</current_date>",
        "当前时间：2026年3月1日 10:22",
        "You are an agent.",
        "Values of this request:",
        "",
        "  - item 3",
    ]
)
TEXTS = st.lists(LINES, max_size=9).map("\n".join)
CONTENT = st.one_of(
    TEXTS,
    st.none(),
    st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}), max_size=3),
    st.just([{"type": "image_url", "image_url": {"url": "x"}}]),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
MESSAGE = st.builds(
    lambda role, content, arguments: {
        "role": role,
        "content": content,
        **(
            {"tool_calls": [call("f", **{}) | {"function": {"name": "f", "arguments": arguments}}]}
            if arguments is not None and role == "assistant"
            else {}
        ),
    },
    st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
    CONTENT,
    st.one_of(st.none(), JSON, JSON.map(json.dumps), st.text(max_size=5)),
)
TOOL = st.one_of(
    st.builds(
        lambda name, properties, required: {
            "type": "function",
            "function": {
                "parameters": {"required": required, "properties": properties},
                "name": name,
            },
        },
        st.sampled_from(["a", "b", "c"]),
        st.dictionaries(st.sampled_from(["type", "name", "required", "x"]), JSON, max_size=3),
        st.lists(st.sampled_from("xyz"), max_size=3) | JSON,
    ),
    JSON,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(MESSAGE, max_size=6), st.lists(TOOL, max_size=4) | st.none())
def test_idempotent_and_users_untouched(messages: list[dict[str, Any]], tools: Any) -> None:
    before = copy.deepcopy((messages, tools))
    once = stabilize(messages, tools, RULES)
    assert (messages, tools) == before  # nothing is changed in place
    twice = stabilize(once.messages, once.tools, RULES)
    assert json.dumps([twice.messages, twice.tools]) == json.dumps([once.messages, once.tools])
    assert twice.did == ()
    assert len(once.messages) == len(messages)
    for old, new in zip(messages, once.messages, strict=True):
        if old["role"] == "user":
            assert new is old
    if not once.did:
        assert json.dumps([once.messages, once.tools]) == json.dumps([messages, tools])
    # Nothing is invented: each line of the result was there before, but for the heading.
    start = next(
        (i for i, m in enumerate(messages) if m["role"] not in SYSTEM_ROLES), len(messages)
    )
    lines = {line.strip() for m in messages[:start] for line in _text(m).splitlines()}
    lines |= {RULES.heading, ""}
    for message in once.messages[:start]:
        for line in _text(message).splitlines():
            assert any(line.strip() in old or old in line for old in lines)


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_order_of_keys_does_not_matter_for_the_result(order: tuple[int, int]) -> None:
    pair = [("path", {"type": "string"}), ("limit", {"type": "integer"})]
    properties = dict(pair[i] for i in order)
    required = [pair[i][0] for i in order]
    tool = {
        "function": {
            "parameters": {"required": required, "properties": properties, "type": "object"},
            "name": "read",
        },
        "type": "function",
    }
    found = stabilize(BASE, [tool], RULES).tools
    assert json.dumps(found) == (
        '[{"type": "function", "function": {"name": "read", "parameters": {"type": "object", '
        '"properties": {"limit": {"type": "integer"}, "path": {"type": "string"}}, '
        '"required": ["limit", "path"]}}}]'
    )
