"""What a request can ask for, on a full hit, a partial one and a miss: always the stock answer."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.e2e.steps import MISS, served
from tests.harness.client import parallel
from tests.harness.compare import Answer, assert_same, differences
from tests.harness.fleet import Fleet
from tests.harness.models import Model, text_of

SAMPLED: dict[str, Any] = {"seed": 7, "temperature": 0.9}
REQUESTS: dict[str, dict[str, Any]] = {
    "temperature": SAMPLED,
    "top-p": SAMPLED | {"top_p": 0.7},
    "top-k": SAMPLED | {"top_k": 12},
    "min-p": SAMPLED | {"min_p": 0.05},
    "repetition": {"repetition_penalty": 1.5, "repetition_context_size": 64},
    "repetition-seed": SAMPLED | {"repetition_penalty": 1.5, "repetition_context_size": 64},
    "presence": {"presence_penalty": 1.2, "presence_context_size": 100},
    "frequency": {"frequency_penalty": 0.8, "frequency_context_size": 100},
    "penalties-seed": SAMPLED
    | {"presence_penalty": 1.2, "frequency_penalty": 0.8, "presence_context_size": 100},
    "logit-bias": {"logit_bias": {"20": 1.5, "35": 1.0, "300": -50.0}},
    "top-logprobs": {"top_logprobs": 5},
    "top-logprobs-seed": SAMPLED | {"top_logprobs": 5},
    "one-token": {"max_tokens": 1},
}


EVERY_KIND = ("temperature", "repetition-seed", "logit-bias", "top-logprobs")
"""Enough for the kinds of layers, which sampling doesn't see; full attention has them all."""


@pytest.mark.one_hybrid
@pytest.mark.parametrize("name", EVERY_KIND)
def test_the_stock_answer_on_every_kind_of_hit(
    fleet: Fleet, model: Model, seed: int, name: str
) -> None:
    _miss_full_partial(fleet, model, seed, REQUESTS[name])


@pytest.mark.parametrize("name", [name for name in REQUESTS if name not in EVERY_KIND])
def test_the_stock_answer_with_full_attention(
    fleet: Fleet, full: Model, seed: int, name: str
) -> None:
    _miss_full_partial(fleet, full, seed, REQUESTS[name])


def _miss_full_partial(fleet: Fleet, model: Model, seed: int, request: dict[str, Any]) -> None:
    """A miss, the same again in full, and a longer prompt on what is known."""
    server = fleet.shared(model)
    telling = "top_logprobs" not in request and "max_tokens" not in request
    prompt = text_of(100, seed)
    longer = prompt + text_of(40, seed + 1)
    for text, cached in ((prompt, MISS), (prompt, 100), (longer, range(1, 101)), (longer, 140)):
        served(fleet, server, model, prompt=text, cached=cached, telling=telling, **request)


def test_the_controls_of_a_request_matter(fleet: Fleet, full: Model, seed: int) -> None:
    """The settings above change the answer; a test that drops them would not pass unseen."""
    prompt = text_of(100, seed)
    plain = fleet.expected(full, prompt=prompt)
    for name, request in REQUESTS.items():
        answer = fleet.expected(full, prompt=prompt, telling=False, **request)
        # The prompt's penalties need not touch the few tokens of one greedy answer's logprobs.
        assert differences(plain, answer) != [], name


@pytest.mark.one_hybrid
def test_stop_words(fleet: Fleet, model: Model, seed: int) -> None:
    """The answer ends before a word of the full answer, on a hit as on a miss."""
    server = fleet.shared(model)
    prompt = text_of(100, seed)
    whole = fleet.expected(model, prompt=prompt)
    for length in range(4, 9):
        stop = model.text(list(whole.tokens[length : length + 1]))
        if stop.isprintable() and stop.strip() and stop not in whole.text[: -len(stop)][:3]:
            break
    for cached in (MISS, 100):
        answer = served(
            fleet, server, model, prompt=prompt, stop=[stop], cached=cached, telling=False
        )
        assert answer.finish == "stop"
        assert stop not in answer.text


@pytest.mark.one_hybrid
@pytest.mark.parametrize("extra", [{}, {"seed": 2}], ids=["batched", "serial"])
@pytest.mark.parametrize("form", ["completion", "chat"])
def test_streams(fleet: Fleet, model: Model, seed: int, form: str, extra: dict[str, int]) -> None:
    """The events of a stream add up to the whole answer; its usage tells of the hit."""
    server = fleet.shared(model)
    text = text_of(100, seed)
    request: dict[str, Any] = (
        {"prompt": text}
        if form == "completion"
        else {"messages": [{"role": "user", "content": text}]}
    )
    expected = fleet.expected(model, **request, **extra)
    length = expected.prompt_tokens
    assert length is not None
    for cached in (MISS, [length]):
        with server.watch() as calls:
            answer = server.stream(**request, **extra)
        assert_same(_without_tokens(expected), answer)
        assert answer.cached_tokens in cached
        run = calls.prompt_tokens_run(answer.usage["completion_tokens"])
        assert run == length - answer.cached_tokens


def test_mixed_batch(fleet: Fleet, model: Model, batch_tolerance: float, seed: int) -> None:
    """Full hits, a partial one and misses in one batch; sampling differs from row to row."""
    server = fleet.shared(model)
    known = [text_of(n, seed + n) for n in (100, 135)]
    requests: list[dict[str, Any]] = [
        {"prompt": known[0]},
        {"prompt": text_of(60, seed + 1)},
        {"prompt": known[1], "repetition_penalty": 1.4},
        {"prompt": known[0] + text_of(33, seed + 2), "logit_bias": {"20": 4.0}},
        {"prompt": text_of(90, seed + 3), "max_tokens": 5},
    ]
    for prompt in known:
        served(fleet, server, model, prompt=prompt, cached=MISS)
    expected = [fleet.expected(model, **request) for request in requests]

    # The first call waits, so that the other requests are there when the batch is made.
    opening = text_of(50, seed + 4)
    fleet.expected(model, prompt=opening)
    server.inject(after=0, sleep=1.0)
    with server.watch() as calls:
        answers = parallel(
            [
                lambda: server.complete(opening),
                *(
                    lambda r=dict(request): server.complete(r.pop("prompt"), **r)
                    for request in requests
                ),
            ]
        )
    assert max(rows for rows, _ in calls) > 2, "the requests did not run in one batch"
    for request, want, answer in zip(requests, expected, answers[1:], strict=True):
        assert_same(want, answer, batch_tolerance, what=str(request)[:60])
    hits = [answer.cached_tokens or 0 for answer in answers[1:]]
    assert (hits[0], hits[2]) == (100, 135)
    assert hits[1] in MISS and hits[4] in MISS
    assert 0 < hits[3] <= 100


def _without_tokens(answer: Answer) -> Answer:
    """Streams carry no logprobs."""
    return dataclasses.replace(answer, tokens=(), logprobs=(), top=())
