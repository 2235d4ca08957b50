"""Prefill and decode speed while everything is stored, against the stock server.

    python -m tests.bench.storing [--tokens N] [--decode N] [--repeats N] [--json]

Both servers run side by side and take turns, which one begins alternates. Prefill: prompts that
nobody has seen, to the first token. Decode: the same prompt answered with 1 and with N + 1 tokens,
the difference being N steps. Ratios are patched speed to stock speed, within a repetition. Target:
>= 0.98 each. Exit status 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.shapes import Shape, counter, environment
from thunder_patches.cli._play.client import Message
from thunder_patches.cli._play.figures import Spread, ratios
from thunder_patches.cli._play.server import (
    Server,
    patched_environment,
    stock_environment,
    terminable,
)
from thunder_patches.cli._play.talk import Talk
from thunder_patches.cli._play.texts import Count, agents

TARGET = 0.98


def measure(tokens: int, decode: int, repeats: int, folder: Path) -> dict[str, Any]:
    """The figures; speeds in tokens a second."""
    shape = Shape()
    model = shape.build(folder / "model")
    count = counter(model)
    environ, cache = environment(), folder / "cache"
    on = patched_environment(environ, cache, keep_settings=True)
    prefill: dict[str, list[float]] = {"stock": [], "patched": []}
    decoded: dict[str, list[float]] = {"stock": [], "patched": []}
    with (
        Server(str(model), folder / "stock.log", env=stock_environment(environ)) as stock,
        Server(str(model), folder / "patched.log", env=on) as patched,
    ):
        servers = {"stock": stock, "patched": patched}
        for turn in range(-1, repeats):  # turn -1 warms both
            for name in servers if turn % 2 else reversed(servers):
                cold, step = _one(servers[name], _prompt(count, tokens, turn), decode)
                if turn >= 0:
                    prefill[name].append(cold)
                    decoded[name].append(step)
        status = json.loads(patched.get("/thunder/status")[1])
    return {
        "shape": asdict(shape),
        "tokens": {"prefill": tokens, "decode": decode},
        "prefill": _row(prefill),
        "decode": _row(decoded),
        "counts": status["cache"]["counts"],
    }


def _prompt(count: Count, tokens: int, turn: int) -> list[Message]:
    agent = agents()[2]
    system = agent.system_prompt(tokens, count, seed=turn, tag=f"Log {turn}.")
    return Talk(agent, system).messages(0)


def _one(server: Server, messages: list[Message], decode: int) -> tuple[float, float]:
    """Tokens a second prefilled and decoded."""
    cold = server.stream(messages, 1)
    short = server.stream(messages, 1)
    long = server.stream(messages, decode + 1)
    steps = long.completion_tokens - short.completion_tokens
    return cold.prompt_tokens / cold.total, steps / (long.total - short.total)


def _row(speeds: dict[str, list[float]]) -> dict[str, Any]:
    stock, patched = speeds["stock"], speeds["patched"]
    return {
        "stock": asdict(Spread.of(stock)),
        "patched": asdict(Spread.of(patched)),
        "ratio": asdict(ratios(patched, stock)),
        # Less moved by what else the machine does than the median of ratios.
        "ratio_of_medians": statistics.median(patched) / statistics.median(stock),
        "ratio_of_best": max(patched) / max(stock),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--decode", type=int, default=288, help="more than one block")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with terminable(), tempfile.TemporaryDirectory() as scratch:
        result = measure(options.tokens, options.decode, options.repeats, Path(scratch))
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        for name in ("prefill", "decode"):
            row, ratio = result[name], Spread(**result[name]["ratio"])
            print(
                f"{name}: stock {row['stock']['median']:.1f} tokens/s, patched "
                f"{row['patched']['median']:.1f}, ratio {ratio.median:.3f} ({ratio.low:.3f} to "
                f"{ratio.high:.3f}), best to best {row['ratio_of_best']:.3f}, target >= {TARGET}"
            )
    return (
        0 if all(result[name]["ratio"]["median"] >= TARGET for name in ("prefill", "decode")) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
