"""Fused gate and up projections against the host's, on the device that MLX finds: bits and speed.

    PYTHONPATH=. python tests/bench/moe_gpu.py [--small] [--seconds 160]

Needs mlx (with its CUDA or Metal backend), mlx-lm and this package. Twelve expert shapes of known
models and one with global scales, batches of 1, 4 and 16, after whole decode steps of a model of
the 30B-A3B shape. What is done is told on the way. Both forms run in turn. Prints one JSON object;
`ratio` is the host's time over the fused one, so above 1 is a gain. `chosen` says what `fuse` does here by
itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.models import gpt_oss, qwen3_moe
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU

from thunder_patches.moe import fusion

AFFINE4 = {"group_size": 64, "bits": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b 4-bit": dict(dims=2048, hidden=768, experts=128, top=8, quantise=AFFINE4),
    "qwen3-30b-a3b 8-bit": dict(
        dims=2048, hidden=768, experts=128, top=8, quantise={"group_size": 64, "bits": 8}
    ),
    "qwen3-30b-a3b bf16": dict(dims=2048, hidden=768, experts=128, top=8, quantise=None),
    "qwen3-30b-a3b mxfp4": dict(
        dims=2048, hidden=768, experts=128, top=8, quantise={"mode": "mxfp4", "group_size": 32, "bits": 4}
    ),
    "qwen3-30b-a3b nvfp4": dict(
        dims=2048, hidden=768, experts=128, top=8, quantise={"mode": "nvfp4", "group_size": 16, "bits": 4}
    ),
    "qwen3-30b-a3b mxfp8": dict(
        dims=2048, hidden=768, experts=128, top=8, quantise={"mode": "mxfp8", "group_size": 32, "bits": 8}
    ),
    "qwen3-next-80b 4-bit": dict(dims=2048, hidden=512, experts=512, top=10, quantise=AFFINE4),
    "qwen3-235b 4-bit": dict(dims=4096, hidden=1536, experts=64, top=8, quantise=AFFINE4),
    "gpt-oss-20b mxfp4": dict(
        dims=2880, hidden=2880, experts=32, top=4, bias=True,
        quantise={"mode": "mxfp4", "group_size": 32, "bits": 4},
    ),
    "mixtral-8x7b 4-bit": dict(dims=4096, hidden=14336, experts=8, top=2, quantise=AFFINE4),
    "glm-4.5-air 4-bit": dict(dims=4096, hidden=1408, experts=64, top=8, quantise=AFFINE4),
    "deepseek-v3 4-bit": dict(dims=7168, hidden=2048, experts=32, top=8, quantise=AFFINE4),
    "qwen3-30b-a3b nvfp4 with global scales": dict(
        dims=2048, hidden=768, experts=32, top=8, global_scale=True,
        quantise={"mode": "nvfp4", "group_size": 16, "bits": 4},
    ),
}  # fmt: skip
BATCHES = (1, 4, 16)
LAYERS = 24
"""Calls of one layer in a timed chain, as in a decode step."""


class Block(nn.Module):
    """One SwitchGLU with random experts, bfloat16 around them."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        bias = shape.get("bias", False)
        oai = getattr(gpt_oss, "SwigluOAI", None) or gpt_oss.SwiGLU
        kwargs = {"activation": oai()} if bias else {}
        dims, hidden, experts = shape["dims"], shape["hidden"], shape["experts"]
        self.experts = SwitchGLU(dims, hidden, experts, bias=bias, **kwargs)
        self.norm = nn.RMSNorm(dims)
        self.set_dtype(mx.bfloat16)
        if shape["quantise"]:
            for name in ("gate_proj", "up_proj", "down_proj"):
                extra = {"global_scale": True} if shape.get("global_scale") else {}
                projection = self.experts[name].to_quantized(**shape["quantise"], **extra)
                mx.eval(projection.parameters())
                self.experts[name] = projection
        if shape.get("global_scale"):
            # One scale an expert for both, as a checkpoint must have it to be fused.
            self.experts.up_proj.global_scale = self.experts.gate_proj.global_scale
        self.eval()
        mx.eval(self.parameters())

    def __call__(self, x: mx.array, routes: mx.array) -> mx.array:
        return self.experts(self.norm(x), routes)


def inputs(shape: dict[str, Any], rows: int, tokens: int) -> tuple[mx.array, mx.array]:
    x = mx.random.normal((rows, tokens, shape["dims"])).astype(mx.bfloat16)
    order = mx.argsort(mx.random.uniform(shape=(rows, tokens, shape["experts"])), axis=-1)
    routes = order[..., : shape["top"]].astype(mx.uint32)
    mx.eval(x, routes)
    return x, routes


