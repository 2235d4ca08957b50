"""Answers compared token by token and logprob by logprob, with a difference one can read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What a client got.

    Attributes:
        text: the answer's text; for a chat the content.
        reasoning: the chat's thinking text, or "".
        tokens: the sampled ids; empty where the request asked for no logprobs.
        logprobs: natural logarithms, one a token, as sent (float32 written in full).
        top: the alternatives of each token as (id, logprob), most likely first.
        finish: "stop", "length" or "tool_calls".
        prompt_tokens: the prompt's length.
        cached_tokens: how many of them the server says it skipped; None where it does not say.
        keepalives: comment lines of a stream.
        raw: the whole response; for a stream, its events.
    """

    text: str
    finish: str | None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    keepalives: tuple[str, ...] = ()
    raw: Any = field(default=None, repr=False, compare=False)

    @property
    def usage(self) -> dict[str, Any]:
        """The usage object as sent."""
        sources = self.raw if isinstance(self.raw, list) else [self.raw]
        found = [source["usage"] for source in sources if source.get("usage")]
        return dict(found[-1]) if found else {}


def differences(expected: Answer, found: Answer, tolerance: float = 0.0) -> list[str]:
    """What is not the same, in words; empty where all is. `tolerance` is in logprob units."""
    lines: list[str] = []
    for name in ("text", "reasoning", "finish", "prompt_tokens"):
        want, have = getattr(expected, name), getattr(found, name)
        if want != have:
            lines.append(f"{name}: expected {want!r}, found {have!r}")
    if expected.tokens != found.tokens:
        at = _first_difference(expected.tokens, found.tokens)
        lines.append(
            f"tokens differ from position {at}: expected {list(expected.tokens[at : at + 8])}, "
            f"found {list(found.tokens[at : at + 8])} "
            f"(lengths {len(expected.tokens)} and {len(found.tokens)})"
        )
    lines += _logprob_differences(expected.logprobs, found.logprobs, tolerance)
    for position, (want, have) in enumerate(zip(expected.top, found.top, strict=False)):
        if not _same_alternatives(want, have, tolerance):
            lines.append(f"alternatives at {position}: expected {want}, found {have}")
            break
    if len(expected.top) != len(found.top):
        lines.append(f"alternatives: expected {len(expected.top)}, found {len(found.top)}")
    return lines


def assert_same(expected: Answer, found: Answer, tolerance: float = 0.0, what: str = "") -> None:
    """Fails unless both answers are equal, and says where they part."""
    lines = differences(expected, found, tolerance)
    if lines:
        raise AssertionError("\n  ".join([f"{what or 'the answer'} is not the expected:", *lines]))


def assert_telling(answer: Answer) -> None:
    """Fails for an answer that proves nothing: fewer than four distinct tokens or flat logprobs."""
    if len(set(answer.tokens)) < 4:
        raise AssertionError(f"expected 4 or more distinct tokens, found {list(answer.tokens)}")
    if max(answer.logprobs) - min(answer.logprobs) < 0.1:
        raise AssertionError(f"expected logprobs that vary, found {list(answer.logprobs)}")


def _first_difference(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _logprob_differences(
    expected: tuple[float, ...], found: tuple[float, ...], tolerance: float
) -> list[str]:
    if len(expected) != len(found):
        return [f"logprobs: expected {len(expected)}, found {len(found)}"]
    # Written so that NaN counts as different.
    bad = [
        i
        for i, (x, y) in enumerate(zip(expected, found, strict=True))
        if not abs(x - y) <= tolerance
    ]
    if not bad:
        return []
    i = bad[0]
    worst = max(abs(expected[j] - found[j]) for j in bad)
    return [
        f"{len(bad)} of {len(expected)} logprobs differ, the first at {i}: "
        f"expected {expected[i]!r}, found {found[i]!r}; worst {worst:.3g}, allowed {tolerance:.3g}"
    ]


def _same_alternatives(
    a: tuple[tuple[int, float], ...], b: tuple[tuple[int, float], ...], tolerance: float
) -> bool:
    if len(a) != len(b):
        return False
    if tolerance == 0.0:
        return a == b
    # Near ties may change places: compare the values in order.
    return all(abs(x[1] - y[1]) <= tolerance for x, y in zip(a, b, strict=True))
