"""Which rotary embedding each layer of a model uses, found in its modules and checked on its keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..codec.rotary import Rotary
from .layers import Layout


class UnknownRotary(Exception):
    """A layer's rotary embedding isn't one that can be undone; the message says which and why."""


def rotaries(model: Any, layout: Layout) -> dict[str, tuple[tuple[int, int, Rotary], ...]]:
    """Tensor name to (first head, heads, rotary) for each run of layers with the same rotary.

    The cache leaf at path "3" or "3.1" belongs to ``model.layers[3]``. Keys are what is rotated;
    in multi-head latent attention (DeepSeek) it is the part that lies in the cache as values.

    Raises:
        UnknownRotary: for an embedding that isn't known here.
    """
    layers = model.layers
    found: dict[str, list[tuple[int, int, Rotary]]] = {}
    for path, _, _, placed in layout.parts:
        if not placed:
            continue
        modules = list(_modules(layers[int(path.partition(".")[0])]))
        latent = any(hasattr(module, "kv_lora_rank") for module in modules)
        rotary = _only({rotary_of(m) for m in modules if _is_rope(m)}, path)
        for name, first, heads in placed:
            if rotary is None or name.rstrip("0123456789") != ("v" if latent else "k"):
                continue
            runs = found.setdefault(name, [])
            if runs and runs[-1][2] == rotary and runs[-1][0] + runs[-1][1] == first:
                runs[-1] = (runs[-1][0], runs[-1][1] + heads, rotary)
            else:
                runs.append((first, heads, rotary))
    return {name: tuple(runs) for name, runs in found.items()}


def rotary_of(module: Any) -> Rotary:
    """The rotation that one of mlx's or mlx-lm's rotary modules does.

    Raises:
        UnknownRotary: another class, or one whose rotation depends on more than the position.
    """
    kind = type(module).__name__
    if kind not in _KNOWN:
        raise UnknownRotary(f"expected one of {', '.join(_KNOWN)}, found {kind}")
    dims, rates, scale = _KNOWN[kind](module)
    rotary = Rotary(
        tuple(float(rate) for rate in rates), bool(getattr(module, "traditional", False)), scale
    )
    probe = np.random.default_rng(0).normal(size=(1, 1, 3, dims)).astype(np.float32)
    for offset in (0, 7, 1000):
        want = np.array(module(mx.array(probe), offset=offset), np.float32)
        if np.abs(rotary.turn(probe, offset) - want).max() > 0.01:
            raise UnknownRotary(f"{kind} turns keys at position {offset} in another way")
    return rotary


def check(
    rotary: dict[str, tuple[tuple[int, int, Rotary], ...]],
    keys: dict[str, np.ndarray],
    tolerance: float = 0.05,
) -> None:
    """Check rotaries on the rows of a prompt that is one token over and over.

    Without positions, all its tokens are the same in every layer: undone keys must be equal.

    Args:
        keys: tensor name to float32 ``[heads, tokens, dim]`` of such a prompt from position 0.

    Raises:
        UnknownRotary: when they aren't.
    """
    for name, rows in keys.items():
        undone = rows.copy()
        for first, heads, turn in rotary.get(name, ()):
            part = slice(first, first + heads)
            undone[part] = turn.turn(rows[part], 0, inverse=True)
        size = np.sqrt(np.mean(undone[:, :1] ** 2, axis=(1, 2))) + 1e-6
        off = np.abs(undone - undone[:, :1]).max(axis=(1, 2)) / size
        if off.max() > tolerance:
            head = int(off.argmax())
            raise UnknownRotary(f"{name}, head {head}: keys differ by {off[head]:.2f} when undone")


def _modules(layer: Any) -> Sequence[Any]:
    return [module for _, module in layer.named_modules()]


def _is_rope(module: Any) -> bool:
    return "rope" in type(module).__name__.lower()


def _only(rotaries: set[Rotary], path: str) -> Rotary | None:
    if len(rotaries) > 1:
        raise UnknownRotary(f"layer {path} has {len(rotaries)} rotary embeddings")
    return next(iter(rotaries), None)


Known = Callable[[Any], tuple[int, np.ndarray, float]]


def _plain(module: Any) -> tuple[int, np.ndarray, float]:
    rates = module.base ** (-np.arange(0, module.dims, 2, dtype=np.float64) / module.dims)
    return module.dims, rates * module.scale, 1.0


def _tabled(scale_name: str | None) -> Known:
    """Modules that keep the periods of their pairs; an infinite one isn't rotated."""

    def read(module: Any) -> tuple[int, np.ndarray, float]:
        periods = np.array(module._freqs, np.float64)
        scale = float(getattr(module, scale_name)) if scale_name else 1.0
        return 2 * len(periods), 1 / periods, scale

    return read


_KNOWN: dict[str, Known] = {
    "RoPE": _plain,
    "Llama3RoPE": _tabled(None),
    "ProportionalRoPE": _tabled(None),
    "YarnRoPE": _tabled("mscale"),
    "SuScaledRoPE": _tabled("_scale"),
}
