"""Made-up keys and values with the traits of real ones, and headers for them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from thunder_patches.cache.record import Header, TensorSpec
from thunder_patches.codec.calibration import Calibration
from thunder_patches.codec.fit import Moments, groups
from thunder_patches.codec.rotary import Rotary


def kv_like(heads: int, tokens: int, dim: int, seed: int = 0) -> np.ndarray:
    """float32 ``[heads, tokens, dim]``: correlated channels of unlike scale and offset."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(0, 1, (heads, 1, dim)))
    offset = rng.normal(0, 1, (heads, 1, dim)) * scale
    hidden = rng.normal(0, 1, (tokens, max(4, dim // 4)))
    mix = rng.normal(0, 1, (heads, hidden.shape[1], dim)) / hidden.shape[1] ** 0.5
    noise = rng.normal(0, 0.3, (heads, tokens, dim))
    return ((hidden @ mix + noise) * scale + offset).astype(np.float32)


def to_bytes(values: np.ndarray, dtype: str) -> bytes:
    """The values rounded to a dtype; for integers, their bits."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        return (bits >> 16).astype(np.uint16).tobytes()
    if dtype == "F16":
        return values.astype(np.float16).tobytes()
    return values.tobytes()


def layout_of(*specs: TensorSpec, layers: int = 1) -> str:
    """A layout in which each tensor's heads are shared out evenly over the layers."""
    rows = {s.name: [s.dtype, s.shape[0], s.shape[2]] for s in specs if len(s.shape) == 3}
    parts = [
        {
            "path": str(i),
            "class": "KVCache",
            "meta": {},
            "rows": [[n, i * (h // layers), h // layers] for n, (_, h, _) in rows.items()],
        }
        for i in range(layers)
    ]
    return json.dumps({"rows": rows, "layers": parts}, sort_keys=True, separators=(",", ":"))


def header_of(*specs: TensorSpec, start: int = 0, layers: int = 1) -> Header:
    tokens = max((s.shape[1] for s in specs if len(s.shape) == 3), default=0)
    return Header(
        key=b"k" * 16,
        parent=b"p" * 16,
        kind="block",
        start=start,
        tokens=np.arange(tokens, dtype="<i8").tobytes(),
        layout=layout_of(*specs, layers=layers),
        tensors=tuple(specs),
    )


def calibration_for(
    *specs: TensorSpec, layers: int = 2, rotary: Rotary | None = None, tokens: int = 600
) -> Calibration:
    """A calibration fitted to values like `kv_like` of the same seed, for tensors "k0", "v0", ..."""
    bases = {}
    for spec in specs:
        heads, _, dim = spec.shape
        each = heads // layers
        runs = groups([(i * each, each) for i in range(layers)], dim)
        moments = Moments(runs, heads, dim)
        rows = kv_like(heads, tokens, dim, seed=spec.name.startswith("v"))
        moments.add(rows, np.random.default_rng(0).normal(0, 1, rows.shape).astype(np.float32))
        bases[spec.name] = moments.fit()
    turned = {s.name: ((0, s.shape[0], rotary),) for s in specs if rotary and s.name[0] == "k"}
    steps = {"high": 0.1, "balanced": 0.4, "small": 1.2}
    limits = {
        q: {s.name: 100.0 * step**2 * s.shape[0] * s.shape[2] for s in specs}
        for q, step in steps.items()
    }
    shapes = {s.name: (s.shape[0], s.shape[2]) for s in specs}
    return replace(Calibration("a model", shapes, bases, turned, steps, limits), id="0" * 16)
