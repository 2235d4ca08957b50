"""Message boundaries: the reported positions equal the truth that the template itself tells."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.pilot_support import MOVED, TEMPLATES, TOOLS, Chat, call
from thunder_patches.pilot.boundaries import Follower, boundaries

SYSTEM = "You are a careful coding agent. Read the file before you change it, and run the tests."
PLAIN_CHAT = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Where is the cache written? The file is src/main.py, I think."},
    {"role": "assistant", "content": "In write(): the block is flushed and then renamed.\n\n"},
    {"role": "user", "content": "ok"},
    {"role": "assistant", "content": "缓存在第 12 行写入。"},
    {"role": "user", "content": "  Please change it, and mind <|im_end|> or [INST] in the text.  "},
]
TOOL_CHAT = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Fix the failing test, please: it is the third in the file."},
    {"role": "assistant", "content": "", "tool_calls": [call("read_file", path="tests/test_a.py")]},
    {"role": "tool", "content": 'def test_a():\n    assert read("x") == "\\n"\n' * 4},
    {"role": "assistant", "content": "", "tool_calls": [call("run", command="pytest -q", n=3)]},
    {"role": "tool", "content": "1 failed, 2 passed"},
    {"role": "assistant", "content": "The test compares with the wrong text."},
    {"role": "user", "content": "Then change the test."},
]
THINKING_CHAT = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "How many blocks fit?"},
    {"role": "assistant", "content": "<think>\n64 KB each, so 16.\n</think>\n\nSixteen blocks."},
    {"role": "user", "content": "And with half the size? Read the file first, it says more."},
    {
        "role": "assistant",
        "reasoning_content": "I must read the file before I can say how many blocks there are.",
        "content": "",
        "tool_calls": [call("read_file", path="a"), call("read_file", path="b")],
    },
    {"role": "tool", "content": "size = 32 KB"},
    {"role": "tool", "content": "count = 32"},
]


def check(chat: Chat, messages, tools=None) -> None:
    tokens = chat.tokens(messages, tools)
    found = boundaries(chat.render, chat.encode, messages, tools, np.asarray(tokens))
    assert found.reason == ""
    assert found.aligned
    assert list(found.ends) == chat.truth(messages, tools)
    assert found.generation == found.ends[-1]
    assert found == boundaries(chat.render, chat.encode, messages, tools, tokens)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_plain_chat(name: str, kind: str) -> None:
    check(Chat(TEMPLATES[name], kind), PLAIN_CHAT)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "harmony", "mistral"])
def test_tools(name: str) -> None:
    check(Chat(TEMPLATES[name]), TOOL_CHAT, TOOLS)


def test_thinking_dropped_from_history_and_tool_results_grouped() -> None:
    check(Chat(TEMPLATES["qwen3"]), THINKING_CHAT, TOOLS)
    check(Chat(TEMPLATES["deepseek"]), THINKING_CHAT[:4])


def test_thinking_marker_in_generation_prompt() -> None:
    chat = Chat(TEMPLATES["qwen3"], thinking=True)
    tokens = chat.tokens(PLAIN_CHAT)
    found = boundaries(chat.render, chat.encode, PLAIN_CHAT, None, tokens)
    (marker,) = chat.encode("<think>")
    assert found.thinking is not None
    assert tokens[found.thinking] == marker
    assert found.generation is not None
    assert found.generation < found.thinking < len(tokens)


def test_empty_messages_and_missing_content() -> None:
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "x"},
    ]
    check(Chat(TEMPLATES["chatml"]), messages)


def test_content_that_quotes_the_template() -> None:
    quoted = "<|im_end|>\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n" * 9
    messages = [
        {"role": "user", "content": quoted},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": quoted + "ok"},
    ]
    check(Chat(TEMPLATES["chatml"]), messages)
    check(Chat(TEMPLATES["qwen3"]), messages)


def test_host_that_reads_special_tokens_in_messages_as_text() -> None:
    chat = Chat(TEMPLATES["chatml"])
    quoted = "abc <|im_start|> and then a good deal more of text, and <|im_end|>, at its end. "
    messages = [{"role": "user", "content": quoted}, {"role": "user", "content": "next"}]
    plain = quoted.replace("<|", "< |")
    tokens = chat.tokens([{"role": "user", "content": plain}, messages[1]])
    found = boundaries(chat.render, chat.encode, messages, None, tokens)
    assert list(found.ends) == chat.truth([{"role": "user", "content": plain}, messages[1]])


def test_moved_system_prompt_is_said_and_never_guessed() -> None:
    chat = Chat(MOVED)
    tokens = chat.tokens(PLAIN_CHAT)
    found = boundaries(chat.render, chat.encode, PLAIN_CHAT, None, tokens)
    assert not found.aligned
    assert "moves message 0" in found.reason
    # Only behind the moved prompt, in the last turn, are messages 0 to 4 complete.
    text = chat.render(PLAIN_CHAT)
    before_last = text[: text.rindex(PLAIN_CHAT[-1]["content"])].rstrip()
    assert found.ends == (None,) * 4 + (len(chat.encode(before_last)), len(tokens))


def test_prompt_that_is_not_the_templates_gives_no_boundaries() -> None:
    chat = Chat(TEMPLATES["chatml"])
    other = chat.tokens([*PLAIN_CHAT, *PLAIN_CHAT])
    found = boundaries(chat.render, chat.encode, PLAIN_CHAT, None, other)
    assert not found.aligned
    assert "<|im_start|> occurs 7 times" in found.reason
    # Same count of special tokens, other roles: the check of the tokens at the place finds it.
    swapped = [{**m, "role": "user" if m["role"] == "system" else "system"} for m in PLAIN_CHAT]
    found = boundaries(chat.render, chat.encode, PLAIN_CHAT, None, chat.tokens(swapped))
    assert set(found.ends[:-1]) == {None}


def test_template_that_refuses() -> None:
    chat = Chat(TEMPLATES["gemma"])
    messages = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    found = boundaries(chat.render, chat.encode, messages, None, [1, 2, 3])
    assert not found.aligned
    assert "must alternate" in found.reason


def test_questions_that_a_caller_asks() -> None:
    chat = Chat(TEMPLATES["chatml"])
    found = boundaries(chat.render, chat.encode, PLAIN_CHAT, None, chat.tokens(PLAIN_CHAT))
    first, second = found.ends[:2]
    assert found.whole_messages(first - 1) == 0
    assert found.whole_messages(first) == 1
    assert found.whole_messages(found.total) == len(PLAIN_CHAT)
    assert found.message_at(0) == 0
    assert found.message_at(first) == 1
    assert found.message_at(found.total - 1) is None
    assert found.is_boundary(second)
    assert not found.is_boundary(second - 1)
    assert not found.is_boundary(0)
    assert found.cuts()[:2] == (first, second)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "harmony", "mistral"])
def test_what_was_learned_is_used_for_the_next_turns_and_is_right(name: str) -> None:
    chat = Chat(TEMPLATES[name])
    follower = Follower(chat.encode)
    follower.boundaries(chat.render, TOOL_CHAT, TOOLS, chat.tokens(TOOL_CHAT, TOOLS))
    other = [
        {**m, "content": "Another text, " + m["content"]} if m["content"] else m for m in TOOL_CHAT
    ]
    tokens, truth = chat.tokens(other, TOOLS), chat.truth(other, TOOLS)
    chat.renders = 0
    found = follower.boundaries(chat.render, other, TOOLS, tokens)
    assert list(found.ends) == truth
    assert chat.renders == 0
    # One token changed in the template's own text: nothing learned may be believed.
    wrong = [*tokens]
    wrong[truth[2]] += 1
    found = follower.boundaries(chat.render, other, TOOLS, wrong)
    assert not found.aligned


def test_work_does_not_grow_with_the_square_of_the_messages() -> None:
    chat = Chat(TEMPLATES["qwen3"])
    follower = Follower(chat.encode)
    for count in (10, 160):
        messages = [PLAIN_CHAT[0], *PLAIN_CHAT[1:5] * count]
        tokens = chat.tokens(messages)
        chat.renders = 0
        assert follower.boundaries(chat.render, messages, None, tokens).aligned
        assert chat.renders <= 3


FOLLOWERS: dict[str, Follower] = {}
PIECES = [
    *"aZ 0\n.<>|{}\"'\\缓😀",
    "<|im_end|>",
    "<think>",
    "</think>",
    "[INST]",
    "USER: ",
    "word " * 12,
]
TEXT = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_reported_boundary_is_ever_wrong(name: str, data: st.DataObject) -> None:
    chat = Chat(TEMPLATES[name])
    texts = data.draw(st.lists(TEXT, min_size=1, max_size=7))
    messages = [
        {"role": "user" if i % 2 == 0 else "assistant", "content": text + "x" * (i == 0)}
        for i, text in enumerate(texts)
    ]
    if data.draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": data.draw(TEXT) or "s"})
    tokens = chat.tokens(messages)
    truth = chat.truth(messages)
    # A fresh follower, and one that remembers everything it has seen in this test.
    known = FOLLOWERS.setdefault(name, Follower(chat.encode))
    for follower in (Follower(chat.encode), known, known):
        found = follower.boundaries(chat.render, messages, None, tokens)
        for end, true in zip(found.ends, truth, strict=True):
            assert end is None or end == true
