"""The comparison of two runs: what is the same, what is a tie, and what must not pass."""

from __future__ import annotations

import math

import pytest

from thunder_patches.cli._play.client import Answer, Scored
from thunder_patches.cli._play.compare import Comparison, Reply, TextComparison


def scored(*best: dict[int, float], text: str = "one two") -> Scored:
    tokens = tuple(max(place, key=place.__getitem__) for place in best)
    logprobs = tuple(place[token] for place, token in zip(best, tokens, strict=True))
    return Scored(text, tokens, logprobs, best)


def reply(scored: Scored, text: str = "one two", prompt: int = 10) -> Reply:
    return Reply("Ada, turn 1", Answer(text, 0.1, 0.2, prompt, len(scored.tokens), 0), scored)


PLAIN = ({7: -0.1, 8: -3.0}, {9: -0.2, 4: -2.0})


def compared(expected: Reply, found: Reply, tolerance: float = 1e-3) -> Comparison:
    comparison = Comparison(tolerance)
    comparison.add(expected, found)
    return comparison


def test_equal_answers_are_the_same() -> None:
    found = compared(reply(scored(*PLAIN)), reply(scored(*PLAIN)))
    assert found.same and found.tokens == 2 and found.worst == 0.0 and found.requests == 1


def test_nothing_compared_is_not_the_same() -> None:
    assert not Comparison(1.0).same


def test_a_difference_within_the_tolerance_is_reported() -> None:
    near = ({7: -0.1004, 8: -3.0}, {9: -0.2, 4: -2.0})
    found = compared(reply(scored(*PLAIN)), reply(scored(*near)))
    assert found.same and found.worst == pytest.approx(4e-4)


@pytest.mark.parametrize(
    ("best", "complaint"),
    [
        (({7: -0.11, 8: -3.0}, PLAIN[1]), "logprobs at token 0 differ by 0.01"),
        (({7: -0.1, 8: -3.1}, PLAIN[1]), "logprobs at token 0 differ by 0.1"),
        (({7: math.nan, 8: -3.0}, PLAIN[1]), "logprobs at token 0"),
        ((PLAIN[0], {9: -2.0, 4: -0.2}), "token 1: expected 9, found 4"),
        ((PLAIN[0], {5: -0.2, 4: -2.0}), "token 1: expected 9, found 5, inf apart"),
        ((PLAIN[0],), "expected 2 tokens, found 1"),
    ],
)
def test_what_differs_is_named(best: tuple[dict[int, float], ...], complaint: str) -> None:
    found = compared(reply(scored(*PLAIN)), reply(scored(*best)))
    assert not found.same
    assert complaint in found.problems[0] and found.problems[0].startswith("Ada, turn 1: ")


def test_another_choice_between_equals_is_a_tie_and_ends_the_comparison() -> None:
    one = scored({7: -0.6931, 8: -0.6932}, {9: -0.2, 4: -2.0})
    other = scored({7: -0.6932, 8: -0.6931}, {1: -0.5, 2: -1.0}, text="one three")
    found = compared(reply(one), reply(other, text="one three"))
    assert found.same is False and found.tokens == 0 and found.ties == 1 and not found.problems


def test_the_timed_stream_is_compared_too() -> None:
    found = compared(reply(scored(*PLAIN)), reply(scored(*PLAIN), text="one four"))
    assert not found.same and "one four" in found.problems[0]


def test_a_prompt_of_another_length_is_named() -> None:
    found = compared(reply(scored(*PLAIN)), reply(scored(*PLAIN), prompt=11))
    assert found.problems == ["Ada, turn 1: expected a prompt of 10 tokens, found 11"]


def by_text(*pairs: tuple[tuple[str, str], tuple[str, str]]) -> TextComparison:
    """Of what two servers said to each request: the answer that was timed, and the one after it."""
    comparison = TextComparison()
    for expected, found in pairs:
        replies = [
            Reply("Ada, turn 1", Answer(text, 0.1, 0.2, 10, 2, 0), Scored(again, (), (), ()))
            for text, again in (expected, found)
        ]
        comparison.add(*replies)
    return comparison


ONE = ("one two", "one two")


def test_equal_texts_are_the_same() -> None:
    found = by_text((ONE, ONE), (ONE, ONE))
    assert found.same and found.tokens == 4 and found.requests == 2 and found.unsettled == 0


@pytest.mark.parametrize("other", [("one two", "one"), ("one", "one two"), ("", "")])
def test_a_text_that_differs_is_named(other: tuple[str, str]) -> None:
    found = by_text((ONE, ONE), (ONE, other))
    assert not found.same and found.tokens == 2
    assert found.problems[0].startswith("Ada, turn 1: expected the text 'one two', found")


def test_a_text_that_the_expected_server_changes_itself_decides_nothing() -> None:
    found = by_text((ONE, ONE), (("one two", "one"), ("four", "four")))
    assert found.same and found.unsettled == 1 and found.tokens == 2
    alone = by_text((("one two", "one"), ONE))
    assert not alone.same and not alone.problems


def test_empty_texts_prove_nothing() -> None:
    assert not by_text((("", ""), ("", ""))).same


def test_runs_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError):
        Comparison(1.0).add_all([reply(scored(*PLAIN))], [])
