"""``thunder demo``: a morning of three agents, with the package and without, and what differs.

Both runs send the same requests to the stock server's own command. Only the environment differs:
``THUNDER=1`` with a fresh cache folder, then ``THUNDER=0``.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thunder_patches import __version__

from ._play.blas import openblas, preload
from ._play.client import Message
from ._play.compare import Comparison, Reply
from ._play.figures import folder_size, seconds, size, times
from ._play.model import small_model
from ._play.progress import Steps, say
from ._play.server import Server, patched_environment, stock_environment, terminable
from ._play.talk import Talk
from ._play.texts import Count, agents

AGENTS = 3
TURNS = 5
RESTART_BEFORE = 3  # turns count from 0
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo(
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
    minutes: Annotated[
        float, typer.Option(help="About how long to play; prompts are sized for it.", min=1)
    ] = 4.5,
    keep: Annotated[
        Path | None, typer.Option(help="Keep the cache and the servers' logs in this folder.")
    ] = None,
) -> None:
    """Play three agents against the stock server, with the package and without, and compare.

    Exit status 1: an answer differs, or the package was not at work.
    """
    start = time.monotonic()
    stage = _stage()
    with terminable(), _workplace(keep) as folder:
        result = _play(stage, folder, minutes)
    result["seconds"] = round(time.monotonic() - start, 1)
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        _show(result)
    if not result["answers"]["same"]:
        raise typer.Exit(1)


# --- what is played -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """Model, tokenizer and the environment of both servers."""

    model: Path
    dtype: str
    blas: Path | None
    device: str
    count: Count


@dataclass(frozen=True)
class Pace:
    """Tokens a second of this machine, measured on the server."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class Sizes:
    """Of a system prompt, an answer and a cache block, in tokens."""

    system: int
    answer: int
    block: int


def _stage() -> Stage:
    import mlx.core as mx

    blas = openblas()
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    # Without a fast float32 product, bfloat16 is the quickest that MLX has on a CPU.
    dtype = "bfloat16" if on_cpu and blas is None else "float32"
    model = small_model(dtype, report=say)
    if blas is not None:
        say(f"matrix products by {blas} (LD_PRELOAD)")
    elif on_cpu:
        say("no OpenBLAS found: MLX's own matrix products, many times slower; short prompts")
        say("(Debian and Ubuntu: apt-get install libopenblas0-pthread)")

    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(model)

    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    return Stage(model, dtype, blas, "cpu" if on_cpu else "gpu", count)


def _play(stage: Stage, folder: Path, minutes: float) -> dict[str, Any]:
    environ = {**preload(os.environ, stage.blas), "HF_HUB_OFFLINE": "1"}
    with Server(str(stage.model), folder / "pace.log", env=stock_environment(environ)) as server:
        pace = _measure(server, stage.count)
    sizes = _sizes(pace, minutes * 60)
    say(
        f"{pace.prefill:.0f} tokens/s prefilled, {pace.decode:.1f} decoded: "
        f"system prompts of {sizes.system} tokens, answers of {sizes.answer}"
    )
    talks = [
        Talk(agent, agent.system_prompt(sizes.system, stage.count, seed=number))
        for number, agent in enumerate(agents(AGENTS))
    ]
    cache = folder / "cache"
    on = patched_environment(environ, cache, keep_settings=False, block_tokens=str(sizes.block))
    with Steps(2 * AGENTS * TURNS) as steps:
        server = Server(str(stage.model), folder / "patched.log", env=on)
        patched, at_work = _morning(server, talks, sizes, steps, "patched")
        on_disk = folder_size(cache)
        server = Server(str(stage.model), folder / "stock.log", env=stock_environment(environ))
        stock, _ = _morning(server, talks, sizes, steps, "stock")

    comparison = Comparison(TOLERANCE[stage.dtype])
    comparison.add_all(stock, patched)
    if not at_work:
        comparison.problems.append("the package was not at work in the server: run thunder doctor")
    return {
        "version": __version__,
        "conditions": _conditions(stage) | {"pace": asdict(pace), "tokens": asdict(sizes)},
        "turns": [_turn(number, stock, patched) for number in range(TURNS)],
        "wait_seconds": {"stock": _waited(stock), "patched": _waited(patched)},
        "tokens_skipped": {"stock": _skipped(stock), "patched": _skipped(patched)},
        "prompt_tokens": sum(reply.answer.prompt_tokens for reply in stock),
        "bytes_on_disk": on_disk,
        "answers": asdict(comparison) | {"same": comparison.same},
    }


def _measure(server: Server, count: Count) -> Pace:
    """Prefill and decode speed on a short prompt that nobody asks again."""
    talk = Talk(agents()[3], agents()[3].system_prompt(200, count, seed=0, tag="A test of speed."))
    messages: list[Message] = talk.messages(0)
    server.stream([{"role": "user", "content": "Say hello."}], 4)  # the first decode is slower
    answer = server.stream(messages, 9)
    decoding = max(answer.total - answer.first, 1e-3)
    return Pace(
        prefill=answer.prompt_tokens / answer.first,
        decode=max(answer.completion_tokens - 1, 1) / decoding,
    )


