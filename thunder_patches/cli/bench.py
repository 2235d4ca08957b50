"""``thunder bench``: the user's own model, with the package and without, side by side.

Every repetition plays the same requests against both servers, which one goes first alternates, and
ratios are taken within a repetition. Prompts of different repetitions share nothing.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thunder_patches import __version__

from ._play.bars import Bar, svg
from ._play.blas import openblas, preload
from ._play.client import Answer
from ._play.compare import Comparison, Reply
from ._play.figures import Spread, folder_size, ratios, seconds, size, times
from ._play.progress import Steps, say
from ._play.server import Server, patched_environment, stock_environment, terminable
from ._play.talk import Talk
from ._play.texts import Agent, Count, agents

WORKLOADS = {
    "cold": "a prompt that nobody has seen",
    "repeat": "the same request again",
    "edited tail": "the last twentieth of the system prompt rewritten",
    "growing chat": "four more turns of the first conversation",
    "restart": "the first request again, in a new server process",
    "parallel": "five agents of two turns each, arriving by chance",
}
CHAT_TURNS = 5
LEAST_TOLERANCE = 1e-4
SLACK = 4.0  # times what the stock server differs from itself


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bench)


def bench(
    model: Annotated[str, typer.Argument(help="Model folder, or a repository the server knows.")],
    tokens: Annotated[
        int | None,
        typer.Option(help="Length of the system prompt; default: what this machine bears.", min=64),
    ] = None,
    repeat: Annotated[int, typer.Option(help="Repetitions.", min=1)] = 3,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.", min=2)] = 16,
    seed: Annotated[int, typer.Option(help="Of texts and arrival times.")] = 0,
    server: Annotated[
        list[str] | None, typer.Option(help="Further argument of both servers, can be repeated.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--svg", help="Write a picture to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Time your model in the stock server, with the package and without, and compare the answers.

    Settings of the package in the environment hold, but for the cache folder: it is a fresh one.
    Exit status 1: an answer differs, or the package was not at work.
    """
    plan = Plan(model, answer, seed, repeat, tuple(server or ()))
    with terminable(), tempfile.TemporaryDirectory(prefix="thunder-bench-") as scratch:
        result = Bench(plan, Path(scratch)).run(tokens)
    if picture is not None:
        picture.write_text(_picture(result), encoding="utf-8")
        say(f"picture: {picture}")
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        _show(result)
    if not result["answers"]["same"]:
        raise typer.Exit(1)


# --- what is played -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What the user asked for."""

    model: str
    answer: int
    seed: int
    repeat: int
    arguments: tuple[str, ...] = ()


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


