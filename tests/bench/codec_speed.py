"""How fast a prompt's blocks come back from disk, raw and coded, and what decoding KVTC takes.

    python -m tests.bench.codec_speed MODEL CALIBRATION [--blocks 32] [--quality balanced] [--out FILE]

Blocks of a real text's keys and values, in BF16, are stored and restored as a server does it: raw, in
the lossless form of aged blocks, in int8 and in kvtc; from the page cache, and from a disk that gives
1 GB/s, played by letting reads through no faster. Then the halves of decoding KVTC alone: bytes to
whole numbers in 4 threads, and the matrix products by MLX and by numpy. Times are the shortest of several.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.bench.codec_quality import held_out
from thunder_patches.cache.keys import chain, root_key, token_bytes
from thunder_patches.cache.match import Piece
from thunder_patches.cache.record import Record
from thunder_patches.cache.store import READERS, CacheStore
from thunder_patches.codec.calibration import Calibration
from thunder_patches.codec.codecs import CODECS
from thunder_patches.codec.kvtc import Kvtc
from thunder_patches.codec.policy import Policy
from thunder_patches.tensors.kvtc_decode import decode
from thunder_patches.tensors.quality import Document
from thunder_patches.tensors.restore import restore

BLOCK = 256
DISK = 1e9
"""Bytes a second of the disk that is played."""


def best(run: Callable[[], Any], times: int = 5) -> tuple[Any, float]:
    """The result and the shortest of some wall-clock times, the first run not counted."""
    result, least = run(), float("inf")
    for _ in range(times):
        started = time.perf_counter()
        result = run()
        least = min(least, time.perf_counter() - started)
    return result, least


@contextmanager
def slow_disk(rate: float) -> Iterator[None]:
    """Let reads through at so many bytes a second, those of all threads together."""
    real, lock, free_at = os.readv, threading.Lock(), 0.0

    def readv(fd: int, buffers: Sequence[Any]) -> int:
        nonlocal free_at
        count = real(fd, buffers)
        with lock:
            now = time.perf_counter()
            free_at = max(now, free_at) + count / rate
            wait = free_at - now
        if wait > 0.001:
            time.sleep(wait)
        return count

    os.readv = readv  # type: ignore[assignment]
    try:
        yield
    finally:
        os.readv = real


def chained(records: Sequence[Record], count: int) -> tuple[list[Record], list[Piece]]:
    """So many blocks in a row, made of the records over and over; each keeps its own positions."""
    tokens = np.arange(count * BLOCK)
    root = root_key("bench", records[0].header.layout, "", BLOCK)
    keys = chain(root, tokens, BLOCK)
    blocks, pieces = [], []
    for i, key in enumerate(keys):
        record, parent = records[i % len(records)], keys[i - 1] if i else root
        ids = token_bytes(tokens[i * BLOCK : (i + 1) * BLOCK])
        header = replace(record.header, key=key, parent=parent, tokens=ids)
        blocks.append(Record(header, record.data))
        pieces.append(Piece("block", key, parent, i * BLOCK, ids, BLOCK))
    return blocks, pieces


def policies(calibration: Calibration, quality: str) -> dict[str, Policy]:
    kvtc = Kvtc(lambda id: calibration, calibration, quality)
    lossy = Policy("kvtc", codecs={**CODECS, "kvtc": kvtc})
    return {
        "raw": Policy("raw"),
        "planes+zstd": Policy("lossless"),
        "int8": Policy("int8"),
        f"kvtc {quality}": lossy,
    }


def restores(
    policy: Policy, blocks: Sequence[Record], pieces: Sequence[Piece], make_cache: Callable[[], Any]
) -> dict[str, float]:
    """Bytes stored, and seconds of a restore from the page cache and from the slow disk."""
    length = len(pieces) * BLOCK
    with tempfile.TemporaryDirectory() as place:
        store = CacheStore(
            Path(place) / "v1",
            disk_budget=1 << 40,
            ram_budget=0,
            codec=policy,
            queue_bytes=1 << 40,
        )
        for block in blocks:
            store.put(block, time.time_ns())
        assert store.flush(600)

        def run() -> None:
            found = restore(store, pieces, make_cache(), length=length, capacity=length + BLOCK)
            mx.eval([cache.keys for cache in found.caches])

        size = float(store.stats()["ssd"]["bytes"])
        _, cached = best(run)
        with slow_disk(DISK):
            _, slow = best(run)
        store.close()
    return {"stored_bytes": size, "page_cache_s": cached, "disk_1_gb_s": slow}


def halves(codec: Kvtc, blocks: Sequence[Record]) -> dict[str, float]:
    """Seconds of unpacking in threads, and of the products by MLX and numpy, for all blocks."""
    jobs = {
        spec.name: [
            (spec, codec.encode(spec, block.data[i], block.header), block.header)
            for block in blocks
        ]
        for i, spec in enumerate(blocks[0].header.tensors)
    }
    with ThreadPoolExecutor(READERS) as pool:

        def unpack() -> dict[str, list[Any]]:
            found = {
                name: [pool.submit(codec.unpack, *job) for job in part]
                for name, part in jobs.items()
            }
            return {name: [future.result() for future in part] for name, part in found.items()}

        numbers, unpacking = best(unpack, 3)

    def multiply(by_numpy: bool) -> None:
        for name, part in numbers.items():
            for i in range(0, len(part), 8):
                mx.eval(decode(name, part[i : i + 8], mx.bfloat16, by_numpy))

    return {
        "unpack_s": unpacking,
        "products_by_mlx_s": best(lambda: multiply(False), 2)[1],
        "products_by_numpy_s": best(lambda: multiply(True), 2)[1],
    }


def main() -> None:
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--quality", default="balanced")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    model, _ = load_model(options.model)
    tokens = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    ids = tokens.encode(held_out(None)["en1"]).ids
    make_cache = lambda: make_prompt_cache(model)  # noqa: E731
    document = Document(model, make_cache, ids, context=1536, predict=2)
    calibration = Calibration.read(options.calibration)
    blocks, pieces = chained(document.records, options.blocks)
    size = sum(spec.nbytes for block in blocks for spec in block.header.tensors)
    told: dict[str, Any] = {
        "what": f"tests/bench/codec_speed.py on {options.model.name}, {mx.default_device()}",
        "mlx": mx.__version__,
        "cores": os.cpu_count(),
        "tokens": options.blocks * BLOCK,
        "bf16_bytes": size,
    }
    print(json.dumps(told))
    print("| stored as | MB | restored from the page cache | from a disk with 1 GB/s |")
    print("|---|---|---|---|", flush=True)
    rows = {}
    for name, policy in policies(calibration, options.quality).items():
        row = rows[name] = restores(policy, blocks, pieces, make_cache)
        print(
            f"| {name} | {row['stored_bytes'] / 1e6:.0f} | {row['page_cache_s']:.3f} s "
            f"| {row['disk_1_gb_s']:.3f} s |",
            flush=True,
        )
    codec = Kvtc(lambda id: calibration, calibration, options.quality)
    rows["halves"] = halves(codec, blocks)
    print(", ".join(f"{name} {value:.3f}" for name, value in rows["halves"].items()))
    if options.out:
        options.out.write_text(json.dumps(told | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
