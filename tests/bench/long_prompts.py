"""Long prompts through the real server, with the package and stock beside it.

    python -m tests.bench.long_prompts [memory] [overhead] [stalls] [--tokens N ...] [--repeats N]
        [--json]

Models of random float32 weights; without a name all three are measured.

memory: the most that MLX held while a prompt was prefilled, less what it held before, less the
prompt's KV; a fresh server for each length and side. Target: the longest at most 1.1 times the
shortest. The RAM tier is left out (THUNDER_RAM_CACHE_MB=0): it keeps KV, within a budget of its own.
Given apart: the same for the whole request, with the copies of all KV that are made between prompt and
answer and after it, which are some times the KV (for stock only the larger of both is known), and the
process's greatest resident size.

overhead: seconds to the first token of unseen prompts of 16K tokens; stock, with the package, and
with the package but the host's own chunks, in turns. Target: chunking costs at most 2.5 %, the third
against the second.

stalls: an answer is streamed while a prompt of 8K tokens that nobody has seen is prefilled; the
longest wait between two pieces of the answer meanwhile, in chunks: the time that the stock server
takes for the last 2,048 of the prompt's tokens. A full-attention and a hybrid model. Target: <= 2.

Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.shapes import TOKENIZER, Shape, environment
from tests.bench.snapshots import SIZES, model_of
from thunder_patches.cli._play.client import Answer
from thunder_patches.cli._play.figures import Spread, ratios, size
from thunder_patches.cli._play.model import small_model
from thunder_patches.cli._play.server import (
    Server,
    patched_environment,
    stock_environment,
    terminable,
)

STEP = 2048
"""The host's chunk, in tokens."""
SMALL = Shape(hidden=192, layers=2, heads=3, kv_heads=1, feed_forward=512)
"""For the longest prompts: 1 KiB of KV a token, and as many heads to a KV head as SmolLM2 has."""
MIDDLE = Shape(hidden=256, layers=4, heads=4, kv_heads=2, feed_forward=1024)
LONG, STALLING = 16_384, 8192
"""Tokens of the prompts of overhead and stalls."""
FLAT, OVERHEAD, STALL = 1.1, 1.025, 2.0
"""The targets."""
PIECES = 24
"""Of the answer that a prompt comes into, before it comes."""

Text = Callable[[int, int], str]


