"""Cut blocks and snapshots out of a live prompt cache, as host bytes.

Runs on the generation thread: one ``mx.eval`` for everything that is cut at once. What leaves this
module are buffers; whoever writes them never touches MLX (HOSTS.md of the project, "MLX": lazy arrays
of another thread raise). They are views already, not arrays: on a GPU with memory of its own the view moves
the array's buffer, and in a writer's thread that could free it under a kernel that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .layers import DTYPE_NAMES, Layout, Leaf, Meta

Tensors = dict[str, tuple[str, tuple[int, ...], memoryview]]
"""Tensor name to (dtype name, shape, bytes)."""


@dataclass(frozen=True)
class Cut:
    """The bytes of one block or snapshot, and the meta of the state in it (path to meta)."""

    tensors: Tensors
    meta: dict[str, Meta]


def cut(
    found: Sequence[Leaf],
    layout: Layout,
    spans: Sequence[tuple[int, int]],
    *,
    state: bool = False,
    logits: mx.array | None = None,
) -> list[Cut]:
    """Copy the rows of each span ``[start, end)`` out of the caches; state and logits go with the last.

    Args:
        found: the leaves of one sequence (`layers.leaves`).
        spans: token positions; an empty span gives row tensors of zero tokens.
        state: also take the state arrays of the leaves.
        logits: ``[vocabulary]``, kept as tensor ``"logits"`` with the last span.

    Returns:
        one `Cut` per span. Their buffers share nothing with the caches.
    """
    lazy: list[dict[str, mx.array]] = []
    shapes: list[dict[str, tuple[str, tuple[int, ...]]]] = []
    for start, end in spans:
        arrays: dict[str, mx.array] = {}
        shape: dict[str, tuple[str, tuple[int, ...]]] = {}
        pieces: dict[str, list[mx.array]] = {name: [] for name in layout.groups}
        for leaf, (_, _, _, placed) in zip(found, layout.parts, strict=True):
            for (_, array), (name, _, _) in zip(leaf.rows, placed, strict=True):
                pieces[name].append(array[:, leaf.first + start : leaf.first + end])
        for name, (dtype, heads, dim) in layout.groups.items():
            shape[name] = (dtype, (heads, end - start, dim))
            if end > start and dim:
                arrays[name] = _copy(pieces[name])
        lazy.append(arrays)
        shapes.append(shape)
    meta: dict[str, Meta] = {}
    if state:
        for leaf in found:
            if leaf.cuttable:
                continue
            meta[leaf.path] = leaf.meta | {"arrays": len(leaf.state)}
            for i, array in enumerate(leaf.state):
                name = state_name(leaf.path, i)
                lazy[-1][name] = _copy([array])
                shapes[-1][name] = (DTYPE_NAMES[array.dtype], tuple(array.shape))
    if logits is not None:
        lazy[-1]["logits"] = _copy([logits])
        shapes[-1]["logits"] = (DTYPE_NAMES[logits.dtype], tuple(logits.shape))
    mx.eval([array for arrays in lazy for array in arrays.values()])
    return [
        Cut(
            {
                name: (
                    dtype,
                    dims,
                    memoryview(arrays[name]).cast("B")  # type: ignore[arg-type]
                    if name in arrays
                    else memoryview(b""),
                )
                for name, (dtype, dims) in shape.items()
            },
            meta if i == len(lazy) - 1 else {},
        )
        for i, (arrays, shape) in enumerate(zip(lazy, shapes, strict=True))
    ]


def state_name(path: str, i: int) -> str:
    """Tensor name of the i-th state array of the leaf at ``path``."""
    return f"s{path}.{i}"


def _copy(pieces: list[mx.array]) -> mx.array:
    """The pieces one after another as bytes, in a buffer of their own.

    A slice, a view and the concatenation of a single array may share their source's buffer; holding
    such a view would keep the whole cache alive and turn each in-place update of it into a copy.
    """
    if len(pieces) == 1:
        # An element-wise result keeps its operand's order of axes in memory.
        return mx.bitwise_or(mx.contiguous(_bytes_of(pieces[0])), mx.array(0, mx.uint8))
    return mx.concatenate(pieces, axis=0).view(mx.uint8)


def _bytes_of(array: mx.array) -> mx.array:
    return (array if array.ndim else array.reshape(1)).view(mx.uint8)
