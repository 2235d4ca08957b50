"""What approximate skip costs in quality, on the real small model.

    python -m tests.bench.approx_quality [--prompts N] [--tokens N] [--json]

Each case is a cached text in which one word of one block is replaced by another of as many tokens.
The patched server continues it with THUNDER_APPROX_SKIP=1, the stock server exactly. In every second
case the text ends with the beginning of the very line that was edited, so that the replaced word is
what comes next; in the others it ends with a question about something else.

Printed over all cases: KL(exact || approximate) of the next token in nats, how often both would say
the same next token, and how many of the answer's tokens agree before the first that does not. The
KL is over the likeliest 11 tokens that the server lists and the rest as one event; a token that only
the exact answer lists counts as the least that the other lists, so the true KL may be larger. The
control is the answer to the text before the edit: what ignoring the edit would cost. Exit status 1
where a case was not answered by approximate skip, or where it is no better than the control.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.bench.shapes import environment
from thunder_patches.cli._play.client import Scored
from thunder_patches.cli._play.figures import Spread
from thunder_patches.cli._play.model import small_model
from thunder_patches.cli._play.progress import Steps
from thunder_patches.cli._play.server import (
    Server,
    patched_environment,
    stock_environment,
    terminable,
)
from thunder_patches.cli._play.texts import Agent, agents

BLOCK = 32  # at 256 tokens a block, 19 of 20 known blocks would take 5,120 tokens a prompt
TOP = 11
ANSWER = 8


@dataclass(frozen=True)
class Case:
    """A prompt before and after the edit."""

    name: str
    about_the_edit: bool
    block: int
    before: str
    after: str


class Cases:
    """Makes cases in which exactly one block differs."""

    def __init__(self, model: Path, tokens: int, seed: int) -> None:
        from mlx_lm.utils import load_tokenizer

        self.tokenizer = load_tokenizer(model)
        self.tokens = tokens
        self.chance = random.Random(seed)

    def make(self, how_many: int) -> Iterator[Case]:
        """``how_many`` cases, the agents in turn."""
        everyone = agents()
        for number in range(how_many):
            yield self._case(everyone[number % len(everyone)], about_the_edit=number % 2 == 1)

    def _case(self, agent: Agent, about_the_edit: bool) -> Case:
        # Records are what can be edited: keep the handbook short, so that there are many.
        agent = replace(agent, handbook=agent.handbook.split("\n\n")[0])
        system = agent.system_prompt(self.tokens, self._count, seed=1)
        lines = system.splitlines()
        for _ in range(2000):
            at = self.chance.randrange(len(lines) // 4, len(lines) - 1)
            old = self.chance.choice([w for words in agent.words.values() for w in words])
            new = self.chance.choice(next(w for w in agent.words.values() if old in w))
            head = lines[at].split(old)[0].rstrip()
            if old == new or old not in lines[at] or (about_the_edit and not head):
                continue
            edited = [*lines]
            edited[at] = lines[at].replace(old, new)
            question = self.chance.choice(list(agent.questions))
            end = f"One line again:\n{head}" if about_the_edit else f"{question}\nAnswer:"
            before, after = ("\n".join([*text, "", end]) for text in (lines, edited))
            block = self._block(before, after)
            if block is not None:
                return Case(f"{agent.name}: {old} -> {new}", about_the_edit, block, before, after)
        raise RuntimeError(f"no edit of {agent.name}'s prompt stays within one block")

    def _block(self, before: str, after: str) -> int | None:
        """The one block in which the texts differ, if it is in the middle and 95 % are known."""
        old, new = (self.tokenizer.encode(text) for text in (before, after))
        if len(old) != len(new):
            return None
        blocks = {i // BLOCK for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b}
        last = len(new) // BLOCK - 1
        if (len(new) - 1) // BLOCK - 1 < 0.95 * (last + 1):
            return None
        one = blocks.pop() if len(blocks) == 1 else 0
        return one if 0 < one < last - 1 else None

    def _count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))


def divergence(exact: Scored, other: Scored) -> float:
    """KL(exact || other) of the first token in nats, over the listed tokens and the rest as one."""
    listed, least = exact.best[0], min(other.best[0].values())
    p = list(listed.values())
    q = [other.best[0].get(token, least) for token in listed]
    kl = sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
    rest_p, rest_q = (max(1 - sum(map(math.exp, one)), 1e-9) for one in (p, q))
    return kl + rest_p * math.log(rest_p / rest_q)


def agreeing(exact: Scored, other: Scored) -> int:
    """Tokens that are the same before the first that is not."""
    same = 0
    for a, b in zip(exact.tokens, other.tokens, strict=False):
        if a != b:
            break
        same += 1
    return same


def measure(model: Path, prompts: int, tokens: int, folder: Path) -> dict[str, Any]:
    """The figures, each case and their sums."""
    environ = environment()
    on = patched_environment(
        environ,
        folder / "cache",
        keep_settings=False,
        approx_skip="1",
        block_tokens=str(BLOCK),
    )
    rows: list[dict[str, Any]] = []
    with (
        Server(str(model), folder / "stock.log", env=stock_environment(environ)) as stock,
        Server(str(model), folder / "patched.log", env=on) as patched,
        Steps(prompts) as steps,
    ):
        for case in Cases(model, tokens, seed=0).make(prompts):
            steps.now(case.name)
            unedited = patched.score(case.before, ANSWER, TOP)
            approximate = patched.score(case.after, ANSWER, TOP)
            exact = stock.score(case.after, ANSWER, TOP)
            rows.append(
                {
                    "case": case.name,
                    "about_the_edit": case.about_the_edit,
                    "block": case.block,
                    "skip": approximate.skip,
                    "cached_tokens": approximate.cached_tokens,
                    "approximate": _row(exact, approximate),
                    "control": _row(exact, unedited),
                    "texts": [one.text for one in (exact, approximate, unedited)],
                }
            )
            steps.done(f"{case.name}: KL {rows[-1]['approximate']['kl']:.4f}")
    return {
        "model": model.name,
        "block_tokens": BLOCK,
        "prompt_tokens": tokens,
        "answer_tokens": ANSWER,
        "approximate": _sum(rows, "approximate"),
        "control": _sum(rows, "control"),
        "about_the_edit": _sum([r for r in rows if r["about_the_edit"]], "approximate"),
        "cases": rows,
    }


def _row(exact: Scored, other: Scored) -> dict[str, float]:
    return {
        "kl": divergence(exact, other),
        "same_next": int(exact.tokens[0] == other.tokens[0]),
        "agreeing": agreeing(exact, other) / len(exact.tokens),
    }


def _sum(rows: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    kls = [row[kind]["kl"] for row in rows]
    return {
        "cases": len(rows),
        "kl": asdict(Spread.of(kls)) | {"mean": statistics.fmean(kls)},
        "same_next": statistics.fmean(row[kind]["same_next"] for row in rows),
        "agreeing": statistics.fmean(row[kind]["agreeing"] for row in rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=720, help="of the system prompt")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with terminable(), tempfile.TemporaryDirectory() as scratch:
        result = measure(small_model(), options.prompts, options.tokens, Path(scratch))
    if options.json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        for name in ("approximate", "about_the_edit", "control"):
            one = result[name]
            print(
                f"{name}, {one['cases']} cases: KL mean {one['kl']['mean']:.4f}, median "
                f"{one['kl']['median']:.4f}, worst {one['kl']['high']:.4f} nats; same next token "
                f"{one['same_next']:.0%}; {one['agreeing']:.0%} of {ANSWER} tokens agree"
            )
    return 0 if sound(result) else 1


def sound(result: dict[str, Any]) -> bool:
    """Whether every case was served by approximate skip, and better than by ignoring the edit."""
    served = all(row["skip"] == "approximate" for row in result["cases"])
    return served and result["approximate"]["kl"]["mean"] < result["control"]["kl"]["mean"]


if __name__ == "__main__":
    sys.exit(main())
