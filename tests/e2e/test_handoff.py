"""Exact handoff: an answer that goes on from a handed context is that of one long conversation."""

from __future__ import annotations

import pytest

from tests.e2e.handing import conversation, goes_on, hand_over, in_words, text_after
from tests.harness.compare import assert_same, differences
from tests.harness.fleet import Fleet
from tests.harness.models import Model, ModelFactory, text_of

WINDOWED = 1e-5
"""How far the stock server's own logprobs part where a sliding window is prefilled in other chunks."""

NEXT = [{"role": "user", "content": text_of(20, 77)}]


@pytest.mark.one_hybrid
def test_messages_without_an_answer(fleet: Fleet, model: Model, kind: str, seed: int) -> None:
    """One agent hands over what it has read; another goes on from it."""
    server = fleet.shared(model)
    read = [*conversation(seed), {"role": "assistant", "content": text_of(9, seed + 2)}]
    handed = hand_over(server, messages=read)
    count = handed["tokens"]
    assert handed["next_position"] == handed["stored_tokens"] == count
    goes_on(fleet, server, model, {"messages": [*read, *NEXT]}, handed, messages=NEXT, cached=count)


@pytest.mark.one_hybrid
def test_after_an_answer_with_its_own_tokens(
    fleet: Fleet, model: Model, kind: str, seed: int
) -> None:
    """The template leaves no thinking in earlier turns; the handed context has it all the same."""
    server = fleet.shared(model)
    read, words = conversation(seed), in_words(model)
    first = server.chat(read, **words)
    handed = hand_over(server, request=first.raw["id"])
    count = first.prompt_tokens + 12
    assert handed["tokens"] == count
    whole = model.chat(read) + model.text(list(first.tokens)) + text_after(model, NEXT)
    answer = goes_on(
        fleet,
        server,
        model,
        {"prompt": whole},
        handed,
        messages=NEXT,
        cached=count,
        tolerance=WINDOWED if kind == "sliding" else 0.0,
    )
    told = answer.raw["thunder"]["handoff"]
    assert (told["used"], told["form"], told["tokens"]) == (True, "continuation", count)


@pytest.mark.one_hybrid
def test_after_an_answer_in_the_templates_words(
    fleet: Fleet, models: ModelFactory, model: Model, kind: str, seed: int
) -> None:
    """Where the template keeps what was answered, it is one conversation."""
    plain = models.get(model.spec.arch, template="plain")
    server = fleet.shared(plain)
    read, words = conversation(seed), in_words(plain)
    first = server.chat(read, **words)
    handed = hand_over(server, request=first.raw["id"])
    said = {"role": "assistant", "content": plain.text(list(first.tokens))}
    expected = {"messages": [*read, said, *NEXT]}
    answer = goes_on(
        fleet,
        server,
        plain,
        expected,
        handed,
        messages=NEXT,
        cached=handed["tokens"],
        tolerance=WINDOWED if kind == "sliding" else 0.0,
    )
    assert answer.raw["thunder"]["handoff"]["form"] == "conversation"


def test_quantised_kv(fleet: Fleet, full: Model, seed: int) -> None:
    """Under ``--kv-bits`` the state is handed over in the form that it has."""
    args = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")
    server = fleet.shared(full, args=args)
    read = conversation(seed)
    handed = hand_over(server, messages=read)
    expected = fleet.expected(full, args=args, messages=[*read, *NEXT])
    answer = server.chat(NEXT, thunder={"handoff": handed["id"]})
    assert_same(expected, answer)


def test_a_stream_and_a_completion_tell_of_it(fleet: Fleet, full: Model, seed: int) -> None:
    server = fleet.shared(full)
    handed = hand_over(server, messages=conversation(seed))
    streamed = server.stream(messages=NEXT, thunder={"handoff": handed["id"]})
    told = [event["thunder"] for event in streamed.raw if "thunder" in event]
    assert [one["handoff"]["used"] for one in told] == [True]
    assert streamed.cached_tokens == handed["tokens"]
    read, more = text_of(70, seed), text_of(20, seed + 1)
    handed = hand_over(server, prompt=read)
    goes_on(fleet, server, full, {"prompt": read + more}, handed, prompt=more, cached=70)
    assert server.status()["contexts"]["handoffs"] >= 2


def test_another_context_gives_another_answer(fleet: Fleet, full: Model, seed: int) -> None:
    """The control: these comparisons would see a context of other words."""
    server = fleet.shared(full)
    read, other = conversation(seed), conversation(seed + 50)
    handed = hand_over(server, messages=other)
    answer = server.chat(NEXT, thunder={"handoff": handed["id"]})
    assert differences(fleet.expected(full, messages=[*read, *NEXT]), answer)
