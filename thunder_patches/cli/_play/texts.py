"""Who asks what: five agents with system prompts of any length and questions, in their own words.

Each file in ``agents/`` holds one agent: a role, a handbook, questions, and a pattern with word
lists from which a seed makes as many further lines as a long prompt needs. English, Chinese, Python
and SQL, all written for this package.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

Count = Callable[[str], int]
"""Tokens of a text."""

AGENTS = ("ada", "lin", "marco", "noor", "yun")


@dataclass(frozen=True)
class Agent:
    """One agent's texts."""

    name: str
    does: str
    role: str
    handbook: str
    questions: Sequence[str]
    record: str
    words: Mapping[str, Sequence[str]]

    def system_prompt(self, tokens: int, count: Count, *, seed: int, tag: str = "") -> str:
        """A system prompt of about ``tokens`` tokens: role, handbook, records, cut to length.

        Two seeds give the same role and handbook with other records. ``tag`` comes first, for
        prompts that must share nothing.
        """
        text, left = "", tokens
        for piece in self._pieces(random.Random(seed), tag):
            size = count(piece)
            if size > left:
                return text + _head(piece, left, count)
            text, left = text + piece, left - size
        raise AssertionError("the records never end")

    def _pieces(self, chance: random.Random, tag: str) -> Iterator[str]:
        if tag:
            yield f"{tag}\n"
        yield self.role
        for paragraph in self.handbook.split("\n\n"):
            yield f"\n{paragraph}\n"
        number = chance.randrange(1000, 9000)
        while True:
            words = {name: chance.choice(choices) for name, choices in self.words.items()}
            yield self.record.format(n=number, **words) + "\n"
            number -= 1


def agents(how_many: int = len(AGENTS)) -> list[Agent]:
    """The first ``how_many`` of the five agents."""
    folder = resources.files(__package__) / "agents"
    files = [(folder / f"{name}.toml").read_text(encoding="utf-8") for name in AGENTS[:how_many]]
    return [Agent(**tomllib.loads(file)) for file in files]


def _head(piece: str, tokens: int, count: Count) -> str:
    """The longest head of ``piece`` with at most ``tokens`` tokens, found by halving."""
    low, high = 0, len(piece)
    while low < high:
        middle = (low + high + 1) // 2
        if count(piece[:middle]) <= tokens:
            low = middle
        else:
            high = middle - 1
    return piece[:low]
