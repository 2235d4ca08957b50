"""How fast KVTC comes back from disk: bytes to whole numbers in threads, then one product in MLX.

    python -m tests.bench.codec_speed MODEL CALIBRATION [--blocks 32] [--quality balanced]

Blocks of a real prompt, coded, are decoded as a restore does: 4 threads unpack, one batch of matrix
products on MLX's device turns them into keys and values. Printed: MB of BF16 a second for each half
and for both, beside a plain copy of the same bytes. Raw blocks from a 1 GB/s disk are the mark.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.bench.codec_quality import held_out
from thunder_patches.cache.record import Coded, Record, TensorSpec
from thunder_patches.codec.calibration import Calibration
from thunder_patches.codec.kvtc import Kvtc, Numbers
from thunder_patches.tensors.kvtc_decode import decode
from thunder_patches.tensors.quality import Document

THREADS = 4


def best(run: Callable[[], Any], times: int = 5) -> tuple[Any, float]:
    """The result and the shortest of some wall-clock times, the first run not counted."""
    result, least = run(), float("inf")
    for _ in range(times):
        started = time.perf_counter()
        result = run()
        least = min(least, time.perf_counter() - started)
    return result, least


def main() -> None:
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--quality", default="balanced")
    options = parser.parse_args()

    model, _ = load_model(options.model)
    tokens = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    ids = tokens.encode(held_out(None)["en1"]).ids
    document = Document(model, lambda: make_prompt_cache(model), ids, context=1536, predict=2)
    calibration = Calibration.read(options.calibration)
    codec = Kvtc(lambda id: calibration, calibration, options.quality)
    records = (document.records * options.blocks)[: options.blocks]
    jobs: dict[str, list[tuple[Record, TensorSpec, Coded]]] = {}
    for record in records:
        for spec, data in zip(record.header.tensors, record.data, strict=True):
            coded = codec.encode(spec, data, record.header)
            jobs.setdefault(spec.name, []).append((record, spec, coded))
    size = sum(spec.nbytes for part in jobs.values() for _, spec, _ in part) / 1e6
    stored = sum(coded.nbytes for part in jobs.values() for _, _, coded in part) / 1e6
    print(
        f"{options.blocks} blocks, {size:.0f} MB of BF16, {stored:.1f} MB stored, {mx.default_device()}"
    )

    pool = ThreadPoolExecutor(THREADS)

    def unpack() -> dict[str, list[Numbers]]:
        found = {
            name: [pool.submit(codec.unpack, spec, c, r.header) for r, spec, c in part]
            for name, part in jobs.items()
        }
        return {name: [future.result() for future in part] for name, part in found.items()}

    def multiply(numbers: dict[str, list[Numbers]]) -> None:
        mx.eval([decode(name, part, mx.bfloat16) for name, part in numbers.items()])
        mx.synchronize()

    def overlapped() -> None:
        """As a restore does: 8 blocks are multiplied while the next are still being unpacked."""
        waiting = {
            name: [pool.submit(codec.unpack, spec, c, r.header) for r, spec, c in part]
            for name, part in jobs.items()
        }
        made: list[mx.array] = []
        for name, part in waiting.items():
            for i in range(0, len(part), 8):
                made += decode(name, [future.result() for future in part[i : i + 8]], mx.bfloat16)
                mx.async_eval(made)
        mx.eval(made)
        mx.synchronize()

    numbers, unpacking = best(unpack)
    _, multiplying = best(lambda: multiply(numbers))
    _, both = best(overlapped)
    _, copying = best(lambda: [bytearray(d) for r in records for d in r.data])
    for name, seconds in (
        (f"unpack, {THREADS} threads", unpacking),
        ("matrix product", multiplying),
        ("both, overlapped", both),
        ("plain copy", copying),
    ):
        print(f"| {name} | {size / seconds:.0f} MB/s |")


if __name__ == "__main__":
    main()
