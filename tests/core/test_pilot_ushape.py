"""U-shape reinforcement: what is repeated, where it stands, and that later turns repeat it."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from tests.bench.pilot_needle import (
    CHINESE,
    ENGLISH,
    bm25,
    first_sentences,
    haystack,
    landed,
    random_chunks,
)
from tests.core.pilot_support import TEMPLATES, Chat
from thunder_patches.pilot import ushape
from thunder_patches.pilot.ushape import Reinforcer, Settings, select, split_query, tokenize

SMALL = Settings(least_context=2000)


def text(language: str, needle: str, length: int = 5000, depth: float = 0.5) -> str:
    lines = haystack(language, length, random.Random(needle))
    lines.insert(round(depth * len(lines)), needle + " ")
    return "".join(lines)


def conversation(turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": text("en", ENGLISH[0][0])}]
    for number in range(turns):
        messages.append({"role": "user", "content": ENGLISH[number][1]})
        if number < turns - 1:
            messages.append(
                {"role": "assistant", "content": f"Answer {number}. {ENGLISH[number + 1][0]}"}
            )
    return messages


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("language", "needles"), [("en", ENGLISH), ("zh", CHINESE)])
def test_needles_are_found_at_every_depth_and_controls_miss_them(
    language: str, needles: list[tuple[str, ...]], depth: float
) -> None:
    rows = needles[:6]
    hays = [text(language, row[0], 6000, depth) for row in rows]
    asked = [
        [landed(row[0], bm25(hay, row[k])) for row, hay in zip(rows, hays, strict=True)]
        for k in (1, 2)
    ]
    assert all(asked[0])
    assert sum(asked[1]) >= 5
    chance = [
        landed(row[0], random_chunks(hay, row[1])) for row, hay in zip(rows, hays, strict=True)
    ]
    assert sum(chance) <= 4
    if depth:
        lead = [
            landed(row[0], first_sentences(hay, row[1]))
            for row, hay in zip(rows, hays, strict=True)
        ]
        assert not any(lead)


def test_passages_stand_at_the_very_end_in_their_original_order() -> None:
    first, second = ENGLISH[0][0], ENGLISH[6][0]
    lines = haystack("en", 5000, random.Random(3))
    lines.insert(100, second + " ")
    lines.insert(20, first + " ")
    question = "Where is the key of the boathouse, and where are backups moved?"
    messages = [
        {"role": "system", "content": "".join(lines)},
        {"role": "user", "content": question},
    ]
    before = copy.deepcopy(messages)
    done = Reinforcer(SMALL).reinforce(messages)
    assert messages == before
    content = done.messages[-1]["content"]
    assert content.startswith(question + "\n\n" + SMALL.heading)
    assert question.count("key") and content.index(first) < content.index(second)
    passages = content.split(SMALL.heading)[1]
    assert len(passages) <= SMALL.summary + 3 * SMALL.chunks
    assert done.did == f"{content.count(chr(10) + '- ')} passages repeated at the end"
    # Extractive: every passage stands in the text.
    flat = " ".join("".join(lines).split())
    assert all(line[2:] in flat for line in passages.strip().split("\n"))


def test_next_turn_starts_with_the_previous_prompt() -> None:
    """Also for a fresh process, which remembers nothing."""
    chat = Chat(TEMPLATES["chatml"])
    same = Reinforcer(SMALL)
    previous: list[int] = []
    for turns in range(1, 5):
        messages = conversation(turns)
        done = same.reinforce(messages)
        assert done.did
        assert done.messages == Reinforcer(SMALL).reinforce(messages).messages
        text = chat.render(done.messages, False)
        tokens = chat.encode(text)
        assert tokens[: len(previous)] == previous
        previous = tokens
    # A control: adding only to the newest question would change the prompt's past.
    alone = [*conversation(4)[:-1], done.messages[-1]]
    assert chat.encode(chat.render(alone, False))[: len(previous)] != previous


def test_another_past_gives_another_addition() -> None:
    reinforcer = Reinforcer(SMALL)
    messages = conversation(2)
    first = reinforcer.reinforce(messages).messages[-1]
    changed = copy.deepcopy(messages)
    changed[2]["content"] = "Nothing about a flight."
    assert reinforcer.reinforce(changed).messages[-1] != first


def test_short_contexts_tool_turns_and_empty_questions_are_left_alone() -> None:
    for messages in (
        [],
        [{"role": "user", "content": "Short."}],
        [*conversation(1)[:1], {"role": "user", "content": "  "}],
        [*conversation(1)[:1], {"role": "assistant", "content": "Where is the key?"}],
        [*conversation(1)[:1], {"role": "user", "content": "xyzzy?"}],
    ):
        done = Reinforcer(SMALL).reinforce(messages)
        assert done.messages == messages
        assert done.did == ""
    tool = [
        *conversation(1),
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "x"},
    ]
    done = Reinforcer(SMALL).reinforce(tool)
    assert done.did == ""  # nothing new, but the earlier question keeps what was added to it
    assert done.messages[1] == Reinforcer(SMALL).reinforce(tool[:2]).messages[1]


def test_any_fault_gives_the_original_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = conversation(1)

    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(ushape, "summary", fail)
    done = Reinforcer(SMALL).reinforce(messages)
    assert done.messages == messages
    assert done.did == ""
    odd = [{"role": "user", "content": 7}, {"role": "user"}, {}]
    assert Reinforcer(SMALL).reinforce(odd).messages == odd


def test_parts_and_a_question_behind_its_own_document() -> None:
    document = text("zh", CHINESE[2][0])
    parts = [{"type": "text", "text": document + "\n\n" + CHINESE[2][1]}]
    done = Reinforcer(SMALL).reinforce([{"role": "user", "content": parts}])
    content = done.messages[0]["content"]
    assert content[0] == parts[0]
    assert CHINESE[2][0] in content[1]["text"]
    query, rest = split_query(parts[0]["text"], 600)
    assert query == CHINESE[2][1]
    assert query not in rest


def test_terms() -> None:
    assert tokenize("The caches' hits") == tokenize("cache hit")
    pairs = ["问缓", "缓存", "存命", "命中", "中率", "率是"]
    assert tokenize("请问缓存命中率是什么？") == [*pairs, *"缓存命中率"]
    assert tokenize("retry_limit GPT-4") == ["retry_limit", "gpt-4"]
    assert select(["Some text."], "what is the?", SMALL) == []
