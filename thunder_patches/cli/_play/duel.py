"""Two servers, the same requests: what ``thunder bench`` plays.

Every repetition plays all workloads against the stock and the patched server; which one goes first
alternates. Prompts of different repetitions share nothing.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from .blas import openblas, preload
from .client import Answer
from .compare import Comparison, Reply
from .figures import seconds
from .progress import Steps, say
from .server import HOSTS, Server, model_folder, patched_environment, stock_environment
from .talk import Talk
from .texts import Agent, Count, agents

WORKLOADS = {
    "cold": "a prompt that nobody has seen",
    "repeat": "the same request again",
    "edited tail": "the last twentieth of the system prompt rewritten",
    "growing chat": "four more turns of the first conversation",
    "restart": "the first request again, in a new server process",
    "parallel": "five agents of two turns each, arriving by chance",
}
CHAT_TURNS = 5


@dataclass(frozen=True)
class Plan:
    """What the user asked for."""

    model: str
    answer: int
    seed: int
    repeat: int
    arguments: tuple[str, ...] = ()
    host: str = "mlx_lm"
    """A name of `HOSTS`."""


@dataclass(frozen=True)
class Script:
    """The requests of one repetition, the same for both servers."""

    first: Talk
    edited: Talk
    crowd: tuple[Talk, ...]
    arrivals: tuple[float, ...]
    """Seconds at which the crowd's agents begin."""


@dataclass
class Side:
    """One of the two servers and what it has said, by workload and repetition."""

    name: str
    server: Server
    replies: dict[str, list[list[Reply]]] = field(
        default_factory=lambda: {workload: [] for workload in WORKLOADS}
    )

    def all(self) -> Iterator[Reply]:
        """Every reply, in an order that is the same for both sides."""
        for repetitions in self.replies.values():
            for replies in repetitions:
                yield from replies


