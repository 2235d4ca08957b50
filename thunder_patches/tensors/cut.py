"""Cut blocks and snapshots out of a live prompt cache, as host bytes.

Runs on the generation thread: one ``mx.eval`` for everything that is cut at once. What leaves this
module are buffers; whoever writes them never touches MLX (HOSTS.md of the project, "MLX": lazy arrays
of another thread raise). They are views already, not arrays: on a GPU with memory of its own the view moves
the array's buffer, and in a writer's thread that could free it under a kernel that reads it. There most bytes
come by the GPU's own copies instead (`download`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx

from .cuda import CudaError, gpu
from .download import download
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
    lazy: list[dict[str, list[mx.array]]] = []  # per record and tensor: what to put together
    shapes: list[dict[str, tuple[str, tuple[int, ...]]]] = []
    whole = _whole(found, layout, spans) if gpu() is not None else None
    for start, end in spans:
        if whole is None:
            rows = _rows(found, layout, start, end)
        else:
            part = slice(start - spans[0][0], end - spans[0][0])
            rows = {name: [array[:, part]] for name, array in whole.items()}
        groups = layout.groups.items()
        lazy.append({name: rows[name] for name, (_, _, dim) in groups if end > start and dim})
        shapes.append(
            {name: (dtype, (heads, end - start, dim)) for name, (dtype, heads, dim) in groups}
        )
    meta: dict[str, Meta] = {}
    if state:
        for leaf in found:
            if leaf.cuttable:
                continue
            meta[leaf.path] = leaf.meta | {"arrays": len(leaf.state)}
            for i, array in enumerate(leaf.state):
                name = state_name(leaf.path, i)
                lazy[-1][name] = [array]
                shapes[-1][name] = (DTYPE_NAMES[array.dtype], tuple(array.shape))
    if logits is not None:
        lazy[-1]["logits"] = [logits]
        shapes[-1]["logits"] = (DTYPE_NAMES[logits.dtype], tuple(logits.shape))
    return [
        Cut(
            {
                name: (dtype, dims, views.get(name, memoryview(b"")))
                for name, (dtype, dims) in shape.items()
            },
            meta if i == len(lazy) - 1 else {},
        )
        for i, (views, shape) in enumerate(zip(_bytes(lazy), shapes, strict=True))
    ]


def _rows(found: Sequence[Leaf], layout: Layout, start: int, end: int) -> dict[str, list[mx.array]]:
    """Rows of the span by row tensor, each layer's ``[heads, tokens, dim]``."""
    rows: dict[str, list[mx.array]] = {name: [] for name in layout.groups}
    for leaf, (_, _, _, placed) in zip(found, layout.parts, strict=True):
        for (_, array), (name, _, _) in zip(leaf.rows, placed, strict=True):
            rows[name].append(array[:, leaf.first + start : leaf.first + end])
    return rows


def _whole(
    found: Sequence[Leaf], layout: Layout, spans: Sequence[tuple[int, int]]
) -> dict[str, mx.array] | None:
    """The layers' rows put together once for spans that follow one another: fewer launches on a GPU."""
    if any(a[1] != b[0] for a, b in pairwise(spans)):
        return None
    rows = _rows(found, layout, spans[0][0], spans[-1][1])
    return {name: mx.concatenate(parts, axis=0) for name, parts in rows.items()}


def _bytes(records: Sequence[dict[str, list[mx.array]]]) -> list[dict[str, memoryview]]:
    """The parts' bytes, put together, by name: copied by a GPU where it can, by the host otherwise."""
    copied: Sequence[dict[str, memoryview] | None] = [None] * len(records)
    if (device := gpu()) is not None:
        with suppress(CudaError):
            joined = [{name: _joined(parts) for name, parts in r.items()} for r in records]
            copied = download(device, joined)
    left = {
        i: {name: _copy(parts) for name, parts in records[i].items()}
        for i, views in enumerate(copied)
        if views is None
    }
    mx.eval(left)
    return [
        {name: memoryview(a).cast("B") for name, a in left[i].items()} if views is None else views  # type: ignore[arg-type]
        for i, views in enumerate(copied)
    ]


def state_name(path: str, i: int) -> str:
    """Tensor name of the i-th state array of the leaf at ``path``."""
    return f"s{path}.{i}"


def _copy(parts: list[mx.array]) -> mx.array:
    """The parts one after another as bytes, in a buffer of their own.

    A slice, a view and the concatenation of a single array may share their source's buffer; holding
    such a view would keep the whole cache alive and turn each in-place update of it into a copy.
    """
    if len(parts) == 1:
        # An element-wise result keeps its operand's order of axes in memory.
        return mx.bitwise_or(mx.contiguous(_joined(parts)), mx.array(0, mx.uint8))
    return _joined(parts)


def _joined(parts: list[mx.array]) -> mx.array:
    """The parts one after another, uint8; it may share their buffer."""
    array = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
    return (array if array.ndim else array.reshape(1)).view(mx.uint8)
