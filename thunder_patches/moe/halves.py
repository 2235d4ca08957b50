"""A gate and an up projection that run as one gather matmul.

Rows of a projection are computed (and quantised) independently, so gate and up stacked along the
output axis give the same bits in one launch. The stacked arrays are the only copy: both modules
stay where they are, with their parameters as views of it, so the model's parameter tree, names,
shapes and saved files don't change. Whoever calls one of the two gets its half of the product;
the other half waits for the partner's call with the same arguments, which mlx-lm's
`SwitchGLU.__call__` and mlx-vlm's copies of it make next.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import mlx.nn as nn

OUTPUT_AXIS = 1
"""Of an expert tensor, [experts, output dims, input dims or groups] or [experts, output dims]."""

SHARED = ("global_scale",)
"""Arrays that gate and up must have in common: one number an expert, for all of its rows."""


class Pair:
    """What a gate and an up projection share: the stacked module, and the half of its newest
    output that nobody has asked for yet."""

    __slots__ = ("stacked", "waiting")

    def __init__(self, stacked: nn.Module) -> None:
        self.stacked = stacked
        self.waiting: tuple[mx.array, mx.array, bool, int, mx.array] | None = None


class Half:
    """One side of a pair: gate (0) or up (1). No cycles here: arrays of gigabytes hang on it."""

    __slots__ = ("base", "pair", "side", "views")

    def __init__(self, pair: Pair, side: int, base: type[nn.Module]) -> None:
        self.pair = pair
        self.side = side
        self.base = base
        rows = pair.stacked["weight"].shape[OUTPUT_AXIS] // 2
        self.views = tuple(
            (name, whole[:, side * rows : (side + 1) * rows])
            for name, whole in arrays(pair.stacked).items()
            if name not in SHARED
        )
        """The parameters of this half's module. If it holds others, somebody put them in later:
        loaded again, cast, sharded, or being traced for a gradient."""


def _call(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
    """The output of this half, [..., output dims], as its own class would compute it.

    Every layer of every token comes here twice: kept short.
    """
    half: Half = self._thunder
    for name, view in half.views:
        if self.get(name) is not view:
            return alone(self)(x, indices, sorted_indices)
    pair = half.pair
    waiting = pair.waiting
    if (
        waiting is not None
        and waiting[0] is x
        and waiting[1] is indices
        and waiting[2] == sorted_indices
        and waiting[3] == half.side
    ):
        pair.waiting = None
        return waiting[4]
    gate, up = mx.split(pair.stacked(x, indices, sorted_indices), 2, -1)
    if half.side:
        pair.waiting = (x, indices, sorted_indices, 0, gate)
        return up
    pair.waiting = (x, indices, sorted_indices, 1, up)
    return gate


def join(gate: nn.Module, up: nn.Module, stacked: nn.Module) -> None:
    """Make `gate` and `up` the halves of `stacked`; their own arrays are let go."""
    pair = Pair(stacked)
    for side, module in enumerate((gate, up)):
        half = Half(pair, side, type(module))
        mx.eval(half.views)
        for name, view in half.views:
            module[name] = view
        module._thunder = half
        module.__class__ = half_of(half.base)


def release(module: nn.Module) -> None:
    """Give a half its class and arrays of its own back (one copy of them is allocated)."""
    own = alone(module)
    for name, value in arrays(own).items():
        module[name] = value
    module.__class__ = type(own)
    del module._thunder
    mx.eval(arrays(module))


def alone(module: nn.Module) -> nn.Module:
    """A half as a module of the host's class, with views copied: not every backend's kernels take
    them as they are."""
    half: Half = module._thunder
    views = dict(half.views)
    own = like(module, half.base)
    for name, value in module.items():
        view = views.get(name)
        own[name] = mx.contiguous(view) if view is not None and view is value else value
    return own


def stack(gate: nn.Module, up: nn.Module) -> nn.Module:
    """A module of their class with the rows of `gate` above those of `up`, evaluated."""
    stacked = like(gate, type(gate))
    ups = arrays(up)
    for name, value in arrays(gate).items():
        shared = name in SHARED
        stacked[name] = value if shared else mx.concatenate([value, ups[name]], axis=OUTPUT_AXIS)
    mx.eval(arrays(stacked))
    return stacked


def arrays(module: nn.Module) -> dict[str, mx.array]:
    """The arrays directly in `module`, by name."""
    return {name: value for name, value in module.items() if isinstance(value, mx.array)}


def like(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """A `cls` with the plain attributes of `module` (group size, bits, mode) and no arrays."""
    new = cls.__new__(cls)
    nn.Module.__init__(new)
    vars(new).update({name: value for name, value in vars(module).items() if name != "_thunder"})
    return new


def half_in(module: Any) -> Half | None:
    """The half that `module` is, or None."""
    return vars(module).get("_thunder") if isinstance(module, nn.Module) else None


def is_half(module: Any) -> bool:
    """Whether `module` is a half of a pair."""
    return half_in(module) is not None


@functools.cache
def half_of(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of the host's `base` whose instances are halves of a pair."""
    return type(f"Fused{base.__name__}", (base,), {"__call__": _call, "__module__": __name__})
