"""Fused gate and up against the host's on this device: memory at load, layers, decode steps.

    PYTHONPATH=. python tests/bench/moe_fusion.py [--layers 24]

Both forms run in turn; `ratio` is the host's time over the fused one. Memory is that of a process
of its own that loads a checkpoint: MLX's peak, and the peak of the resident set. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU

from thunder_patches.moe import fusion

MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 1024, "intermediate_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32,
    "num_experts_per_tok": 4, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "moe_intermediate_size": 384, "rms_norm_eps": 1e-6, "vocab_size": 512, "rope_theta": 1e6,
    "norm_topk_prob": True, "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip
SHAPES = {
    "float32": None,
    "affine 4-bit": {"group_size": 64, "bits": 4},
    "affine 8-bit": {"group_size": 64, "bits": 8},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}

_LOAD = """
import json, re, sys
from pathlib import Path
import mlx.core as mx, mlx_lm.utils
from mlx_lm.models import qwen3_moe, switch_layers
from thunder_patches.hosts.mlx_lm import moe
from thunder_patches.moe import fusion
def status(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before = status("VmRSS")
mx.reset_peak_memory()
if sys.argv[1] == "fused":
    model, _ = moe.fuse_loaded(mlx_lm.utils.load_model, None, (Path(sys.argv[2]),), {})
    assert fusion.report(model).fused
elif sys.argv[1] == "fused afterwards":
    model, _ = mlx_lm.utils.load_model(Path(sys.argv[2]))
    assert fusion.fuse(model).fused
else:
    model, _ = mlx_lm.utils.load_model(Path(sys.argv[2]))
print(json.dumps({"peak_mb": mx.get_peak_memory() / 1e6, "active_mb": mx.get_active_memory() / 1e6,
                  "resident_peak_mb": (status("VmHWM") - before) / 1e6}))
"""


def in_turn(first: Callable[[], Any], second: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Runs in turn, each first as often as second; the ratio is the median of the pairs'."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(2 * repeats + 2):
        order = [(first, times[0]), (second, times[1])]
        for run, seen in order if repeat % 2 else reversed(order):
            start = time.perf_counter()
            mx.eval(run())
            if repeat > 1:
                seen.append((time.perf_counter() - start) * 1e3)
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    return {"stock_ms": round(statistics.median(times[0]), 3), "ratio": round(ratio, 3)}


def layer(quantise: dict[str, Any] | None, repeats: int) -> dict[str, Any]:
    dims, hidden, experts, top = (256, 128, 16, 4) if quantise is None else (1024, 384, 32, 4)
    mx.random.seed(0)
    stock = SwitchGLU(dims, hidden, experts)
    if quantise:
        for name in ("gate_proj", "up_proj", "down_proj"):
            stock[name] = stock[name].to_quantized(**quantise)
    stock.eval()
    mx.eval(stock.parameters())
    fused = fusion.twin(stock, fusion.stack(stock.gate_proj, stock.up_proj))
    found: dict[str, Any] = {}
    for tokens in (1, 4, 16):
        x = mx.random.normal((1, tokens, dims))
        routes = mx.argsort(mx.random.uniform(shape=(1, tokens, experts)), axis=-1)[..., :top]
        mx.eval(x, routes)
        assert mx.array_equal(stock(x, routes), fused(x, routes))
        found[f"{tokens} tokens"] = in_turn(
            lambda x=x, routes=routes: stock(x, routes),
            lambda x=x, routes=routes: fused(x, routes),
            max(5, repeats // tokens),
        )
    return found


def write_model(folder: Path, layers: int) -> None:
    config = MODEL | {"num_hidden_layers": layers}
    mx.random.seed(0)
    model: nn.Module = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    model, config = mlx_lm.utils.quantize_model(model, config, 64, 4)
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))


def memory(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for how in ("stock", "fused", "fused afterwards"):
        done = subprocess.run(
            [sys.executable, "-c", _LOAD, how, str(folder)],
            capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip
        found[how] = json.loads(done.stdout.splitlines()[-1])
    for how in ("fused", "fused afterwards"):
        for name in ("peak_mb", "resident_peak_mb"):
            found[how][name + "_ratio"] = round(found[how][name] / found["stock"][name], 4)
    return found


def steps(folder: Path, repeats: int) -> dict[str, Any]:
    stock, fused = (mlx_lm.utils.load_model(folder)[0] for _ in range(2))
    start = time.perf_counter()
    found: dict[str, Any] = {"report": str(fusion.fuse(fused))}
    found["fused_after_s"] = round(time.perf_counter() - start, 3)
    for rows in (1, 4):
        tokens = mx.array([[7 + row] for row in range(rows)])
        caches = [make_prompt_cache(model) for model in (stock, fused)]
        outputs = [m(tokens, cache=c) for m, c in zip((stock, fused), caches, strict=True)]
        assert mx.array_equal(*outputs)
        found[f"batch {rows}"] = in_turn(
            lambda tokens=tokens, cache=caches[0]: stock(tokens, cache=cache),
            lambda tokens=tokens, cache=caches[1]: fused(tokens, cache=cache),
            repeats,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    found: dict[str, Any] = {"device": str(mx.default_device()), "mlx": mx.__version__}
    with tempfile.TemporaryDirectory(prefix="moe-fusion-") as name:
        folder = Path(name)
        write_model(folder, options.layers)
        found["memory"] = memory(folder)
        found["decode"] = steps(folder, options.repeats // 2)
    found["layer"] = {name: layer(form, options.repeats) for name, form in SHAPES.items()}
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