def in_turn(first: Callable[[], Any], second: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Runs in turn, each first as often as second: medians in milliseconds, and the median of the
    pairs' ratios, first over second."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + repeats % 2 + 4):
        order = [(first, times[0]), (second, times[1])]
        for run, seen in order if repeat % 2 else reversed(order):
            start = time.perf_counter()
            mx.eval(run())
            if repeat > 3:
                seen.append((time.perf_counter() - start) * 1e3)
    a, b = (statistics.median(seen) for seen in times)
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    return {"stock_ms": round(a, 4), "fused_ms": round(b, 4), "ratio": round(ratio, 4)}


def chain(block: Block, x: mx.array, routes: mx.array) -> mx.array:
    for _ in range(LAYERS):
        x = block(x, routes).mean(axis=-2)
    return x


def one_shape(shape: dict[str, Any], repeats: int) -> dict[str, Any]:
    mx.random.seed(0)
    stock = Block(shape)
    fused = Block.__new__(Block)
    nn.Module.__init__(fused)
    fused.norm = stock.norm
    fused.experts = fusion.twin(stock.experts, fusion.stack(*projections(stock)))
    fused.eval()
    found: dict[str, Any] = {"bits": {}, "layer": {}}
    for name, rows, tokens in (
        *((f"batch {n}", n, 1) for n in BATCHES), ("prefill 40", 1, 40), ("prefill 512", 1, 512)
    ):  # fmt: skip
        entry = inputs(shape, rows, tokens)
        found["bits"][name] = bool(mx.array_equal(stock(*entry), fused(*entry)).item())
    for rows in BATCHES:
        x, routes = inputs(shape, rows, 1)
        found["layer"][f"batch {rows}"] = in_turn(
            lambda x=x, routes=routes: chain(stock, x, routes),
            lambda x=x, routes=routes: chain(fused, x, routes),
            repeats,
        )
    start = time.perf_counter()
    report = fusion.fuse(stock, any_family=True)
    found["chosen"] = str(report)
    found["chosen_after_s"] = round(time.perf_counter() - start, 3)
    return found


def projections(block: Block) -> tuple[nn.Module, nn.Module]:
    return block.experts.gate_proj, block.experts.up_proj


def model(layers: int, small: bool) -> nn.Module:
    """A qwen3_moe with random 4-bit experts; the same every time."""
    config = dict(
        model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=layers, intermediate_size=6144,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, decoder_sparse_step=1, mlp_only_layers=[],
        moe_intermediate_size=768, rms_norm_eps=1e-6, vocab_size=151936, rope_theta=1e6,
        tie_word_embeddings=False, max_position_embeddings=4096, norm_topk_prob=True,
    )  # fmt: skip
    if small:
        config |= dict(
            hidden_size=128, num_experts=16, moe_intermediate_size=64, vocab_size=512,
            intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        )  # fmt: skip
    mx.random.seed(1)
    made = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    made.set_dtype(mx.bfloat16)
    for layer in made.layers:
        nn.quantize(layer, 64, 4)
        mx.eval(layer.parameters())
    nn.quantize(made, 64, 4)
    made.eval()
    mx.eval(made.parameters())
    return made


def whole_steps(layers: int, repeats: int, small: bool) -> dict[str, Any]:
    stock, fused = model(layers, small), model(layers, small)
    start = time.perf_counter()
    report = fusion.fuse(fused, any_family=True, compare_speed=False)
    found: dict[str, Any] = {
        "layers": layers,
        "fused": str(report),
        "fused_after_s": round(time.perf_counter() - start, 3),
        "bits": {},
        "step": {},
    }
    prompt = mx.array([list(range(300))])
    caches = [make_prompt_cache(m) for m in (stock, fused)]
    outputs = [m(prompt, cache=c) for m, c in zip((stock, fused), caches, strict=True)]
    found["bits"]["prefill 300"] = bool(mx.array_equal(*outputs).item())
    for rows in BATCHES:
        tokens = mx.array([[7 + row] for row in range(rows)])
        caches = [make_prompt_cache(m) for m in (stock, fused)]
        outputs = [m(tokens, cache=c) for m, c in zip((stock, fused), caches, strict=True)]
        found["bits"][f"batch {rows}"] = bool(mx.array_equal(*outputs).item())
        found["step"][f"batch {rows}"] = in_turn(
            lambda tokens=tokens, c=caches[0]: stock(tokens, cache=c),
            lambda tokens=tokens, c=caches[1]: fused(tokens, cache=c),
            repeats,
        )
    return found


def tell(name: str, found: Any, start: float) -> None:
    print(f"{time.perf_counter() - start:.0f} s, {name}: {json.dumps(found)}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--seconds", type=float, default=160.0, help="skip what is left after")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    start = time.perf_counter()
    found: dict[str, Any] = {
        "device": str(mx.default_device()),
        "mlx": mx.__version__,
        "mlx_lm": getattr(mlx_lm, "__version__", "?"),
        "shapes": {},
    }
    try:
        steps = (2, options.repeats, True) if options.small else (48, options.repeats, False)
        found["decode"] = whole_steps(*steps)
    except Exception as error:
        found["decode"] = {"error": f"{type(error).__name__}: {error}"[:400]}
    tell("decode", found["decode"], start)
    mx.clear_cache()
    for name, shape in SHAPES.items():
        if options.small:
            shape |= {"dims": 128, "hidden": 64, "experts": 16}
            if mx.default_device() == mx.cpu and shape["quantise"] is None:
                found["shapes"][name] = "skipped: bf16 experts don't run on the CPU"
                continue
        if time.perf_counter() - start > options.seconds:
            found["shapes"][name] = "skipped: out of time"
            continue
        try:
            found["shapes"][name] = one_shape(shape, options.repeats)
        except Exception as error:
            found["shapes"][name] = {"error": f"{type(error).__name__}: {error}"[:400]}
        tell(name, found["shapes"][name], start)
        mx.clear_cache()
    entries = [e for e in found["shapes"].values() if isinstance(e, dict) and "bits" in e]
    found["all_bit_equal"] = bool(entries) and all(all(e["bits"].values()) for e in entries)
    ratios = [timed["ratio"] for e in entries for timed in e["layer"].values()]
    found["ratio_min_max"] = [min(ratios), max(ratios)] if ratios else []
    found["seconds"] = round(time.perf_counter() - start, 1)
    json.dump(found, sys.stdout, indent=1)
    print()
    return 0 if found["all_bit_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
