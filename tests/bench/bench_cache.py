"""How fast blocks come back, and keys are made, against the least that the machine must do for it.

    python -m tests.bench.bench_cache [--blocks N] [--repeats N] [--folder DIR] [--json]

Each line is a ratio of two things measured in turns in one run, the page cache warm:
restore: `CacheStore.read_many` into preallocated per-layer arrays against `readinto` of the same
files into preallocated buffers, one after the other; targets of 0.8 and more pass.
keys: `chain` over 128K tokens against one sha256 of the same bytes, the best of many runs of each,
because both take about a millisecond; 2.0 and less pass.
Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from thunder_patches.cache.keys import chain, root_key, token_bytes
from thunder_patches.cache.record import Header, Record, TensorSpec
from thunder_patches.cache.store import CacheStore, ReadJob

BLOCK = 256
GEOMETRIES = ((24, 8, 64), (36, 8, 128))  # layers, KV heads, head dimension; bf16


def in_turns(repeats: int, *works: Callable[[], object]) -> list[list[float]]:
    """Seconds of each repetition of each work, taken in turns after one warm-up of each."""
    seconds: list[list[float]] = [[] for _ in works]
    for turn in range(repeats + 1):
        for work, into in zip(works, seconds, strict=True):
            start = time.perf_counter()
            work()
            if turn:
                into.append(time.perf_counter() - start)
    return seconds


def compared(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over the turns of theirs / ours: above 1, ours is faster."""
    return statistics.median(t / o for o, t in zip(ours, theirs, strict=True))


def restore(folder: Path, geometry: tuple[int, int, int], blocks: int, repeats: int) -> dict:
    layers, heads, dim = geometry
    shape = (layers * heads, BLOCK, dim)
    specs = tuple(TensorSpec(name, "BF16", shape) for name in ("k0", "v0"))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 150_000, blocks * BLOCK)
    layout = json.dumps({"layers": [["kv", i, heads, dim] for i in range(layers)]})
    root = root_key("bench", layout, "", BLOCK)
    keys = chain(root, tokens, BLOCK)
    parents = [root, *keys[:-1]]
    parts = [token_bytes(tokens[i * BLOCK : (i + 1) * BLOCK]) for i in range(blocks)]
    data = [rng.integers(0, 1 << 16, shape, dtype=np.uint16) for _ in specs]

    store = CacheStore(folder, disk_budget=1 << 40, ram_budget=0, queue_bytes=1 << 40)
    for i, key in enumerate(keys):
        header = Header(key, parents[i], "block", i * BLOCK, parts[i], layout, specs)
        varied = tuple(memoryview(d ^ np.uint16(i)) for d in data)
        store.put(Record(header, varied), time.time_ns())
    assert store.flush(300)
    store.close()
    files = [folder / "blocks" / k.hex()[:2] / f"{k.hex()}-{p.hex()}.safetensors"
             for k, p in zip(keys, parents, strict=True)]  # fmt: skip

    capacity = blocks * BLOCK
    arrays = {s.name: np.zeros((layers, heads, capacity, dim), np.uint16) for s in specs}
    flat = {name: memoryview(a.reshape(-1).view(np.uint8)) for name, a in arrays.items()}
    width = dim * 2

    def targets(i: int) -> dict[str, list[memoryview | int]]:
        starts = [(row * capacity + i * BLOCK) * width for row in range(layers * heads)]
        return {n: [view[s : s + BLOCK * width] for s in starts] for n, view in flat.items()}

    buffers = [np.zeros(file.stat().st_size, np.uint8) for file in files]
    store = CacheStore(folder, disk_budget=1 << 40, ram_budget=0)

    def ours() -> None:
        jobs = [
            ReadJob(key, "block", parents[i], parts[i], layout, targets(i))
            for i, key in enumerate(keys)
        ]
        assert store.read_many(jobs) == ["ssd"] * blocks

    def readinto(i: int) -> None:
        with open(files[i], "rb", buffering=0) as file:
            assert file.readinto(buffers[i]) == len(buffers[i])

    def theirs() -> None:
        for i in range(blocks):
            readinto(i)

    pool = ThreadPoolExecutor(4)
    seconds = in_turns(repeats, ours, theirs, lambda: list(pool.map(readinto, range(blocks))))
    last = np.concatenate([a.reshape(-1) for a in arrays.values()])
    expected = np.stack(
        [d[:, None] ^ np.arange(blocks, dtype=np.uint16)[:, None, None] for d in data]
    )
    assert np.array_equal(last, expected.reshape(-1)), "what came back isn't what was stored"
    store.close()
    gigabytes = sum(f.stat().st_size for f in files) / 1e9
    return {
        "what": f"restore {layers} x {heads} x {dim}, {blocks} blocks, {gigabytes:.2f} GB",
        "ratio": compared(seconds[0], seconds[1]),
        "target": ">= 0.8",
        "gb_per_s": gigabytes / statistics.median(seconds[0]),
        "readinto_gb_per_s": gigabytes / statistics.median(seconds[1]),
        "readinto_4_threads_gb_per_s": gigabytes / statistics.median(seconds[2]),
        "pass": compared(seconds[0], seconds[1]) >= 0.8,
    }


def key_chain(repeats: int) -> dict:
    tokens = np.random.default_rng(1).integers(0, 150_000, 128 << 10)
    data = token_bytes(tokens)
    root = root_key("bench", "", "", BLOCK)
    ours, theirs = in_turns(
        repeats, lambda: chain(root, tokens, BLOCK), lambda: hashlib.sha256(data).digest()
    )
    ratio = min(ours) / min(theirs)
    return {
        "what": "keys of 128K tokens against one sha256",
        "ratio": ratio,
        "target": "<= 2.0",
        "ms": min(ours) * 1e3,
        "sha256_ms": min(theirs) * 1e3,
        "pass": ratio <= 2.0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=32, help="blocks to restore")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where to put the files")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = [key_chain(args.repeats * 20)]
    for geometry in GEOMETRIES:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            results.append(restore(Path(folder), geometry, args.blocks, args.repeats))
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        for result in results:
            rest = ", ".join(f"{k} {v:.2f}" for k, v in result.items() if isinstance(v, float))
            print(f"{'ok  ' if result['pass'] else 'FAIL'} {result['what']}: {rest} "
                  f"(target {result['target']})")  # fmt: skip
    return 0 if all(result["pass"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