def prompts(model: Path) -> Text:
    """``text(tokens, seed)``: words that are a token each."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(word[1:] for word in vocabulary if re.fullmatch("Ġ[a-z]+", word))

    def text(tokens: int, seed: int) -> str:
        return " ".join(random.Random(seed).choices(words, k=tokens))

    return text


class Side:
    """Starts servers of one kind."""

    def __init__(self, folder: Path, model: Path, settings: dict[str, str] | None) -> None:
        """``settings`` None: the stock server."""
        self.folder, self.model, self.settings = folder, model, settings
        self._started = 0

    @contextlib.contextmanager
    def server(self) -> Iterator[Watched]:
        self._started += 1
        folder = self.folder / str(self._started)
        folder.mkdir(parents=True)
        environ = environment()
        if self.settings is None:
            environ = stock_environment(environ)
        else:
            environ = patched_environment(
                environ, folder / "cache", keep_settings=False, **self.settings
            )
        with Watched(self.model, folder, environ) as server:
            yield server


class Watched(Server):
    """A server that tells what memory it takes."""

    def __init__(self, model: Path, folder: Path, environ: dict[str, str]) -> None:
        self._peaks = folder / "peaks.json"
        paths = [str(Path(__file__).with_name("peaks")), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = ":".join(filter(None, paths))
        environ["PEAKS_FILE"] = str(self._peaks)
        super().__init__(str(model), folder / "log", env=environ)

    def begin(self) -> int:
        """Bytes that MLX holds; the peak is that of what comes from here on."""
        reset = self._peaks.with_name(self._peaks.name + ".reset")
        reset.touch()
        while reset.exists():
            time.sleep(0.05)
        time.sleep(0.2)
        return self.memory()["active"]

    def memory(self) -> dict[str, int]:
        time.sleep(0.2)
        return dict(json.loads(self._peaks.read_text()))

    def ask(self, text: str, tokens: int = 1) -> Answer:
        return self.stream([{"role": "user", "content": text}], tokens)


# --- memory


def measure_memory(lengths: list[int], folder: Path) -> dict[str, Any]:
    model = SMALL.build(folder / "model")
    text, kv = prompts(model), kv_bytes(model)
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, settings in (("stock", None), ("patched", {"ram_cache_mb": "0"})):
        side, rows[name] = Side(folder / name, model, settings), []
        for length in lengths:
            with side.server() as server:
                before = server.begin()
                resident = server.memory()["resident"]
                answer = server.ask(text(length, length))
                found = server.memory()
            held = answer.prompt_tokens * kv
            rows[name].append(
                {
                    "tokens": answer.prompt_tokens,
                    "kv": held,
                    "beyond": (found["prefill"] or found["peak"]) - before - held,
                    "whole_beyond": found["peak"] - before - held,
                    "resident_beyond": found["resident"] - resident - held,
                    "seconds": answer.first,
                }
            )
    ratio = {name: row[-1]["beyond"] / row[0]["beyond"] for name, row in rows.items()}
    return {"shape": asdict(SMALL), "kv_bytes_per_token": kv, **rows, "longest_to_shortest": ratio}


def kv_bytes(model: Path) -> int:
    """KV bytes a token of a full-attention model in float32."""
    config = json.loads((model / "config.json").read_text())
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * dim * 4)


# --- overhead


def measure_overhead(tokens: int, repeats: int, folder: Path) -> dict[str, Any]:
    model = MIDDLE.build(folder / "model")
    text = prompts(model)
    sides = {"stock": None, "patched": {}, "host_chunks": {"chunked_prefill": "0"}}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(Side(folder / name, model, settings).server())
            for name, settings in sides.items()
        }
        for turn in range(repeats):
            for name in servers if turn % 2 else reversed(servers):
                seconds[name].append(servers[name].ask(text(tokens, turn)).first)
        status = json.loads(servers["patched"].get("/thunder/status")[1])
    return {
        "shape": asdict(MIDDLE),
        "tokens": tokens,
        "seconds": {name: asdict(Spread.of(values)) for name, values in seconds.items()},
        "patched_to_host_chunks": _compared(seconds["patched"], seconds["host_chunks"]),
        "patched_to_stock": _compared(seconds["patched"], seconds["stock"]),
        "counts": status["cache"]["counts"],
    }


def _compared(over: list[float], under: list[float]) -> dict[str, Any]:
    # The least of each is less moved by what else the machine does.
    return asdict(ratios(over, under)) | {"least": min(over) / min(under)}


# --- stalls


def measure_stalls(tokens: int, repeats: int, folder: Path) -> dict[str, Any]:
    kinds = {"full": MIDDLE.build, "hybrid": hybrid}
    return {name: _stalls(build, tokens, repeats, folder / name) for name, build in kinds.items()}


def hybrid(folder: Path) -> Path:
    """Write a model folder: three gated delta layers to one of full attention."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    real = small_model("4bit")
    folder.mkdir()
    for name in TOKENIZER:
        shutil.copy(real / name, folder / name)
    config = json.loads((real / "config.json").read_text())
    model = model_of(**SIZES["tiny"], vocabulary=config["vocab_size"])
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
    (folder / "config.json").write_text(json.dumps(asdict(model.args) | ends))
    return folder


def _stalls(
    build: Callable[[Path], Path], tokens: int, repeats: int, folder: Path
) -> dict[str, Any]:
    folder.mkdir()
    model = build(folder / "model")
    text = prompts(model)
    longest: dict[str, list[float]] = {"stock": [], "patched": []}
    wholes: list[float] = []
    parts: list[float] = []
    with (
        Side(folder / "stock", model, None).server() as stock,
        Side(folder / "patched", model, {}).server() as patched,
    ):
        for turn in range(-1, repeats):  # turn -1 warms
            seed = 10 * (turn + 1)  # Random takes a number without its sign
            wholes.append(stock.ask(text(tokens, seed)).first)
            parts.append(stock.ask(text(tokens - STEP, seed + 1)).first)
            for name, server in (("stock", stock), ("patched", patched)):
                gap = _longest_gap(server, text(30, seed + 2), text(tokens, seed + 3))
                if turn >= 0:
                    longest[name].append(gap)
    # The least of each is less moved by what else the machine does than a difference of two.
    chunk = min(wholes) - min(parts)
    return {
        "tokens": tokens,
        "chunk_seconds": chunk,
        **{
            name: {
                "longest_seconds": asdict(Spread.of(gaps)),
                "chunks": asdict(Spread.of([gap / chunk for gap in gaps])),
            }
            for name, gaps in longest.items()
        },
    }


