"""Time to first token with a known prompt: after a restart against the stock server's own RAM hit.

    python -m tests.bench.ttft [--tokens N] [--repeats N] [--json]

One run: both servers answer the same long prompt from nothing; then, in turns, the patched server is
restarted and asked again, and the stock server, which keeps running, is asked again. Answers and
logprobs must be the same. Targets: restarted against RAM hit <= 1.0 with a full skip, cold against
restarted >= 100. Exit status 1 when one is missed or an answer differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.shapes import Shape, counter, environment
from thunder_patches.cli._play.client import Answer, Message
from thunder_patches.cli._play.compare import Comparison
from thunder_patches.cli._play.figures import Spread, folder_size, ratios, seconds
from thunder_patches.cli._play.server import (
    Server,
    patched_environment,
    stock_environment,
    terminable,
)
from thunder_patches.cli._play.talk import Talk
from thunder_patches.cli._play.texts import agents

TOLERANCE = 1e-3  # float32: two prefill chunk sizes of the stock server differ by a hundredth of it


def measure(tokens: int, repeats: int, folder: Path) -> dict[str, Any]:
    """The figures; times in seconds."""
    shape = Shape()
    model = shape.build(folder / "model")
    count = counter(model)
    agent = agents()[2]
    messages = Talk(agent, agent.system_prompt(tokens, count, seed=0)).messages(0)
    environ, cache = environment(), folder / "cache"
    on = patched_environment(environ, cache, keep_settings=True)
    off = stock_environment(environ)
    with (
        Server(str(model), folder / "stock.log", env=off) as stock,
        Server(str(model), folder / "patched.log", env=on) as patched,
    ):
        cold = {"stock": _first(stock, messages), "patched": _first(patched, messages)}
        _first(stock, messages)  # the first hit of a process pays for what later ones find ready
        hits, restarts = [], []
        for _ in range(repeats):
            patched.restart()
            restarts.append(_first(patched, messages))
            hits.append(_first(stock, messages))
        comparison = Comparison(TOLERANCE)
        comparison.add_scored("warm", stock.score(messages, 8), patched.score(messages, 8))
    warm, ram = ([answer.total for answer in answers] for answers in (restarts, hits))
    return {
        "shape": asdict(shape),
        "prompt_tokens": cold["stock"].prompt_tokens,
        "bytes_on_disk": folder_size(cache),
        "cold_s": {name: answer.total for name, answer in cold.items()},
        "stock_ram_hit_s": asdict(Spread.of(ram)),
        "restarted_s": asdict(Spread.of(warm)),
        "skip": sorted({str(answer.skip) for answer in restarts}),
        "cached_tokens": [answer.cached_tokens for answer in restarts],
        "restarted_to_ram_hit": asdict(ratios(warm, ram)),
        "cold_to_restarted": cold["patched"].total / Spread.of(warm).median,
        "answers": asdict(comparison) | {"same": comparison.same},
    }


def _first(server: Server, messages: list[Message]) -> Answer:
    """One answer of one token: its end is the first token's time, also where it has no text."""
    return server.stream(messages, 1)


def met(result: dict[str, Any]) -> bool:
    """Whether every target is."""
    return (
        result["restarted_to_ram_hit"]["median"] <= 1.0
        and result["cold_to_restarted"] >= 100
        and result["skip"] == ["full"]
        and result["answers"]["same"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with terminable(), tempfile.TemporaryDirectory() as scratch:
        result = measure(options.tokens, options.repeats, Path(scratch))
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        _show(result)
    return 0 if met(result) else 1


def _show(result: dict[str, Any]) -> None:
    def spread(name: str, form: Any) -> str:
        one = Spread(**result[name])
        return f"{form(one.median)} ({form(one.low)} to {form(one.high)})"

    cold = result["cold_s"]
    print(f"prompt: {result['prompt_tokens']} tokens, {result['bytes_on_disk']:,} bytes on disk")
    print(f"cold: stock {seconds(cold['stock'])}, patched {seconds(cold['patched'])}")
    print(f"stock, hit in RAM: {spread('stock_ram_hit_s', seconds)}")
    print(f"patched, restarted: {spread('restarted_s', seconds)}, skip {result['skip']}")
    print(f"restarted to RAM hit: {spread('restarted_to_ram_hit', '{:.2f}'.format)}, target <= 1.0")
    print(f"cold to restarted: {result['cold_to_restarted']:.0f}, target >= 100")
    print(f"answers: {result['answers']}")


if __name__ == "__main__":
    sys.exit(main())
