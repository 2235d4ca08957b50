"""Cold against restored on one GPU: real shapes, random weights, the package's own store in between.

    python -m tests.bench.gpu [--shapes dense,moe,hybrid] [--sizes 2048,8192,32768] [--long 16384]
        [--json FILE]

In one process and without a server, so that what is timed is the model, the store and the way between
them. Warm runs restore the whole prompt with its logits; logits and all state must equal those of the cold
prefill to the bit. 16 decode steps follow; a backend's decoding need not be deterministic, so beside their
largest difference stands that of two decodings from the same cold state. Prompts of at least ``--long``
tokens are computed once, and stored three times, of which the last counts. "ssd" reads from a new store on
the folder, so nothing but the operating system's page cache is warm. "snapshots": prefill while storing
blocks and boundary snapshots at the default stride, to storing blocks alone (for models with recurrent
layers), in turns.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from thunder_patches.cache.store import CacheStore
from thunder_patches.config import load
from thunder_patches.hosts.runtime import Runtime
from thunder_patches.hosts.session import Family, Session
from thunder_patches.observe.counters import Counters

CHUNK = 2048
STORED = 8
"""Prompts stored one after the other: the last three count, the first is told beside."""
_QWEN3 = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
    "head_dim": 128,
}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {
        **_QWEN3,
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12_288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "moe": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "hybrid": {
        **_QWEN3,
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 512,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
    },
}


def build(shape: str) -> Any:
    """A 4-bit model of the shape with random weights, evaluated layer by layer."""
    config = SHAPES[shape]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=4)
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    model.eval()
    return model


class Bench:
    def __init__(self, shape: str, folder: Path) -> None:
        self.model = build(shape)
        self.make = importlib.import_module("mlx_lm.models.cache").make_prompt_cache
        self.folder = folder
        self.ram = 4 << 30
        self.session = self.open()

    def open(self, stride: int = 8) -> Session:
        """A session on a new store over the same folder, with `ram` bytes of memory for blocks."""
        environ = {"THUNDER_CACHE_DIR": str(self.folder), "THUNDER_SNAPSHOT_STRIDE": str(stride)}
        settings = load(environ, self.folder / "none.toml")
        store = CacheStore(
            self.folder / "v1",
            disk_budget=40 << 30,
            ram_budget=self.ram,
            prefetch=True,
            counters=Counters(),
            queue_bytes=16 << 30,
        )
        runtime = Runtime(settings, Counters(), store)
        return Session(runtime, "bench", Family(), lambda: self.make(self.model))

    def cold(self, tokens: list[int], store: bool) -> tuple[mx.array, list[Any]]:
        """Prefill in the host's chunks and take the last token's logits ``[vocabulary]``."""
        sequence = self.session.sequence(tokens) if store else None
        caches, end = self.make(self.model), len(tokens) - 1
        at = 0
        while at < end:
            stop = min(at + CHUNK, end)
            due = sequence.due(at, stop) if sequence else []
            for to in sorted({*due, stop}):
                self.model(mx.array(tokens[at:to])[None], cache=caches)
                mx.eval([c.state for c in caches])
                mx.clear_cache()
                if sequence is not None:
                    sequence.store(caches, to, snapshot=to in due)
                at = to
        logits = self.model(mx.array(tokens[-1:])[None], cache=caches)[0, -1]
        mx.eval(logits)
        if sequence is not None:
            sequence.store(caches, len(tokens), snapshot=True, logits=logits)
        return logits, caches

    def warm(self, tokens: list[int]) -> tuple[mx.array, list[Any], str]:
        """Restore the whole prompt; the logits and the caches are on the device afterwards."""
        hit = self.session.sequence(tokens).lookup(longer_than=0, full=True)
        assert hit is not None and hit.logits is not None, "no full hit"
        mx.eval(mx.argmax(hit.logits), [c.state for c in hit.caches])
        return hit.logits, hit.caches, hit.source

    def decode(self, logits: mx.array, caches: list[Any], count: int = 16) -> list[np.ndarray]:
        seen = []
        for _ in range(count):
            token = mx.argmax(logits)
            logits = self.model(token[None, None], cache=caches)[0, -1]
            mx.eval(logits)
            seen.append(np.array(logits.astype(mx.float32)))
        return seen


def timed(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Median seconds of ``work`` and its last result."""
    times = []
    result = None
    for _ in range(repeats):
        result = None
        mx.synchronize()
        start = time.perf_counter()
        result = work()
        mx.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times), result


def state(caches: list[Any]) -> list[mx.array]:
    """All arrays that the caches hold for their tokens."""
    found: list[mx.array] = []
    for c in caches:
        if hasattr(c, "keys"):
            found += [c.keys[..., : c.offset, :], c.values[..., : c.offset, :]]
        else:
            found += [a for _, a in tree_flatten(c.state) if isinstance(a, mx.array)]
    return found


def same(a: list[mx.array], b: list[mx.array]) -> bool:
    return len(a) == len(b) and all(
        bool(mx.array_equal(*pair).item()) for pair in zip(a, b, strict=True)
    )