def _longest_gap(server: Watched, running: str, coming: str) -> float:
    """Seconds between two pieces of an answer, at most, from when ``coming`` is sent to its end."""
    pieces: list[float] = []
    done = threading.Event()
    faults: list[BaseException] = []

    def answer() -> None:
        body = {"messages": [{"role": "user", "content": running}], "max_tokens": 4096}
        body |= {"temperature": 0.0, "stream": True}
        try:
            events = server._events(body)
            with contextlib.closing(events):  # leaving closes the connection: the host stops
                for _ in events:
                    pieces.append(time.perf_counter())
                    if done.is_set():
                        return
            raise RuntimeError(f"the answer ended after {len(pieces)} pieces, before the prompt")
        except BaseException as error:
            faults.append(error)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    while len(pieces) < PIECES and thread.is_alive():
        time.sleep(0.001)
    begin = time.perf_counter()
    server.ask(coming)
    end = time.perf_counter()
    done.set()
    thread.join()
    if faults:
        raise faults[0]
    times = [begin, *(at for at in pieces if begin < at < end), end]
    return max(b - a for a, b in itertools.pairwise(times))


# --- the command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", metavar="memory|overhead|stalls")
    parser.add_argument("--tokens", type=int, nargs="+", default=[LONG, 2 * LONG], help="of memory")
    parser.add_argument("--overhead-tokens", type=int, default=LONG)
    parser.add_argument("--stall-tokens", type=int, default=STALLING)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    wanted = options.what or ["memory", "overhead", "stalls"]
    if unknown := set(wanted) - {"memory", "overhead", "stalls"}:
        parser.error(f"expected memory, overhead or stalls, found {', '.join(sorted(unknown))}")
    found: dict[str, Any] = {}
    with terminable(), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if "memory" in wanted:
            found["memory"] = measure_memory(options.tokens, _made(folder / "memory"))
        if "overhead" in wanted:
            found["overhead"] = measure_overhead(
                options.overhead_tokens, options.repeats, _made(folder / "overhead")
            )
        if "stalls" in wanted:
            found["stalls"] = measure_stalls(
                options.stall_tokens, options.repeats, _made(folder / "stalls")
            )
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _tell(found)
    return 0 if _reached(found) else 1


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _reached(found: dict[str, Any]) -> bool:
    memory, overhead, stalls = (found.get(name) for name in ("memory", "overhead", "stalls"))
    return (
        (not memory or memory["longest_to_shortest"]["patched"] <= FLAT)
        and (not overhead or overhead["patched_to_host_chunks"]["median"] <= OVERHEAD)
        and all(kind["patched"]["chunks"]["median"] <= STALL for kind in (stalls or {}).values())
    )


def _tell(found: dict[str, Any]) -> None:
    if memory := found.get("memory"):
        for name in ("stock", "patched"):
            for row in memory[name]:
                print(
                    f"memory, {name}: {row['tokens']:,} tokens, KV {size(row['kv'])}, beyond it "
                    f"{size(row['beyond'])}, of the whole request {size(row['whole_beyond'])}, "
                    f"resident {size(row['resident_beyond'])}; "
                    f"{row['seconds']:.1f} s"
                )
            print(f"memory, {name}: {memory['longest_to_shortest'][name]:.2f} x, target <= {FLAT}")
    if overhead := found.get("overhead"):
        for name, spread in overhead["seconds"].items():
            print(f"overhead, {name}: {_spread(spread)} s for {overhead['tokens']:,} tokens")
        for name in ("patched_to_host_chunks", "patched_to_stock"):
            row = overhead[name]
            print(f"overhead, {name}: {_spread(row)}, least to least {row['least']:.3f}")
        print(f"target: patched_to_host_chunks <= {OVERHEAD}")
    for kind, row in found.get("stalls", {}).items():
        print(f"stalls, {kind}: a chunk is {row['chunk_seconds']:.2f} s")
        for name in ("stock", "patched"):
            chunks = _spread(row[name]["chunks"])
            seconds = _spread(row[name]["longest_seconds"])
            print(f"stalls, {kind}, {name}: {chunks} chunks ({seconds} s), target <= {STALL:.0f}")


def _spread(values: dict[str, float]) -> str:
    spread = Spread(values["median"], values["low"], values["high"])
    return f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})"


if __name__ == "__main__":
    sys.exit(main())
