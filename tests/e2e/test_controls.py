"""The tools of these tests can fail, and the facts about the stock server that they rest on."""

from __future__ import annotations

import dataclasses
import http.client
import math

import pytest

from tests.harness.compare import Answer, assert_same, assert_telling, differences
from tests.harness.fleet import NO_HOST_CACHE, Fleet
from tests.harness.models import CONFIGS, ModelFactory, text_of

ANSWER = Answer(
    text=" time way",
    finish="length",
    prompt_tokens=5,
    tokens=(1, 2, 3, 4),
    logprobs=(-0.5, -1.5, -0.25, -2.0),
    top=(((1, -0.5), (7, -0.75)), ((2, -1.5), (3, -1.75))),
)


def test_equal_answers_are_equal() -> None:
    assert differences(ANSWER, dataclasses.replace(ANSWER)) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"text": " time day"}, "text: expected ' time way', found ' time day'"),
        ({"finish": "stop"}, "finish: expected 'length', found 'stop'"),
        ({"prompt_tokens": 6}, "prompt_tokens: expected 5, found 6"),
        ({"tokens": (1, 2, 9, 4)}, "tokens differ from position 2"),
        ({"tokens": (1, 2, 3)}, "tokens differ from position 3"),
        ({"logprobs": (-0.5, math.nextafter(-1.5, 0), -0.25, -2.0)}, "1 of 4 logprobs differ"),
        ({"logprobs": (-0.5, math.nan, -0.25, -2.0)}, "1 of 4 logprobs differ"),
        ({"logprobs": (-0.5,)}, "logprobs: expected 4, found 1"),
        ({"top": (((7, -0.5), (1, -0.75)), ((2, -1.5), (3, -1.75)))}, "alternatives at 0"),
        ({"top": ()}, "alternatives: expected 2, found 0"),
    ],
)
def test_a_corrupted_answer_is_reported(change: dict[str, object], told: str) -> None:
    corrupted = dataclasses.replace(ANSWER, **change)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="is not the expected") as failure:
        assert_same(ANSWER, corrupted)
    assert told in str(failure.value)


def test_a_tolerance_allows_that_much_and_no_more() -> None:
    near = dataclasses.replace(ANSWER, logprobs=(-0.5, -1.5001, -0.25, -2.0))
    assert differences(ANSWER, near, tolerance=1e-3) == []
    assert differences(ANSWER, near, tolerance=1e-5) != []
    other_token = dataclasses.replace(near, tokens=(1, 2, 3, 5))
    assert differences(ANSWER, other_token, tolerance=1e-3) != []


def test_an_answer_that_proves_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="distinct tokens"):
        assert_telling(dataclasses.replace(ANSWER, tokens=(1, 1, 2, 3)))
    with pytest.raises(AssertionError, match="vary"):
        assert_telling(dataclasses.replace(ANSWER, logprobs=(-0.5, -0.51, -0.5, -0.52)))


@pytest.mark.parametrize("arch", CONFIGS)
def test_answers_depend_on_every_part_of_the_prompt(
    fleet: Fleet, models: ModelFactory, seed: int, arch: str
) -> None:
    """One word changed in the first, a middle or the last tenth moves the answer's logprobs."""
    model = models.get(arch)
    words = text_of(200, seed).split()
    expected = fleet.expected(model, prompt=_join(words))
    for position in (5, 100, 195):
        changed = list(words)
        changed[position] = "year" if words[position] != "year" else "home"
        answer = fleet.expected(model, prompt=_join(changed))
        assert differences(expected, answer) != [], f"word {position} left no trace"


def test_the_reference_answers_like_a_freshly_started_server(
    fleet: Fleet, models: ModelFactory, seed: int
) -> None:
    """Repeats and extensions on the kept server, each against a server that knows nothing."""
    model = models.get("qwen3")
    prompt = text_of(70, seed)
    longer = prompt + text_of(40, seed + 1)
    for text in (longer, prompt):
        fleet.expected(model, prompt=text)
    expected = fleet.expected(model, prompt=longer, max_tokens=13)
    assert_same(fleet.stock(model).complete(longer, max_tokens=13), expected)


@pytest.mark.stock_control
def test_model_calls_are_counted(fleet: Fleet, models: ModelFactory, seed: int) -> None:
    """The stock server runs every prompt token, on both paths; this is what `watch` must see."""
    model = models.get("qwen3")
    prompt = text_of(70, seed)
    server = fleet.stock(model, args=NO_HOST_CACHE)
    for extra in ({}, {"seed": 1}, {}):
        with server.watch() as calls:
            answer = server.complete(prompt, **extra)
        assert calls.prompt_tokens_run(len(answer.tokens)) == answer.prompt_tokens == 70


@pytest.mark.stock_control
def test_an_injected_fault_reaches_the_client(
    fleet: Fleet, models: ModelFactory, seed: int
) -> None:
    """On the serial path the host reports the error and lives on."""
    server = fleet.stock(models.get("qwen3"), args=["--prefill-step-size", "16"])
    server.inject(after=2, error="injected by the test")
    with pytest.raises((OSError, http.client.HTTPException, RuntimeError)):
        server.complete(text_of(70, seed), seed=1)
    assert "injected by the test" in server.log()
    assert server.healthy()
    assert_telling(server.complete(text_of(70, seed + 1), seed=1))


@pytest.mark.stock_control
def test_stock_dies_of_an_exact_hit(fleet: Fleet, models: ModelFactory, seed: int) -> None:
    """A completion, then its prompt and answer but for the last token: the key that was stored.

    0.32 reports it on /health; 0.31 hangs with a healthy /health.
    """
    model = models.get("qwen3")
    server = fleet.stock(model)
    prompt, stored = exact_hit(fleet, models, seed)
    server.complete(prompt)
    with pytest.raises((OSError, http.client.HTTPException, RuntimeError)):
        server.complete(stored, timeout=6)
    assert server.healthy() is not fleet.host.at_least("0.32.0")
    assert server.running


def exact_hit(fleet: Fleet, models: ModelFactory, seed: int) -> tuple[str, str]:
    """A prompt, and a prompt that is just what the stock server stores after answering the first."""
    model = models.get("qwen3")
    for attempt in range(20):
        prompt = text_of(40, seed + attempt)
        answer = fleet.expected(model, prompt=prompt, telling=False)
        stored = model.tokens(prompt) + list(answer.tokens)
        text = model.text(stored)
        if model.tokens(text) == stored:
            return prompt, text
    raise AssertionError("no answer in 20 gave its own tokens back when read as text")


def _join(words: list[str]) -> str:
    return "".join(f" {word}" for word in words)