def _sizes(pace: Pace, budget: float) -> Sizes:
    """Lengths with which everything takes about ``budget`` seconds.

    With S tokens of system prompt and about 40 a turn, each agent costs the stock server 2 S + 7
    turns (it starts from nothing twice) and the patched one S + 5 turns. Each request is answered
    twice, and five servers start.
    """
    starts = 5 * 6.0
    answer = 12 if pace.decode >= 6 else 6
    decoding = 2 * (2 * AGENTS * TURNS) * answer / pace.decode
    turns = AGENTS * 12 * 40
    fits = ((budget - starts - decoding) * pace.prefill - turns) / (3 * AGENTS)
    system = int(min(2048, max(96, fits)))
    return Sizes(system, answer, block=256 if system >= 768 else 32)


def _morning(
    server: Server, talks: list[Talk], sizes: Sizes, steps: Steps, name: str
) -> tuple[list[Reply], bool]:
    """All turns of all agents, the server restarted before turn RESTART_BEFORE; and if patched."""
    replies: list[Reply] = []
    with server:
        at_work = server.patched()
        for turn in range(TURNS):
            if turn == RESTART_BEFORE:
                steps.now(f"{name}: restarting the server")
                server.restart()
            for talk in talks:
                steps.now(f"{name}: {talk.agent.name}, turn {turn + 1}")
                reply = talk.play(turn, server, sizes.answer)
                replies.append(reply)
                steps.done(f"{name}: {reply.label}, {seconds(reply.answer.first)}")
    return replies, at_work


# --- what came of it ----------------------------------------------------------------------------


def _turn(number: int, stock: list[Reply], patched: list[Reply]) -> dict[str, Any]:
    """The medians over the agents of one turn."""
    mine = slice(number * AGENTS, (number + 1) * AGENTS)

    def median(replies: list[Reply], field: str) -> float:
        return statistics.median(getattr(reply.answer, field) for reply in replies[mine])

    return {
        "turn": number + 1,
        "after_restart": number == RESTART_BEFORE,
        "prompt_tokens": median(stock, "prompt_tokens"),
        "stock": {"first_token_s": median(stock, "first"), "skipped": median(stock, _CACHED)},
        "patched": {"first_token_s": median(patched, "first"), "skipped": median(patched, _CACHED)},
    }


_CACHED = "cached_tokens"


def _waited(replies: list[Reply]) -> float:
    return round(sum(reply.answer.first for reply in replies), 3)


def _skipped(replies: list[Reply]) -> int:
    return sum(reply.answer.cached_tokens for reply in replies)


def _conditions(stage: Stage) -> dict[str, Any]:
    return {
        "model": "SmolLM2-135M-Instruct",
        "dtype": stage.dtype,
        "device": stage.device,
        "blas": str(stage.blas) if stage.blas else None,
        "mlx": metadata.version("mlx"),
        "mlx_lm": metadata.version("mlx-lm"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def _show(result: dict[str, Any]) -> None:
    console = Console(highlight=False)
    conditions, answers = result["conditions"], result["answers"]
    console.print(
        f"{AGENTS} agents, {TURNS} turns each, one restart; {conditions['model']} in "
        f"{conditions['dtype']}, mlx-lm {conditions['mlx_lm']} on {conditions['system']}"
    )
    table = Table(title="Medians over the agents", title_justify="left")
    table.add_column("turn")
    for column in ("prompt", "stock", "patched", "sooner", "skipped, stock", "skipped, patched"):
        table.add_column(column, justify="right")
    for turn in result["turns"]:
        if turn["after_restart"]:
            table.add_section()
        stock, patched = turn["stock"], turn["patched"]
        label = f"{turn['turn']}" + (", after the restart" if turn["after_restart"] else "")
        table.add_row(
            label,
            f"{turn['prompt_tokens']:,.0f}",
            seconds(stock["first_token_s"]),
            seconds(patched["first_token_s"]),
            times(stock["first_token_s"] / patched["first_token_s"]),
            f"{stock['skipped']:,.0f}",
            f"{patched['skipped']:,.0f}",
        )
    console.print(table)
    waits, skipped = result["wait_seconds"], result["tokens_skipped"]
    console.print(
        f"waited for first tokens: stock {seconds(waits['stock'])}, "
        f"patched {seconds(waits['patched'])}"
    )
    console.print(
        f"tokens skipped: stock {skipped['stock']:,}, patched {skipped['patched']:,}, "
        f"of {result['prompt_tokens']:,}; on disk: {size(result['bytes_on_disk'])}; "
        f"all of it took {result['seconds'] / 60:.1f} minutes"
    )
    if answers["same"]:
        ties = f", {answers['ties']} ties" if answers["ties"] else ""
        console.print(
            f"answers: all {answers['requests']} the same, {answers['tokens']} tokens{ties}; "
            f"largest difference of a logprob {answers['worst']:.1e}, "
            f"allowed {answers['tolerance']:.0e}"
        )
    for problem in answers["problems"]:
        console.print(f"[red]differs[/red]: {problem}", soft_wrap=True)


@contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    """A folder for cache and logs: ``keep``, emptied of an earlier demo, or a temporary one."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="thunder-demo-") as scratch:
            yield Path(scratch)
        return
    keep.mkdir(parents=True, exist_ok=True)
    if (keep / "cache").exists():
        raise typer.BadParameter(f"{keep / 'cache'} exists: name another folder")
    yield keep
