"""Streamed experts against the resident model and other ways to stream, by page-cache budget.

    PYTHONPATH=. python tests/bench/moe_streaming.py [--layers 17] [--tokens 10] [--rounds 3]

Builds a random qwen3_moe with more than 4 GB of 4-bit experts in a temporary folder (deleted
afterwards) and decodes with it: in turn, a few tokens each, `resident` (stock), `streamed` (this
package) and the ways that lost: `naive` (one read a tensor, then an array, then a slot assignment),
`one thread`, `own cache` (the budget spent on a cache in the process), `read-ahead` (the experts
of the token before, asked for one layer early). All compute the same logits, which is checked.

The page cache is kept at 100, 50, 25 and 0 % of the experts' bytes without privileges: a list of
the records read, newest last; those that fall out are given up with POSIX_FADV_DONTNEED between
tokens, outside the timing. It is filled from a history of tokens first, and put back before each
turn, so that every way finds the same pages. mincore says, in a first turn that is not timed, what
was really cached. There is no trained model here to replay
the routing of: `uniform` draws experts evenly, which is the worst case for any cache; `skewed`
repeats a third of the token before and draws the rest by Zipf's law. Prints JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe
from mlx_lm.models.cache import make_prompt_cache

from thunder_patches.moe import streaming
from thunder_patches.moe.advice import disk_bandwidth
from thunder_patches.moe.reader import Pool, Read
from thunder_patches.moe.streaming import Phase, StreamedLayer

DIMS, HIDDEN, EXPERTS, TOP = 1024, 512, 256, 4
BUDGETS = (1.0, 0.5, 0.25, 0.0)
HISTORY = 120
"""Tokens of the trace that are taken to have come before: what they used fills the budget."""
PAGE = 4096
Record = tuple[Path, int, int]
"""File, offset and bytes of one read."""


def write_model(folder: Path, layers: int) -> int:
    """A checkpoint of one shard a layer; returns the experts' bytes."""
    config: dict[str, Any] = {
        "model_type": "qwen3_moe", "hidden_size": DIMS, "num_hidden_layers": layers,
        "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "num_experts": EXPERTS, "num_experts_per_tok": TOP,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": HIDDEN,
        "rms_norm_eps": 1e-6, "vocab_size": 512, "rope_theta": 1e6, "norm_topk_prob": True,
        "tie_word_embeddings": False, "max_position_embeddings": 4096,
    }  # fmt: skip
    mx.random.seed(0)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    experts = 0
    dense = {
        name: value for name, value in tree_flatten(model.parameters()) if "switch_mlp" not in name
    }
    mx.save_safetensors(str(folder / "model-dense.safetensors"), dense, {"format": "mlx"})
    for layer in range(layers):
        shard: dict[str, mx.array] = {}
        for name, rows, columns in (
            ("gate_proj", HIDDEN, DIMS), ("up_proj", HIDDEN, DIMS), ("down_proj", DIMS, HIDDEN)
        ):  # fmt: skip
            prefix = f"model.layers.{layer}.mlp.switch_mlp.{name}"
            shape = (EXPERTS, rows, columns // 8)
            shard[f"{prefix}.weight"] = mx.random.randint(0, 2**31 - 1, shape).astype(mx.uint32)
            groups = (EXPERTS, rows, columns // 64)
            shard[f"{prefix}.scales"] = mx.random.normal(groups) * (0.1 / columns**0.5)
            shard[f"{prefix}.biases"] = mx.random.normal(groups) * (0.2 / columns**0.5)
        mx.eval(shard)
        experts += sum(value.nbytes for value in shard.values())
        mx.save_safetensors(
            str(folder / f"model-{layer:03d}.safetensors"), shard, {"format": "mlx"}
        )
        del shard
        mx.clear_cache()
    config["quantization"] = {"group_size": 64, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    return experts


class Replay(nn.Module):
    """A router that gives each layer's tokens the routes of a trace."""

    def __init__(self, trace: np.ndarray) -> None:
        super().__init__()
        self.trace = trace
        self.at = 0

    def __call__(self, x: mx.array) -> mx.array:
        count = x.shape[1]
        routes = self.trace[self.at : self.at + count]
        self.at += count
        logits = np.full((1, count, EXPERTS), -20.0, np.float32)
        np.put_along_axis(logits[0], routes, np.linspace(1, 0.5, TOP, dtype=np.float32), axis=-1)
        return mx.array(logits)


def traces(kind: str, layers: int, tokens: int) -> list[np.ndarray]:
    """For each layer, the experts of each token: [tokens, TOP]."""
    found = []
    for layer in range(layers):
        rng = np.random.default_rng(layer)
        weights = np.ones(EXPERTS)
        if kind == "skewed":
            weights = 1.0 / np.arange(1, EXPERTS + 1)
        weights = rng.permutation(weights / weights.sum())
        rows: list[list[int]] = []
        for token in range(tokens):
            kept: list[int] = []
            if kind == "skewed" and token:
                kept = [expert for expert in rows[-1] if rng.random() < 1 / 3]
            while len(kept) < TOP:
                expert = int(rng.choice(EXPERTS, p=weights))
                if expert not in kept:
                    kept.append(expert)
            rows.append(kept)
        found.append(np.array(rows))
    return found


class PageCache:
    """Keeps the page cache at `limit` bytes of expert records: the newest."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.records: OrderedDict[Record, None] = OrderedDict()
        self.held = 0
        self._files: dict[Path, int] = {}

    def note(self, records: Iterable[Record]) -> None:
        for record in records:
            if record not in self.records:
                self.held += record[2]
                self.records[record] = None
            self.records.move_to_end(record)

    def enforce(self, really: bool = True) -> None:
        """Give up what is beyond the limit."""
        while self.held > self.limit:
            record = self.records.popitem(last=False)[0]
            self.held -= record[2]
            if really:
                self._forget(record)

    def restore(self, wanted: OrderedDict[Record, None]) -> None:
        """Make the page cache hold just the records of an earlier moment."""
        for record in self.records.keys() - wanted.keys():
            self._forget(record)
        for record in wanted.keys() - self.records.keys():
            self.load(record)
        self.records = OrderedDict(wanted)
        self.held = sum(record[2] for record in wanted)

    def load(self, record: Record) -> None:
        os.pread(self._file(record[0]), record[2], record[1])

    def _forget(self, record: Record) -> None:
        path, offset, nbytes = record
        first = offset // PAGE * PAGE
        end = -(-(offset + nbytes) // PAGE) * PAGE
        os.posix_fadvise(self._file(path), first, end - first, os.POSIX_FADV_DONTNEED)

    def _file(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
            os.posix_fadvise(self._files[path], 0, 0, os.POSIX_FADV_RANDOM)
        return self._files[path]


def record_of(read: Read) -> Record:
    return read.file.path, read.offset, read.nbytes


class Streamed:
    """A streamed model under a budget. Subclasses change how one layer's experts are read."""

    name = "streamed"

    def __init__(self, folder: Path, threads: int = 4) -> None:
        self.model = mlx_lm.utils.load_model(folder, lazy=True)[0]
        self.report, streamer = streaming.attach(self.model, folder, any_family=True)
        assert streamer is not None
        self.streamer = streamer
        self.streamer.pool = Pool(threads)
        mx.eval(self.model.parameters())
        self.pages = PageCache(0)
        self.sampling = False
        self.layers = [streaming.streamed_of(layer.mlp.switch_mlp) for layer in self.model.layers]
        for number, layer in enumerate(self.layers):
            assert layer is not None
            layer._read = self._reader(number, layer)  # type: ignore[method-assign]

    def _reader(self, number: int, layer: StreamedLayer) -> Callable[..., None]:
        def read(bank: Any, experts: np.ndarray, slots: np.ndarray, phase: Phase) -> None:
            # One read a record, so that the budget can forget records.
            reads = [
                one
                for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True)
                for one in layer._reads(bank, [expert], [slot])
            ]
            if self.sampling:
                self.streamer.sample(reads, phase)
            self.read(number, layer, bank, reads, experts)
            phase.bytes_read += sum(one.nbytes for one in reads)
            self.pages.note(map(record_of, reads))

        return read

    def records(self, number: int, expert: int) -> list[Record]:
        """What reading one expert of one layer reads."""
        layer = self.layers[number]
        assert layer is not None
        bank = self.streamer.bank(layer, False, 1)
        return [record_of(read) for read in layer._reads(bank, [expert], [0])]

    def read(
        self, number: int, layer: StreamedLayer, bank: Any, reads: list[Read], experts: np.ndarray
    ) -> None:
        self.streamer.pool.read(reads)

    def before_turn(self, pages: PageCache) -> None:
        self.pages = pages

    def between_tokens(self) -> None:
        self.pages.enforce()


class Naive(Streamed):
    """One `pread` a tensor of an expert, an array of it, and an assignment to the bank's slot."""

    name = "naive"

    def read(
        self, number: int, layer: StreamedLayer, bank: Any, reads: list[Read], experts: np.ndarray
    ) -> None:
        for one in reads:
            data = os.pread(one.file.fd, one.nbytes, one.offset)
            array = mx.array(np.frombuffer(data, np.uint8))
            mx.eval(array)
            one.targets[0][:] = memoryview(np.asarray(array))  # type: ignore[arg-type]


class OwnCache(Streamed):
    """The budget is a cache of records in the process, with the same rule; the page cache holds
    none of what it lacks."""

    name = "own cache"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.cache: dict[Record, bytes] = {}

    def before_turn(self, pages: PageCache) -> None:
        self.pages = pages
        for gone in self.cache.keys() - pages.records.keys():
            del self.cache[gone]
        for path, offset, nbytes in pages.records.keys() - self.cache.keys():
            data = os.pread(self.streamer.open(path).fd, nbytes, offset)
            self.cache[path, offset, nbytes] = data

    def between_tokens(self) -> None:
        super().between_tokens()
        for gone in self.cache.keys() - self.pages.records.keys():
            del self.cache[gone]

    def read(
        self, number: int, layer: StreamedLayer, bank: Any, reads: list[Read], experts: np.ndarray
    ) -> None:
        missing = []
        for one in reads:
            known = self.cache.get(record_of(one))
            if known is None:
                missing.append(one)
            else:
                one.targets[0][:] = known
        self.streamer.pool.read(missing)
        for one in missing:
            self.cache[record_of(one)] = bytes(one.targets[0])


class ReadAhead(Streamed):
    """While a layer computes, the next layer's experts of the token before are asked for."""

    name = "read-ahead"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.before: dict[int, list[Read]] = {}
        self.ahead = ThreadPoolExecutor(1)

    def read(
        self, number: int, layer: StreamedLayer, bank: Any, reads: list[Read], experts: np.ndarray
    ) -> None:
        self.streamer.pool.read(reads)
        self.before[number] = reads
        guess = self.before.get((number + 1) % len(self.layers), [])
        self.pages.note(map(record_of, guess))
        self.ahead.submit(self._ask, guess)

    @staticmethod
    def _ask(reads: list[Read]) -> None:
        for one in reads:
            os.posix_fadvise(one.file.fd, one.offset, one.nbytes, os.POSIX_FADV_WILLNEED)


class Resident:
    """The stock model."""

    name = "resident"

    def __init__(self, folder: Path) -> None:
        self.model = mlx_lm.utils.load_model(folder)[0]

    def before_turn(self, pages: PageCache) -> None:
        pass

    def between_tokens(self) -> None:
        pass


class Run:
    """One way of running, with its place in the trace and its figures."""

    def __init__(self, way: Any, routes: list[np.ndarray]) -> None:
        self.way = way
        for layer, trace in zip(way.model.layers, routes, strict=True):
            layer.mlp.gate = Replay(trace)
            layer.mlp.gate.at = HISTORY
        self.cache = make_prompt_cache(way.model)
        self.seconds: list[float] = []
        self.logits: list[np.ndarray] = []
        self.first_token = 0.0
        self.told, self.sampled = Phase(), Phase()

    def turn(self, kind: str, tokens: list[int], pages: PageCache) -> None:
        """A prompt, or single tokens one after the other: sampled, or timed."""
        self.way.before_turn(pages)
        if isinstance(self.way, Streamed):
            self.way.sampling = kind == "sampled"
            self.way.streamer.decode = self.told if kind == "timed" else self.sampled
        for part in [tokens] if kind == "prompt" else [[token] for token in tokens]:
            start = time.perf_counter()
            logits = self.way.model(mx.array([part]), cache=self.cache)[:, -1]
            mx.eval(logits)
            took = time.perf_counter() - start
            self.way.between_tokens()
            self.logits.append(np.asarray(logits))
            if kind == "prompt":
                self.first_token = took
            elif kind == "timed":
                self.seconds.append(took)


def compare(ways: list[Any], routes: list[np.ndarray], limit: int, options: Any) -> dict[str, Any]:
    pages = PageCache(limit)
    source = next(way for way in ways if isinstance(way, Streamed))
    for token in range(HISTORY):
        for number, trace in enumerate(routes):
            for expert in trace[token].tolist():
                pages.note(source.records(number, expert))
        pages.enforce(really=False)
    if limit >= source.report.expert_bytes:
        for number, expert in itertools.product(range(len(routes)), range(EXPERTS)):
            pages.note(source.records(number, expert))
    for record in pages.records:
        pages.load(record)
    runs = [Run(way, routes) for way in ways]
    some = list(range(options.tokens))
    turns = [("prompt", list(range(options.prompt))), ("sampled", some)]
    turns += [("timed", some)] * options.rounds
    for kind, tokens in turns:
        # Each way starts a turn with the same pages, and the next turn with what this one leaves.
        before, after = OrderedDict(pages.records), OrderedDict(pages.records)
        for run in runs:
            pages.restore(before)
            run.turn(kind, tokens, pages)
            if isinstance(run.way, Streamed):
                after = OrderedDict(pages.records)
        pages.restore(after)
    found: dict[str, Any] = {}
    for run in runs:
        same = all(np.array_equal(a, b) for a, b in zip(run.logits, runs[0].logits, strict=True))
        told = run.told.told()
        count = max(1, round(run.told.tokens))
        found[run.way.name] = {
            "tokens_per_second": round(1 / statistics.median(run.seconds), 3),
            "best_tokens_per_second": round(1 / min(run.seconds), 3),
            "first_token_s": round(run.first_token, 3),
            "bit_equal": same,
        }
        if isinstance(run.way, Streamed):
            found[run.way.name] |= {
                "hit_rate": run.sampled.told()["page_cache_hit_rate"],
                "mb_a_token": round(told["bytes_a_token"] / 1e6, 1),
                "ms_disk": round(1e3 * told["seconds_disk"] / count, 1),
                "ms_router": round(1e3 * told["seconds_router"] / count, 1),
                "ms_computing": round(1e3 * told["seconds_computing"] / count, 1),
            }
    return found


def forget(folder: Path) -> None:
    """Drop the whole checkpoint from the page cache."""
    os.sync()
    for file in folder.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=17)
    parser.add_argument("--tokens", type=int, default=4, help="in a turn")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=24)
    parser.add_argument("--routing", nargs="*", default=["uniform", "skewed"])
    parser.add_argument("--budgets", nargs="*", type=float, default=list(BUDGETS))
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the folder goes
    folder = Path(tempfile.mkdtemp(prefix="moe-streaming-", dir=options.folder))
    found: dict[str, Any] = {"mlx": mx.__version__, "device": str(mx.default_device())}
    try:
        if shutil.disk_usage(folder).free < options.layers * 300e6 + 5e9:
            print("not enough disk space", file=sys.stderr)
            return 1
        experts = write_model(folder, options.layers)
        found["expert_gb"] = round(experts / 1e9, 2)
        forget(folder)
        found["disk_gb_per_second"] = round((disk_bandwidth(folder) or 0) / 1e9, 2)
        one_thread = Streamed(folder, threads=1)
        one_thread.name = "one thread"
        ways = [Resident(folder), Streamed(folder), Naive(folder), one_thread, OwnCache(folder),
                ReadAhead(folder)]  # fmt: skip
        found["fused_layers"] = ways[1].report.fused
        tokens = HISTORY + options.prompt + options.tokens * (options.rounds + 1)
        for kind in options.routing:
            routes = traces(kind, options.layers, tokens)
            for share in options.budgets:
                forget(folder)
                result = compare(ways, routes, int(share * experts), options)
                found[f"{kind} {share:.0%}"] = result
                print(f"{kind} {share:.0%}", json.dumps(result), file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    json.dump(found, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