class Bench:
    """One benchmark in a folder that is thrown away after it."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.blas = openblas()
        self.environ = preload(os.environ, self.blas)
        self.cache = folder / "cache"
        self.count = _counter(plan.model)
        self.together = _both_fit(plan.model)

    def run(self, tokens: int | None) -> dict[str, Any]:
        """Play everything; ``tokens`` is the length of the first system prompt."""
        stock = self._server("stock", stock_environment(self.environ))
        probe, pace = self._probe(stock, tokens)
        tokens = tokens or _tokens(pace)
        say(f"{pace:.0f} tokens/s prefilled: a system prompt of {tokens} tokens")
        tolerance = self._tolerance(stock, probe)
        patched = self._server(
            "patched", patched_environment(self.environ, self.cache, keep_settings=True)
        )
        sides = Side("stock", stock), Side("patched", patched)
        at_work = self._repeat(sides, tokens, pace)
        return self._result(sides, tokens, tolerance, at_work)

    def _server(self, name: str, env: dict[str, str], *more: str) -> Server:
        log = self.folder / f"{name}.log"
        return Server(self.plan.model, log, env=env, arguments=(*self.plan.arguments, *more))

    def _probe(self, stock: Server, tokens: int | None) -> tuple[list[Reply], float]:
        """Replies of a fresh stock server to two requests at once, and its prefill speed."""
        with stock:
            pilot = self._talk(agents()[4], 256, "A test of speed.")
            answer = stock.stream(pilot.messages(0), 2)
            pace = answer.prompt_tokens / answer.first
            self.probes = [
                self._talk(agent, min(tokens or _tokens(pace), _tokens(pace)), "A test of chance.")
                for agent in agents(2)
            ]
            return self._burst(stock, self.probes, (0.0, 0.0), turns=1), pace

    def _tolerance(self, stock: Server, probe: list[Reply]) -> Comparison:
        """How much the stock server differs from itself: other prefill chunks, one at a time."""
        other = self._server("chunks", stock.env, "--prefill-step-size", "192")
        found = Comparison(float("inf"))
        with other:
            for talk, reply in zip(self.probes, probe, strict=True):
                found.add(reply, talk.play(0, other, self.plan.answer))
        return found

    def _repeat(self, sides: tuple[Side, Side], tokens: int, pace: float) -> bool:
        """All repetitions on both sides; whether the package was at work on the second."""
        at_work = False
        total = len(WORKLOADS) * len(sides) * self.plan.repeat
        with Steps(total) as steps, self._running(sides):
            for number in range(self.plan.repeat):
                script = self._script(number, tokens, pace)
                for side in sides if number % 2 == 0 else reversed(sides):
                    with nullcontext() if self.together else side.server:
                        if side.name == "patched":
                            at_work = side.server.patched()
                        self._play(side, script, steps)
        return at_work

    @contextmanager
    def _running(self, sides: tuple[Side, Side]) -> Iterator[None]:
        """Both servers run, where memory allows it."""
        if not self.together:
            yield
            return
        with sides[0].server, sides[1].server:
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
            steps.done(f"{side.name}: {workload}, {seconds(_first(replies))}")

    def _burst(
        self,
        server: Server,
        talks: tuple[Talk, ...] | list[Talk],
        at: tuple[float, ...],
        turns: int,
    ) -> list[Reply]:
        """Several agents at once, each beginning at its time; logprobs are asked for afterwards."""

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

    def _script(self, number: int, tokens: int, pace: float) -> Script:
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

    # --- what came of it ------------------------------------------------------------------------

    def _result(
        self, sides: tuple[Side, Side], tokens: int, own: Comparison, at_work: bool
    ) -> dict[str, Any]:
        stock, patched = sides
        comparison = Comparison(max(LEAST_TOLERANCE, SLACK * own.worst))
        comparison.add_all(stock.all(), patched.all())
        if not at_work:
            comparison.problems.append("the package was not at work: run thunder doctor")
        return {
            "version": __version__,
            "conditions": _conditions(self, tokens),
            "workloads": {name: _figures(name, stock, patched) for name in WORKLOADS},
            "bytes_on_disk": folder_size(self.cache),
            "answers": asdict(comparison)
            | {"same": comparison.same, "stock_differs_from_itself": own.worst},
        }


def _counter(model: str) -> Count:
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(model)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    return count


def _both_fit(model: str) -> bool:
    """Whether memory holds the model twice, with as much again for what the requests need."""
    import psutil

    weights = sum(file.stat().st_size for file in _folder(model).glob("*.safetensors"))
    return 3 * weights < psutil.virtual_memory().available


def _folder(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    from mlx_lm.utils import hf_repo_to_path

    return Path(hf_repo_to_path(model))


def _tokens(pace: float) -> int:
    """A prompt that takes about twelve seconds, 8,192 tokens at most."""
    return int(min(8192, max(256, 12 * pace)))


def _first(replies: list[Reply]) -> float:
    return statistics.median(reply.answer.first for reply in replies)


def _figures(workload: str, stock: Side, patched: Side) -> dict[str, Any]:
    """First tokens in seconds, the ratio stock to patched, tokens of prompts and skipped."""
    mine, other = patched.replies[workload], stock.replies[workload]
    firsts = [_first(replies) for replies in other], [_first(replies) for replies in mine]

    def tokens(repetitions: list[list[Reply]], name: str) -> float:
        return statistics.median(
            sum(getattr(reply.answer, name) for reply in replies) for replies in repetitions
        )

    return {
        "what": WORKLOADS[workload],
        "requests": len(mine[0]),
        "prompt_tokens": tokens(other, "prompt_tokens"),
        "stock": {
            "first_token_s": asdict(Spread.of(firsts[0])),
            "skipped": tokens(other, "cached_tokens"),
        },
        "patched": {
            "first_token_s": asdict(Spread.of(firsts[1])),
            "skipped": tokens(mine, "cached_tokens"),
        },
        "ratio": asdict(ratios(*firsts)),
    }


def _conditions(bench: Bench, tokens: int) -> dict[str, Any]:
    import mlx.core as mx

    plan = bench.plan
    return {
        "model": Path(plan.model).name,
        "system_prompt_tokens": tokens,
        "answer_tokens": plan.answer,
        "repetitions": plan.repeat,
        "seed": plan.seed,
        "server_arguments": list(plan.arguments),
        "servers": "side by side" if bench.together else "one at a time",
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith("THUNDER_")},
        "device": str(mx.default_device()),
        "blas": str(bench.blas) if bench.blas else None,
        "mlx": metadata.version("mlx"),
        "mlx_lm": metadata.version("mlx-lm"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def _show(result: dict[str, Any]) -> None:
    console = Console(highlight=False)
    conditions, answers = result["conditions"], result["answers"]
    console.print(
        f"{conditions['model']}: {conditions['repetitions']} repetitions, servers "
        f"{conditions['servers']}, mlx-lm {conditions['mlx_lm']} on {conditions['system']}"
    )
    table = Table(title="Time to first token, median (least to greatest)", title_justify="left")
    table.add_column("workload")
    for column in ("prompts", "stock", "patched", "sooner", "skipped, stock", "skipped, patched"):
        table.add_column(column, justify="right")
    for name, row in result["workloads"].items():
        stock, patched = Spread(**row["stock"]["first_token_s"]), row["patched"]["first_token_s"]
        table.add_row(
            name,
            f"{row['prompt_tokens']:,.0f}",
            _range(stock, seconds),
            _range(Spread(**patched), seconds),
            _range(Spread(**row["ratio"]), times),
            f"{row['stock']['skipped']:,.0f}",
            f"{row['patched']['skipped']:,.0f}",
        )
    console.print(table)
    console.print(f"on disk: {size(result['bytes_on_disk'])}")
    if answers["same"]:
        ties = f", {answers['ties']} ties" if answers["ties"] else ""
        console.print(
            f"answers: all {answers['requests']} the same, {answers['tokens']} tokens{ties}; "
            f"largest difference of a logprob {answers['worst']:.1e}, allowed "
            f"{answers['tolerance']:.1e} (the stock server differs from itself by "
            f"{answers['stock_differs_from_itself']:.1e})"
        )
    for problem in answers["problems"]:
        console.print(f"[red]differs[/red]: {problem}", soft_wrap=True)


def _range(spread: Spread, form: Any) -> str:
    return f"{form(spread.median)} ({form(spread.low)} to {form(spread.high)})"


def _picture(result: dict[str, Any]) -> str:
    conditions = result["conditions"]
    bars = [
        Bar(
            name,
            Spread(**row["stock"]["first_token_s"]),
            Spread(**row["patched"]["first_token_s"]),
            Spread(**row["ratio"]),
        )
        for name, row in result["workloads"].items()
    ]
    note = (
        f"{conditions['model']}, {conditions['system_prompt_tokens']} tokens, mlx-lm "
        f"{conditions['mlx_lm']}, {conditions['system']}; medians of {conditions['repetitions']}"
    )
    return svg("Time to first token: stock against patched", note, bars)
