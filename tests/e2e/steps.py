"""One request, sent to the server under test and checked in every way."""

from __future__ import annotations

from typing import Any

from tests.harness.compare import Answer, assert_same
from tests.harness.fleet import Fleet, ask
from tests.harness.models import Model
from tests.harness.server import Server

MISS = range(0, 8)
"""A miss: two unrelated texts may share a first word or two, and chats their first markers."""


def served(
    fleet: Fleet,
    server: Server,
    model: Model,
    /,
    *,
    cached: int | range | None = None,
    args: tuple[str, ...] = (),
    telling: bool = True,
    **request: Any,
) -> Answer:
    """The server's answer, which must be the stock one, with the expected hit proven.

    Proven means: the usage reports `cached` tokens (or a number in the range), and just the other
    prompt tokens went through the model, so that 0 calls came before the first token of a full hit.
    For requests that run alone.
    """
    with server.watch() as calls:
        answer = ask(server, request)
    expected = fleet.expected(model, args=args, telling=telling, **request)
    assert_same(expected, answer)
    assert answer.prompt_tokens is not None and answer.cached_tokens is not None
    run = calls.prompt_tokens_run(answer.usage["completion_tokens"])
    assert run == answer.prompt_tokens - answer.cached_tokens, (
        f"{answer.cached_tokens} of {answer.prompt_tokens} tokens reported as skipped, {run} run"
    )
    if cached is not None:
        allowed = cached if isinstance(cached, range) else range(cached, cached + 1)
        assert answer.cached_tokens in allowed, (
            f"expected {cached} of {answer.prompt_tokens} tokens cached, "
            f"found {answer.cached_tokens}"
        )
    return answer


def counts(server: Server) -> dict[str, int]:
    """`cache.counts` of the status."""
    found: dict[str, int] = server.status()["cache"]["counts"]
    return found


def added(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What the counters grew by, without those that did not move."""
    return {name: n for name in after if (n := after[name] - before.get(name, 0))}


def shared_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens are the same."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
