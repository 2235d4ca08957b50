"""Whether two servers gave the same answers: tokens, and logprobs within a stated tolerance.

Where a host tells no logprobs, whether their texts are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from .client import Answer, Scored


@dataclass(frozen=True, slots=True)
class Reply:
    """What one server said to one request: timed as a stream, and once more, with logprobs."""

    label: str
    answer: Answer
    scored: Scored


@dataclass(kw_only=True)
class _Sum:
    """The sum over all requests; ``problems`` is empty where every answer is the same."""

    requests: int = 0
    tokens: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """All answers are the same, and there were some."""
        return self.tokens > 0 and not self.problems

    def add(self, expected: Reply, found: Reply) -> None:
        """Compare one pair."""
        self.requests += 1
        problem = self._pair(expected, found)
        if problem:
            self.problems.append(f"{expected.label}: {problem}")

    def add_all(self, expected: Iterable[Reply], found: Iterable[Reply]) -> None:
        """Compare pair by pair; one missing on either side raises ValueError."""
        for one, other in zip(expected, found, strict=True):
            self.add(one, other)

    def _pair(self, expected: Reply, found: Reply) -> str | None:
        """What is wrong, if anything; counts the tokens that are the same."""
        raise NotImplementedError


@dataclass
class Comparison(_Sum):
    """By tokens and logprobs.

    A token counts as the same where the expected server itself ranks both choices within the
    tolerance of each other (a tie); what follows a tie is not compared.
    """

    tolerance: float
    ties: int = 0
    worst: float = 0.0
    """Largest difference of a logprob seen."""

    def add_scored(self, label: str, expected: Scored, found: Scored) -> None:
        """Compare one pair of answers that were not timed."""
        self.requests += 1
        _, problem = self._scored(expected, found)
        if problem:
            self.problems.append(f"{label}: {problem}")

    def _pair(self, expected: Reply, found: Reply) -> str | None:
        problem = _prompts(expected, found)
        if problem:
            return problem
        tied, problem = self._scored(expected.scored, found.scored)
        if problem or tied:
            return problem
        # The stream is the answer that was timed. It carries no tokens, so its text stands for them.
        if _near_tie(expected.scored, self.tolerance):
            return None
        texts = {reply.answer.text for reply in (expected, found)} | {expected.scored.text}
        if len(texts) > 1:
            return f"expected the streamed text {expected.scored.text!r}, found {sorted(texts)}"
        return None

    def _scored(self, expected: Scored, found: Scored) -> tuple[bool, str | None]:
        """Whether the two parted at a tie, and what is wrong."""
        for i, (want, have) in enumerate(zip(expected.tokens, found.tokens, strict=False)):
            if want != have:
                best, other = expected.best[i], found.best[i]
                gap = max(_gap(best, want, have), _gap(other, have, want))
                if gap <= self.tolerance:
                    self.ties += 1
                    return True, None
                return False, f"token {i}: expected {want}, found {have}, {gap:.3g} apart"
            self.tokens += 1
            off = _off(expected, found, i)
            self.worst = max(self.worst, off)
            if not off <= self.tolerance:  # written so that NaN fails
                return False, f"logprobs at token {i} differ by {off:.3g}"
        if len(expected.tokens) != len(found.tokens):
            counts = f"expected {len(expected.tokens)} tokens, found {len(found.tokens)}"
            return False, counts
        return False, None


@dataclass
class TextComparison(_Sum):
    """By the texts alone. Any difference is a problem, for nothing tells a tie from a fault.

    But a request that the expected server itself answered in two ways decides nothing: it is counted
    as ``unsettled``, and what the other server said to it is not compared.
    """

    unsettled: int = 0

    def _pair(self, expected: Reply, found: Reply) -> str | None:
        problem = _prompts(expected, found)
        if problem:
            return problem
        text, again = expected.answer.text, expected.scored.text
        if text != again:
            self.unsettled += 1
            return None
        others = {found.answer.text, found.scored.text} - {text}
        if others:
            return f"expected the text {text!r}, found {sorted(others)}"
        self.tokens += expected.answer.completion_tokens if text else 0
        return None


def _prompts(expected: Reply, found: Reply) -> str | None:
    want, have = expected.answer.prompt_tokens, found.answer.prompt_tokens
    return None if want == have else f"expected a prompt of {want} tokens, found {have}"


def _off(expected: Scored, found: Scored, i: int) -> float:
    """Largest difference at position ``i``: the token's logprob and those that both list."""
    best, other = expected.best[i], found.best[i]
    pairs = [(expected.logprobs[i], found.logprobs[i])]
    pairs += [(best[token], other[token]) for token in best.keys() & other.keys()]
    offs = [abs(a - b) for a, b in pairs]
    return math.nan if any(math.isnan(off) for off in offs) else max(offs)


def _gap(best: dict[int, float], chosen: int, other: int) -> float:
    """How far below its own choice a server ranks the other's; infinite if it is not listed."""
    if chosen not in best or other not in best:
        return math.inf
    return best[chosen] - best[other]


def _near_tie(scored: Scored, tolerance: float) -> bool:
    """Whether some position's two likeliest tokens are within the tolerance of each other."""
    for best in scored.best:
        ranked = sorted(best.values(), reverse=True)
        if len(ranked) > 1 and ranked[0] - ranked[1] <= tolerance:
            return True
    return False
