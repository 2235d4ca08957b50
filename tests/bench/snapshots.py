"""What boundary snapshots cost a prefill, by stride and size of the state.

    python -m tests.bench.snapshots [--tokens N] [--repeats N] [--sizes S ...] [--strides N ...] [--json]

Hybrid models (qwen3_next: three gated delta layers to one of full attention) with random float32
weights, prefilled in process in chunks of 2048 tokens while a store with a folder takes everything.
The strides take turns in every repetition; a ratio is that repetition's prefill time to the one with
blocks and no snapshots but the end's. These scatter with the model's own time, which is most of it; so the
share is given too: the seconds that the snapshots held up the generation thread, of the prefill's.
Target: a share of at most 0.03 at stride 8.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import qwen3_next
from mlx_lm.models.cache import make_prompt_cache

from tests.bench.shapes import environment
from thunder_patches.cache.store import CacheStore
from thunder_patches.cli._play.figures import Spread
from thunder_patches.config import Settings
from thunder_patches.hosts.runtime import Runtime
from thunder_patches.hosts.session import Family, Session
from thunder_patches.observe.counters import Counters

BLOCK, CHUNK, NONE = 256, 2048, 4096
STRIDES = (16, 8, 4, 2, 1)
TARGET = 0.03
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 128, "layers": 4, "value_heads": 4, "head": 32},
    "middle": {"hidden": 512, "layers": 8, "value_heads": 16, "head": 64},
}


def model_of(hidden: int, layers: int, value_heads: int, head: int, vocabulary: int = 1024) -> Any:
    """A qwen3_next with random weights."""
    args = qwen3_next.ModelArgs(
        model_type="qwen3_next",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=2 * hidden,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=head,
        linear_num_value_heads=value_heads,
        linear_num_key_heads=value_heads // 2,
        linear_key_head_dim=head,
        linear_value_head_dim=head,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        shared_expert_intermediate_size=hidden,
        mlp_only_layers=[],
        moe_intermediate_size=hidden,
        rms_norm_eps=1e-6,
        vocab_size=vocabulary,
        rope_theta=10000.0,
        partial_rotary_factor=0.25,
        max_position_embeddings=1 << 17,
    )
    mx.random.seed(0)
    model = qwen3_next.Model(args)
    model.update(tree_map(lambda w: w.astype(mx.float32), model.parameters()))
    mx.eval(model.parameters())
    return model


def prefill(model: Any, session: Session, tokens: np.ndarray) -> tuple[float, float]:
    """Seconds from the first chunk until the end snapshot is handed to the store, and of these, those that
    storing took."""
    storing = 0.0

    def store(stop: int, **kwargs: Any) -> None:
        nonlocal storing
        since = time.perf_counter()
        sequence.store(cache, stop, **kwargs)
        storing += time.perf_counter() - since

    sequence, cache = session.sequence(tokens), session.make_cache()
    position, last = 0, len(tokens) - 1
    begin = time.perf_counter()
    while position < last:
        end = min(position + CHUNK, last)
        due = sequence.due(position, end)
        for stop in [*due, end]:
            if stop > position:
                logits = model(mx.array(tokens[None, position:stop]), cache=cache)
                mx.eval([c.state for c in cache])
                store(stop, snapshot=stop in due)
                position = stop
    logits = model(mx.array(tokens[None, last:]), cache=cache)[0, -1]
    mx.eval(logits)
    store(len(tokens), snapshot=True, logits=logits)
    return time.perf_counter() - begin, storing


def measure(size: str, asked: list[int], length: int, repeats: int, folder: Path) -> dict[str, Any]:
    """Seconds and ratios by stride."""
    strides = [NONE, *asked]
    model = model_of(**SIZES[size])
    seconds: dict[int, list[float]] = {stride: [] for stride in strides}
    storing: dict[int, list[float]] = {stride: [] for stride in strides}
    written: dict[int, int] = {}
    for turn in range(-1, repeats):  # turn -1 warms
        for stride in strides if turn % 2 else reversed(strides):
            counters = Counters()
            where = folder / f"{size}-{turn}-{stride}"
            store = CacheStore(
                where, disk_budget=8 << 30, ram_budget=1 << 28, prefetch=False, counters=counters
            )
            runtime = Runtime(Settings(block_tokens=BLOCK, snapshot_stride=stride), counters, store)
            family = Family(cut_anywhere=True)
            session = Session(runtime, "bench", family, lambda: make_prompt_cache(model))
            tokens = np.random.default_rng(turn + 1).integers(0, 1000, length)
            took, stored = prefill(model, session, tokens)
            store.flush(60)
            written[stride] = store.stats()["ssd"]["bytes"]
            store.close()
            if turn >= 0:
                seconds[stride].append(took)
                storing[stride].append(stored)
    state = sum(
        array.nbytes
        for c in make_state(model)
        for _, array in tree_flatten(list(c))
        if array is not None
    )
    return {
        "size": SIZES[size],
        "parameters": sum(w.size for _, w in tree_flatten(model.parameters())),
        "tokens": length,
        "state_bytes": state,
        "strides": {
            "none" if stride == NONE else str(stride): {
                "seconds": asdict(Spread.of(seconds[stride])),
                "ratio": statistics.median(
                    a / b for a, b in zip(seconds[stride], seconds[NONE], strict=True)
                ),
                "share": statistics.median(
                    (a - b) / c
                    for a, b, c in zip(storing[stride], storing[NONE], seconds[NONE], strict=True)
                ),
                "bytes": written[stride],
            }
            for stride in strides
        },
    }


def make_state(model: Any) -> list[Any]:
    """The recurrent layers' state after a few tokens: what a snapshot holds besides the tail."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.arange(8)[None], cache=cache))
    return [c.cache for c in cache if hasattr(c, "cache")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--strides", type=int, nargs="+", default=list(STRIDES), help="with 8")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    environ = environment()
    if "LD_PRELOAD" in environ and "LD_PRELOAD" not in os.environ:
        command = [sys.executable, "-m", "tests.bench.snapshots", *sys.argv[1:]]
        os.execve(sys.executable, command, environ)
    with tempfile.TemporaryDirectory() as scratch:
        found = {
            size: measure(size, options.strides, options.tokens, options.repeats, Path(scratch))
            for size in options.sizes
        }
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for size, result in found.items():
            print(f"{size}: {result['parameters']:,} parameters, state {result['state_bytes']:,} B")
            for stride, row in result["strides"].items():
                print(
                    f"  stride {stride:>4}: {row['seconds']['median']:.2f} s, ratio "
                    f"{row['ratio']:.3f}, share {row['share']:.4f}, {row['bytes'] / 1e6:.1f} MB"
                )
    return 0 if all(r["strides"]["8"]["share"] <= TARGET for r in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
