"""Time to first token under oMLX, stock against patched: a repeat, an edited tail, a restart.

    python -m tests.bench.omlx_ttft [--kind KIND] [--tokens N] [--repeats N] [--json FILE]

Run it with the Python of an environment that has oMLX and this package. For each model kind a stock and
a patched server run side by side and take turns, which one begins alternates; stock has its own SSD cache
on, as it comes. Times are those of whole requests for one token, in seconds; prompts that nobody has seen
are "cold". Decoding: tokens a second of long answers to new prompts, while they are stored. Answers must be
the same; exit status 1 when one differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.harness.models import Model, ModelFactory, text_of
from tests.hosts.omlx.serving import OmlxServer

KINDS = {"full": "qwen3", "hybrid": "qwen3_next", "sliding": "gemma3"}
LARGER = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
UNWATCHED: dict[str, str | None] = {"HARNESS_TRACE": None, "PYTHONPATH": None}


class Bench:
    """Two servers of one model."""

    def __init__(self, model: Model, folder: Path) -> None:
        python = Path(sys.executable)
        self.servers = {
            name: OmlxServer(python, model.path, folder / name, env={**UNWATCHED, "THUNDER": on})
            for name, on in (("stock", "0"), ("patched", "1"))
        }
        self.different: list[str] = []
        self._turn = 0

    def each(self, prompt: str, tokens: int = 1) -> dict[str, tuple[float, int]]:
        """Both servers' seconds and cached tokens; which is asked first alternates."""
        self._turn += 1
        names = list(self.servers) if self._turn % 2 else list(reversed(self.servers))
        found, texts = {}, set()
        for name in names:
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
            start = time.perf_counter()
            answer = self.servers[name].post("/v1/completions", body, timeout=300)
            taken = time.perf_counter() - start
            details = answer["usage"]["prompt_tokens_details"]
            found[name] = taken, int(details["cached_tokens"] or 0)
            texts.add(answer["choices"][0]["text"])
        if len(texts) > 1:
            self.different.append(prompt[-40:])
        return found

    def start(self) -> None:
        """Both processes, with the model loaded."""
        for server in self.servers.values():
            server.start()
        self.each(text_of(20, self._turn + 10_000))

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()


def measure(model: Model, folder: Path, tokens: int, repeats: int) -> dict[str, Any]:
    """The figures of one model kind."""
    bench = Bench(model, folder)
    known = text_of(tokens, 1)
    head = known[: len(known) * 9 // 10].rsplit(" ", 1)[0]
    rows: dict[str, list[dict[str, tuple[float, int]]]] = {}
    try:
        bench.start()
        rows["cold"] = [bench.each(known)]
        rows["cold"] += [bench.each(text_of(tokens, 100 + i)) for i in range(repeats - 1)]
        rows["repeat"] = [bench.each(known) for _ in range(repeats)]
        rows["edited tail"] = [
            bench.each(head + text_of(tokens // 10, 200 + i)) for i in range(repeats)
        ]
        decode = [_decode(bench, tokens // 8, 300 + i) for i in range(repeats)]
        rows["restart"] = []
        for _ in range(2):
            bench.stop()
            bench.start()
            rows["restart"].append(bench.each(known))
    finally:
        for server in bench.servers.values():
            server.kill()
    figures = {what: _figures(found) for what, found in rows.items()}
    speeds = {name: statistics.median(d[name] for d in decode) for name in bench.servers}
    speeds["ratio"] = statistics.median(d["patched"] / d["stock"] for d in decode)
    return {"seconds": figures, "decode_tokens_s": speeds, "different": bench.different}


def _decode(bench: Bench, tokens: int, seed: int, steps: int = 192) -> dict[str, float]:
    """Tokens a second of a long answer: a full repeat of the prompt taken off."""
    prompt = text_of(tokens, seed)
    bench.each(prompt)
    short, long = bench.each(prompt), bench.each(prompt, steps + 1)
    return {name: steps / (long[name][0] - short[name][0]) for name in bench.servers}


def _figures(rows: list[dict[str, tuple[float, int]]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in ("stock", "patched"):
        times = [row[name][0] for row in rows]
        result[name] = {
            "median": statistics.median(times),
            "low": min(times),
            "high": max(times),
            "cached_tokens": [row[name][1] for row in rows],
        }
    ratios = [row["stock"][0] / row["patched"][0] for row in rows]
    result["times_sooner"] = statistics.median(ratios)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: all")
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"prompt_tokens": options.tokens, "model": LARGER, "kinds": {}}
    with tempfile.TemporaryDirectory() as scratch:
        models = ModelFactory(Path(scratch) / "models")
        for kind in options.kind or KINDS:
            model = models.get(KINDS[kind], config=LARGER)
            found = measure(model, Path(scratch) / kind, options.tokens, options.repeats)
            result["kinds"][kind] = found
            _show(kind, found)
            if options.json:
                options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if any(found["different"] for found in result["kinds"].values()) else 0


def _show(kind: str, found: dict[str, Any]) -> None:
    for what, row in found["seconds"].items():
        stock, patched = row["stock"], row["patched"]
        print(
            f"{kind}, {what}: stock {stock['median']:.3f} s ({stock['cached_tokens']} cached), patched "
            f"{patched['median']:.3f} s ({patched['cached_tokens']}), {row['times_sooner']:.1f} times"
        )
    speeds = found["decode_tokens_s"]
    print(
        f"{kind}, decoding: stock {speeds['stock']:.1f} tokens/s, patched {speeds['patched']:.1f}, "
        f"ratio {speeds['ratio']:.3f}; answers that differ: {len(found['different'])}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
