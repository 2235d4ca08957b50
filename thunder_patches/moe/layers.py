"""Finds a model's SwitchGLU layers and says which of them can be fused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from thunder_patches.moe.halves import SHARED, arrays, is_half

HOST_LAYERS = "mlx_lm.models.switch_layers"
"""Where mlx-lm (and mlx-vlm, which imports them) has SwitchGLU and its projections."""


@dataclass(frozen=True)
class Layer:
    """One SwitchGLU of a model."""

    path: str
    """As in `model.named_modules()`: ``model.layers.0.mlp.switch_mlp``."""
    glu: nn.Module
    parent: nn.Module


def host_class(name: str) -> type[nn.Module] | None:
    """A class of mlx-lm's switch_layers, or None where that module isn't loaded."""
    return getattr(sys.modules.get(HOST_LAYERS), name, None)


def switch_layers(model: nn.Module) -> Iterator[Layer]:
    """Every SwitchGLU in `model`, subclasses and other projects' copies included."""
    host = host_class("SwitchGLU")
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if (host and isinstance(module, host)) or type(module).__name__ == "SwitchGLU":
            yield Layer(path, module, modules[path.rpartition(".")[0]])


def why_not(layer: Layer) -> str | None:
    """The reason why `layer` can't be fused, or None."""
    glu = layer.glu
    if type(glu) is not host_class("SwitchGLU"):
        return f"{type(glu).__module__}.{type(glu).__name__} isn't mlx-lm's own SwitchGLU"
    gate, up = glu.get("gate_proj"), glu.get("up_proj")
    if gate is None or up is None:
        return "has no gate_proj and up_proj: fused or replaced by the host"
    if is_half(gate) and is_half(up):
        return "already fused"
    for name, projection in (("gate_proj", gate), ("up_proj", up)):
        if type(projection) not in (
            host_class("SwitchLinear"),
            host_class("QuantizedSwitchLinear"),
        ):
            return f"{name} is a {type(projection).__name__}: an adapter or another plugin is on it"
    if getattr(layer.parent, "sharding_group", None) is not None:
        return "sharded over several machines"
    return _difference(gate, up)


def _difference(gate: nn.Module, up: nn.Module) -> str | None:
    if type(gate) is not type(up):
        return f"gate_proj is a {type(gate).__name__}, up_proj a {type(up).__name__}"
    for name in ("group_size", "bits", "mode"):
        ours, theirs = getattr(gate, name, None), getattr(up, name, None)
        if ours != theirs:
            return f"gate_proj has {name} {ours}, up_proj {theirs}"
    gates, ups = arrays(gate), arrays(up)
    if gates.keys() != ups.keys():
        odd = ", ".join(sorted(gates.keys() ^ ups.keys()))
        return f"only one of gate_proj and up_proj has {odd}"
    for name, value in gates.items():
        if value.dtype != ups[name].dtype or value.shape != ups[name].shape:
            return (
                f"{name} of gate_proj is {value.dtype} {value.shape}, "
                f"of up_proj {ups[name].dtype} {ups[name].shape}"
            )
        if name in SHARED and not mx.array_equal(value, ups[name]):
            return f"gate_proj and up_proj differ in {name}, which has one value an expert"
    return None
