"""Fuses the gate and up projections of a loaded model's MoE layers (the idea is oMLX's
qwen35_moe_gate_up; see halves.py for why the bits stay the same).

`fuse` goes layer by layer: stack, check, let the originals go, drain the memory pool. Called
before the rest of the model is read (mlx-lm loads lazily), it never holds more than the finished
model; called afterwards, one layer's gate and up on top. Kernels are chosen by shape, and differ
between devices and releases of MLX. So the first layer of each form is run both ways on this
device before its originals go: other bits, or on a GPU a slower step, and that form is left alone.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from statistics import median

import mlx.core as mx
import mlx.nn as nn

from thunder_patches.moe.families import why_not_family
from thunder_patches.moe.halves import arrays, is_half, join, like, release, stack
from thunder_patches.moe.layers import Layer, switch_layers, why_not

log = logging.getLogger("thunder_patches")

CHECKED_TOKENS = (1, 3, 40)
"""Tokens of the inputs on which bits are compared: decode, a small batch, and the sorted path."""
TIMED_TOKENS = (1, 4, 16, 64)
TIMED_SECONDS = 1.0
SLOWER = 0.97
"""A form is left alone when the host's speed beats the fused one by more than this, twice."""


@dataclass
class Report:
    """How the MoE layers of a model stand."""

    fused: int = 0
    left_alone: dict[str, str] = field(default_factory=dict)
    """Path of the layer -> reason."""

    def reasons(self) -> dict[str, int]:
        """Reason -> number of layers."""
        return dict(Counter(self.left_alone.values()))

    def __str__(self) -> str:
        total = self.fused + len(self.left_alone)
        if not total:
            return "the model has no SwitchGLU layers"
        text = f"gate and up fused in {self.fused} of {total} MoE layers"
        return "; ".join([text, *(f"{n}: {reason}" for reason, n in self.reasons().items())])


def fuse(
    model: nn.Module, *, any_family: bool = False, compare_speed: bool | None = None
) -> Report:
    """Fuse every SwitchGLU of `model` that allows it, in place. A second call changes nothing.

    Args:
        any_family: fuse families that compat/moe_families.toml doesn't name, too.
        compare_speed: leave a form alone where the fused layer is slower; None: on a GPU only
            (on the CPU, where a launch costs nothing, both take the same time).
    """
    if compare_speed is None:
        compare_speed = mx.default_device().type == mx.DeviceType.gpu
    report = Report()
    verdicts: dict[tuple, str | None] = {}
    dtype = activation_dtype(model)
    kept_out = None if any_family else why_not_family(model)
    for layer in switch_layers(model):
        reason = why_not(layer) or kept_out
        if reason == "already fused":
            report.fused += 1
            continue
        if reason is None:
            reason = _fuse_layer(layer, verdicts, dtype, compare_speed)
        if reason is None:
            report.fused += 1
        else:
            report.left_alone[layer.path] = reason
        mx.synchronize()
        mx.clear_cache()
    return report


def undo(model: nn.Module) -> int:
    """Give every fused projection of `model` its own arrays back, layer by layer; returns how
    many layers that were. Projections under an adapter count too."""
    halves = [module for _, module in model.named_modules() if is_half(module)]
    return _release(halves)


def undo_adapted(model: nn.Module) -> int:
    """The same, only for layers on whose gate or up projection an adapter was put."""
    adapted = []
    for layer in switch_layers(model):
        if not (is_half(layer.glu.get("gate_proj")) and is_half(layer.glu.get("up_proj"))):
            adapted += [module for module in layer.glu.modules() if is_half(module)]
    return _release(adapted)


def _release(halves: list[nn.Module]) -> int:
    by_pair: dict[int, list[nn.Module]] = {}
    for half in halves:
        by_pair.setdefault(id(half._thunder.pair), []).append(half)
    halves.clear()
    count = len(by_pair)
    while by_pair:
        for half in by_pair.popitem()[1]:
            release(half)
        mx.synchronize()
        mx.clear_cache()
    return count


def report(model: nn.Module) -> Report:
    """How the MoE layers of `model` stand now; changes nothing."""
    found = Report()
    for layer in switch_layers(model):
        reason = why_not(layer)
        if reason == "already fused":
            found.fused += 1
        else:
            found.left_alone[layer.path] = reason or "not fused"
    return found