def furthest(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """The largest difference of two decodings' logits."""
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def measure(bench: Bench, size: int, long: bool) -> dict[str, Any]:
    tokens = np.random.default_rng(size).integers(0, 150_000, size).tolist()
    bench.cold(tokens[: CHUNK + 2], store=False)
    cold, (logits, caches) = timed(lambda: bench.cold(tokens, store=False), 1 if long else 3)
    held = sum(c.nbytes for c in caches)
    decoded = bench.decode(logits, copy.deepcopy(caches))
    again = furthest(decoded, bench.decode(logits, caches))
    del caches
    # Memory that is full after a prompt or two, as a server's is in the long run.
    bench.session.runtime.store.close()
    bench.ram = held * 3 // 2
    bench.session = bench.open()
    fresh = iter(range(40))

    def storing() -> Any:
        # A prompt of its own each time, so that every block is new.
        return bench.cold([next(fresh), *tokens[1:]], store=True)

    stores = []
    for _ in range(3 if long else STORED):
        seconds, _ = timed(storing, 1)
        stores.append(seconds)
        bench.session.runtime.store.flush(120)
    stored = statistics.median(stores[-1:] if long else stores[-3:])
    logits, caches = bench.cold(tokens, store=True)
    bench.session.runtime.store.flush(120)
    expected = [logits, *state(caches)]
    decoded = bench.decode(logits, caches)
    del caches
    first_ram, _ = timed(lambda: bench.warm(tokens), 1)
    ram, (warm_logits, warm_caches, source) = timed(lambda: bench.warm(tokens), 5)
    equal = same(expected, [warm_logits, *state(warm_caches)])
    from_ram = furthest(decoded, bench.decode(warm_logits, warm_caches))
    del warm_caches, warm_logits
    ssd_times = []
    for _ in range(4):  # the first takes the pinned memory
        bench.session.runtime.store.close()
        bench.session = bench.open()
        seconds, (ssd_logits, ssd_caches, ssd_source) = timed(lambda: bench.warm(tokens), 1)
        ssd_times.append(seconds)
    equal_ssd = same(expected, [ssd_logits, *state(ssd_caches)])
    from_ssd = furthest(decoded, bench.decode(ssd_logits, ssd_caches))
    control = same(expected, [ssd_logits, *(array + 1 for array in state(ssd_caches))])
    ssd = statistics.median(ssd_times[1:])
    return {
        "tokens": size,
        "kv_bytes": held,
        "cold_s": round(cold, 4),
        "storing_ratio": round(cold / stored, 4),
        "storing_first_ratio": round(cold / stores[0], 4),
        "warm_ram_s": round(ram, 4),
        "warm_ssd_s": round(ssd, 4),
        "first_ram_s": round(first_ram, 4),
        "first_ssd_s": round(ssd_times[0], 4),
        "ram_times_sooner": round(cold / ram, 1),
        "ssd_times_sooner": round(cold / ssd, 1),
        "ram_GB_per_s": round(held / ram / 1e9, 2),
        "ssd_GB_per_s": round(held / ssd / 1e9, 2),
        "sources": [source, ssd_source],
        "state_bit_equal": [equal, equal_ssd],
        "control_equal": control,
        "decode_differs_by": {"two cold": again, "ram": from_ram, "ssd": from_ssd},
    }


def snapshots(bench: Bench, size: int, repeats: int = 3) -> dict[str, Any]:
    """Seconds of a prefill with all stored, without snapshots but the end's and with them."""
    seconds: dict[int, list[float]] = {4096: [], 8: []}
    for turn in range(-1, repeats):
        for stride in seconds if turn % 2 else reversed(seconds):
            bench.session.runtime.store.close()
            bench.session = bench.open(stride)
            tokens = np.random.default_rng(1000 + turn).integers(0, 150_000, size).tolist()
            tokens[0] = stride
            took, _ = timed(lambda tokens=tokens: bench.cold(tokens, store=True), 1)
            bench.session.runtime.store.flush(120)
            if turn >= 0:
                seconds[stride].append(took)
    ratios = [a / b for a, b in zip(seconds[8], seconds[4096], strict=True)]
    return {
        "tokens": size,
        "none_s": round(statistics.median(seconds[4096]), 4),
        "stride_8_s": round(statistics.median(seconds[8]), 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="dense,moe,hybrid")
    parser.add_argument("--sizes", default="2048,8192,32768")
    parser.add_argument("--long", type=int, default=16384)
    parser.add_argument("--snapshot-tokens", type=int, default=4608, help="0: not measured")
    parser.add_argument("--json")
    options = parser.parse_args()
    results: dict[str, Any] = {"device": str(mx.device_info()), "mlx": mx.__version__}
    for shape in options.shapes.split(","):
        folder = Path(tempfile.mkdtemp(prefix="thunder-bench-"))
        try:
            start = time.perf_counter()
            bench = Bench(shape, folder)
            print(f"{shape}: built in {time.perf_counter() - start:.1f} s", flush=True)
            results[shape] = []
            for size in map(int, filter(None, options.sizes.split(","))):
                row = measure(bench, size, size >= options.long)
                results[shape].append(row)
                print(json.dumps(row), flush=True)
            if shape == "hybrid" and options.snapshot_tokens:
                results["snapshots"] = snapshots(bench, options.snapshot_tokens)
                print(json.dumps(results["snapshots"]), flush=True)
            bench.session.runtime.store.close()
            del bench
            mx.clear_cache()
        except Exception as error:
            results[shape] = f"{type(error).__name__}: {error}"
            print(shape, results[shape], flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            if options.json:
                Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