class Duel:
    """One benchmark in a folder that is thrown away after it."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.cache = folder / "cache"
        self.blas = openblas()
        self.count = _counter(plan.model)
        self.together = _both_fit(plan.model)
        environ = preload(os.environ, self.blas)
        ours = patched_environment(environ, self.cache, keep_settings=True)
        self.stock = Side("stock", self._server("stock", stock_environment(environ)))
        self.patched = Side("patched", self._server("patched", ours))
        self.at_work = False
        """Whether the package was, in the patched server."""
        self.tokens = 0
        """Of the first system prompt."""
        self.stock_against_itself = Comparison(float("inf"))

    def run(self, tokens: int | None) -> None:
        """Play everything; ``tokens`` is the length of the first system prompt, None: by speed."""
        pace = self._probe(tokens)
        self.tokens = tokens or _affordable(pace)
        say(f"{pace:.0f} tokens/s prefilled: a system prompt of {self.tokens} tokens")
        sides = (self.stock, self.patched)
        with Steps(len(WORKLOADS) * len(sides) * self.plan.repeat) as steps, self._running():
            for number in range(self.plan.repeat):
                script = self._script(number, pace)
                for side in sides if number % 2 == 0 else reversed(sides):
                    with nullcontext() if self.together else side.server:
                        if side is self.patched:
                            self.at_work = side.server.patched()
                        self._play(side, script, steps)

    def _server(self, name: str, env: dict[str, str], *more: str) -> Server:
        log = self.folder / f"{name}.log"
        server = HOSTS[self.plan.host]
        return server(self.plan.model, log, env=env, arguments=(*self.plan.arguments, *more))

    def _probe(self, tokens: int | None) -> float:
        """The stock server's prefill speed, and how much its logprobs differ, where it tells them.

        Two prompts at once in one server, then one after the other in another that prefills in
        other chunks: nothing that the package does should change an answer by more.
        """
        with self.stock.server as server:
            pilot = self._talk(agents()[4], 256, "A test of speed.")
            answer = server.stream(pilot.messages(0), 2)
            pace = answer.prompt_tokens / answer.first
            if server.compared == "text":
                return pace
            size = min(tokens or _affordable(pace), _affordable(pace))
            talks = [self._talk(agent, size, "A test of chance.") for agent in agents(2)]
            first = self._burst(server, talks, (0.0, 0.0), turns=1)
        with self._server("chunks", server.env, "--prefill-step-size", "192") as other:
            second = [talk.play(0, other, self.plan.answer) for talk in talks]
        self.stock_against_itself.add_all(first, second)
        return pace

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Both servers run, where memory allows it."""
        if not self.together:
            yield
            return
        with self.stock.server, self.patched.server:
            yield

    def _play(self, side: Side, script: Script, steps: Steps) -> None:
        server, answer = side.server, self.plan.answer
        for workload in WORKLOADS:
            steps.now(f"{side.name}: {workload}")
            if workload == "restart":
                server.restart()
            match workload:
                case "edited tail":
                    replies = [script.edited.play(0, server, answer)]
                case "growing chat":
                    replies = [script.first.play(t, server, answer) for t in range(1, CHAT_TURNS)]
                case "parallel":
                    replies = self._burst(server, script.crowd, script.arrivals, turns=2)
                case _:
                    replies = [script.first.play(0, server, answer)]
            side.replies[workload].append(
                [replace(reply, label=f"{workload}, {reply.label}") for reply in replies]
            )
            steps.done(f"{side.name}: {workload}, {seconds(first_token(replies))}")

    def _burst(
        self,
        server: Server,
        talks: Sequence[Talk],
        at: Sequence[float],
        turns: int,
    ) -> list[Reply]:
        """Several agents at once, each beginning at its time; scores are asked for afterwards."""

        def one(talk: Talk, begin: float) -> list[Answer]:
            time.sleep(begin)
            answers = []
            for turn in range(turns):
                answer = server.stream(talk.messages(turn), self.plan.answer)
                if len(talk.heard) == turn:
                    talk.heard.append(answer.text)
                answers.append(answer)
            return answers

        with ThreadPoolExecutor(len(talks)) as pool:
            heard = list(pool.map(one, talks, at))
        return [
            Reply(
                f"{talk.agent.name}, turn {turn + 1}",
                answer,
                server.score(talk.messages(turn), self.plan.answer),
            )
            for talk, mine in zip(talks, heard, strict=True)
            for turn, answer in enumerate(mine)
        ]

    def _script(self, number: int, pace: float) -> Script:
        tokens = self.tokens
        chance = random.Random(f"{self.plan.seed} {number}")
        everyone = agents()
        agent = everyone[number % len(everyone)]
        tag = f"Run {self.plan.seed}-{number}."
        first = self._talk(agent, tokens, tag)
        kept = len(first.system) - len(first.system) // 20
        tail = agent.system_prompt(max(tokens // 20, 8), self.count, seed=-1, tag="Correction.")
        arrivals, now = [], 0.0
        for _ in everyone:
            arrivals.append(now)
            now += chance.expovariate(1.0) * 0.5 * (tokens / 4) / pace
        return Script(
            first,
            Talk(agent, first.system[:kept] + "\n" + tail),
            tuple(self._talk(one, max(tokens // 4, 32), tag) for one in everyone),
            tuple(arrivals),
        )

    def _talk(self, agent: Agent, tokens: int, tag: str) -> Talk:
        # The tag names the agent, too: two agents must share nothing but the template's start.
        tag = f"{agent.name}: {tag}"
        return Talk(agent, agent.system_prompt(tokens, self.count, seed=self.plan.seed, tag=tag))


def _counter(model: str) -> Count:
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(model)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    return count


def _both_fit(model: str) -> bool:
    """Whether memory holds the model twice, with as much again for what the requests need."""
    import psutil

    weights = sum(file.stat().st_size for file in model_folder(model).glob("*.safetensors"))
    return 3 * weights < psutil.virtual_memory().available


def _affordable(pace: float) -> int:
    """A prompt that takes about twelve seconds, 8,192 tokens at most."""
    return int(min(8192, max(256, 12 * pace)))


def first_token(replies: Sequence[Reply]) -> float:
    """Median seconds to the first token."""
    return statistics.median(reply.answer.first for reply in replies)