def _fuse_layer(
    layer: Layer, verdicts: dict[tuple, str | None], dtype: mx.Dtype, compare_speed: bool
) -> str | None:
    """Fuse one layer; the reason if its form turns out to be better left alone."""
    key = form(layer.glu)
    if verdicts.get(key) is not None:
        return verdicts[key]
    gate, up = layer.glu.gate_proj, layer.glu.up_proj
    mx.eval(arrays(gate), arrays(up))
    stacked = stack(gate, up)
    if key not in verdicts:
        verdicts[key] = try_out(layer.glu, stacked, dtype, compare_speed)
        if verdicts[key] is not None:
            return verdicts[key]
    join(gate, up, stacked)
    return None


def form(glu: nn.Module) -> tuple:
    """What the choice of kernels depends on."""
    projections = (glu.gate_proj, glu.down_proj)
    shapes = tuple(
        (name, value.shape, str(value.dtype))
        for projection in projections
        for name, value in sorted(arrays(projection).items())
    )
    modes = tuple(
        getattr(projection, name, None)
        for projection in projections
        for name in ("group_size", "bits", "mode")
    )
    return shapes, modes, type(glu.activation).__name__


def try_out(glu: nn.Module, stacked: nn.Module, dtype: mx.Dtype, compare_speed: bool) -> str | None:
    """Run `glu` as it is and with the stacked projection, side by side; the reason against it."""
    try:
        inputs = [_input(glu, count, dtype) for count in CHECKED_TOKENS]
        expected = [glu(*entry) for entry in inputs]
        mx.eval(expected)
    except Exception as error:
        return f"can't be checked: its own form doesn't run here ({_first_line(error)})"
    fused = twin(glu, stacked)
    try:
        for count, entry, wanted in zip(CHECKED_TOKENS, inputs, expected, strict=True):
            if not mx.array_equal(fused(*entry), wanted, equal_nan=True):
                return f"fused, other bits than the host's at {count} tokens"
        return _slower(glu, fused, dtype) if compare_speed else None
    except Exception as error:
        return f"the fused form doesn't run here ({_first_line(error)})"


def twin(glu: nn.Module, stacked: nn.Module) -> nn.Module:
    """A fused SwitchGLU beside `glu`: everything else is shared, `glu` stays as it is."""
    fused = like(glu, type(glu))
    for name, value in glu.items():
        fused[name] = value
    for name in ("gate_proj", "up_proj"):
        fused[name] = like(glu[name], type(glu[name]))
    join(fused["gate_proj"], fused["up_proj"], stacked)
    return fused


def _input(glu: nn.Module, tokens: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Random activations [1, tokens, dims] and routes [1, tokens, k]; the host's own random state
    isn't touched."""
    experts = glu.gate_proj.num_experts
    key = mx.random.key(tokens)
    x = mx.random.normal((1, tokens, glu.gate_proj.input_dims), key=key).astype(dtype)
    order = mx.argsort(mx.random.uniform(shape=(1, tokens, experts), key=key), axis=-1)
    return x, order[..., : min(8, experts)]


def _slower(glu: nn.Module, fused: nn.Module, dtype: mx.Dtype) -> str | None:
    """Time both forms in turn; what to say when the fused one loses at some number of tokens."""
    end = time.perf_counter() + TIMED_SECONDS
    for tokens in TIMED_TOKENS:
        if time.perf_counter() > end:
            break  # so slow a step doesn't wait for launches
        x, routes = _input(glu, tokens, dtype)
        ratios = [_ratio(glu, fused, x, routes) for _ in range(2)]
        if max(ratios) < SLOWER:
            return f"slower fused on this device: {max(ratios):.2f} of the speed at {tokens} tokens"
    return None


def _ratio(
    glu: nn.Module, fused: nn.Module, x: mx.array, routes: mx.array, repeats: int = 10
) -> float:
    """Time of `glu` over time of `fused`: the median of pairs of runs, chains of eight calls."""

    def chain(layer: nn.Module) -> float:
        y = x
        start = time.perf_counter()
        for _ in range(8):
            y = layer(y, routes).mean(axis=-2)
        mx.eval(y)
        return time.perf_counter() - start

    pairs = []
    for repeat in range(repeats + 1):
        # Each goes first as often as second: going first has its own price.
        first, second = (glu, fused) if repeat % 2 else (fused, glu)
        one, two = chain(first), chain(second)
        if repeat:
            pairs.append(one / two if repeat % 2 else two / one)
    return median(pairs)


def activation_dtype(model: nn.Module) -> mx.Dtype:
    """The dtype that activations have: most norms' weights', or float32."""
    norms = [m for m in model.modules() if isinstance(m, nn.RMSNorm | nn.LayerNorm)]
    dtypes = Counter(norm.weight.dtype for norm in norms if "weight" in norm)
    return dtypes.most_common(1)[0][0] if dtypes else mx.float32


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:160]
