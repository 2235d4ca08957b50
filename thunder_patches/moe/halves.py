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
    """What a gate (side 0) and an up projection (side 1) share: the stacked module, the views of
    it that their parameters are, and the half that nobody has asked for yet."""

    def __init__(self, stacked: nn.Module) -> None:
        self.stacked = stacked
        self.rows = stacked["weight"].shape[OUTPUT_AXIS] // 2
        wholes = {name: a for name, a in arrays(stacked).items() if name not in SHARED}
        self.views = tuple(
            {name: a[:, side * self.rows : (side + 1) * self.rows] for name, a in wholes.items()}
            for side in (0, 1)
        )
        self._waiting: tuple[Any, ...] = (None,)

    def run(
        self, half: nn.Module, x: mx.array, indices: mx.array, sorted_indices: bool
    ) -> mx.array:
        """The output of `half`, [..., output dims], as its own class would compute it."""
        side = half._thunder_side
        if not self.holds(half):
            return alone(half)(x, indices, sorted_indices=sorted_indices)
        waiting, self._waiting = self._waiting, (None,)
        if (
            waiting[0] is x
            and waiting[1] is indices
            and waiting[2] == sorted_indices
            and waiting[3] == side
        ):
            return waiting[4]
        both = self.stacked(x, indices, sorted_indices=sorted_indices)
        outputs = mx.split(both, [self.rows], axis=-1)
        self._waiting = (x, indices, sorted_indices, 1 - side, outputs[1 - side])
        return outputs[side]

    def holds(self, half: nn.Module) -> bool:
        """Whether the parameters of `half` still are the views, and not arrays that somebody put
        in later: loaded again, cast, sharded, or being traced for a gradient."""
        get = half.get
        return all(get(name) is view for name, view in self.views[half._thunder_side].items())


def join(gate: nn.Module, up: nn.Module, stacked: nn.Module) -> None:
    """Make `gate` and `up` the halves of `stacked`; their own arrays are let go."""
    pair = Pair(stacked)
    mx.eval(pair.views)
    for side, half in enumerate((gate, up)):
        for name, view in pair.views[side].items():
            half[name] = view
        half._thunder_pair = pair
        half._thunder_side = side
        half.__class__ = half_of(type(half))


def release(half: nn.Module) -> None:
    """Give `half` its class and arrays of its own back (one copy of them is allocated)."""
    own = alone(half)
    for name, value in arrays(own).items():
        half[name] = value
    half.__class__ = type(own)
    del half._thunder_pair, half._thunder_side
    mx.eval(arrays(half))


def alone(half: nn.Module) -> nn.Module:
    """`half` as a module of the host's class, with views copied: not every backend's kernels take
    them as they are."""
    views = half._thunder_pair.views[half._thunder_side]
    own = like(half, type(half).__mro__[1])
    for name, value in half.items():
        own[name] = mx.contiguous(value) if value is views.get(name) else value
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
    plain = {name: value for name, value in vars(module).items() if not name.startswith("_thunder")}
    vars(new).update(plain)
    return new


def is_half(module: Any) -> bool:
    """Whether `module` is a half of a pair."""
    return isinstance(module, nn.Module) and "_thunder_pair" in vars(module)


@functools.cache
def half_of(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of the host's `base` whose instances are halves of a pair."""

    def call(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        half: mx.array = self._thunder_pair.run(self, x, indices, sorted_indices)
        return half

    return type(f"Fused{base.__name__}", (base,), {"__call__": call, "__module__": __name__})
