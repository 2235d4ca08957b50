"""Bring stored blocks into a GPU's memory: files are read while it fetches what was read before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ..cache.match import Piece
from ..cache.record import Buffer, Header, Record, TensorSpec
from ..cache.store import CacheStore, ReadJob, Source
from .cuda import LANDING, Gpu
from .kvtc_batches import BATCH, batches
from .layers import DTYPES, SAME_SIZE, Layout

_ALIGN = 64


@dataclass(frozen=True)
class Read:
    """What was read, by tensor name, and where each record came from: None, where it is missing.

    rows: ``[total heads, capacity, dim]``, zeros where nothing was stored. whole: the last record's
    other tensors. Both are empty when a record is missing.
    """

    rows: dict[str, mx.array]
    whole: dict[str, mx.array]
    sources: list[Source | None]


def upload(
    gpu: Gpu,
    store: CacheStore,
    layout: Layout,
    header: Header,
    jobs: Sequence[ReadJob],
    pieces: Sequence[Piece],
    capacity: int,
    held: Sequence[Record] | None = None,
) -> Read:
    """Read ``jobs``, which are those of ``pieces``.

    Args:
        header: of the last record.
        capacity: tokens to make room for in the rows.
        held: the records themselves, where pinned memory has them all.

    Raises:
        cuda.CudaError: when the driver refuses something.
    """
    rows = {
        name: mx.zeros((heads, capacity, dim), SAME_SIZE[DTYPES[dtype].size])
        for name, (dtype, heads, dim) in layout.groups.items()
    }
    mx.async_eval(rows)
    rest = [spec for spec in header.tensors if spec.name not in rows]
    specs = [_specs(layout, piece) for piece in pieces]
    specs[-1] = [*specs[-1], *rest]
    slot = max(sum(_room(spec) for spec in each) for each in specs)
    slots = min(len(jobs), max(1, LANDING // max(1, slot)))
    places = [_places(each, i % slots * slot) for i, each in enumerate(specs)]
    whole: dict[str, mx.array] = {}
    sources: list[Source | None] = []
    tick = time.time_ns()

    with gpu.lock:
        landing = gpu.landing(slots * slot)
        pinned = gpu.pinned(slots * slot) if held is None else memoryview(b"")
        filled = [_filled(*pair, pinned) for pair in zip(jobs, places, strict=True)]
        coming = (
            deque(store.begin(job, tick) for job in filled[:slots]) if held is None else deque()
        )
        done = 0
        try:
            for i, job in enumerate(filled):
                sources.append("ram" if held is not None else coming.popleft().result())
                if sources[i] is None:
                    break
                data = _by_name(held[i]) if held is not None else {}
                for name, (at, spec) in places[i].items():
                    if spec.nbytes and name not in (job.halves or {}):
                        gpu.fetch(landing, at, data.get(name, pinned[at : at + spec.nbytes]))
                if i + 1 - done < _group(slots) and i + 1 < len(jobs):
                    continue
                gpu.wait()
                for j in range(done, i + 1):
                    _place(landing.array, layout, rows, whole, pieces[j], filled[j], places[j])
                _multiply_out(layout, filled[done : i + 1], pieces[done : i + 1], rows)
                mx.eval(rows, whole)
                if held is None:  # into the places that are free now
                    coming += [
                        store.begin(job, tick) for job in filled[done + slots : i + 1 + slots]
                    ]
                done = i + 1
        finally:
            for future in coming:
                if not future.cancel():
                    future.result()
            gpu.wait()
    if held is None:
        store.finish(jobs[: len(sources)], sources, tick)
    if None in sources:
        return Read({}, {}, sources)
    return Read(
        {name: array.view(DTYPES[layout.groups[name][0]]) for name, array in rows.items()},
        {spec.name: _shaped(whole[spec.name], spec) for spec in rest},
        sources,
    )


def _room(spec: TensorSpec) -> int:
    """Bytes that a tensor takes there: its own, and what keeps the next one aligned."""
    return -(-spec.nbytes // _ALIGN) * _ALIGN


def _shaped(data: mx.array, spec: TensorSpec) -> mx.array:
    dtype = DTYPES[spec.dtype]
    return data.view(dtype).reshape(spec.shape) if data.size else mx.zeros(spec.shape, dtype)


Places = dict[str, tuple[int, TensorSpec]]
"""Where each tensor of a record is in the landing: its first byte."""


def _places(specs: Sequence[TensorSpec], at: int) -> Places:
    """Those of one record, whose first byte is the ``at``-th."""
    found: Places = {}
    for spec in specs:
        found[spec.name] = at, spec
        at += _room(spec)
    return found


def _filled(job: ReadJob, places: Places, pinned: memoryview) -> ReadJob:
    """Read into pinned memory, at the places that the tensors have in the landing."""
    targets = {name: [pinned[at : at + spec.nbytes]] for name, (at, spec) in places.items()}
    return replace(job, targets=targets, halves={})


def _group(slots: int) -> int:
    """Records that are put in place at once, while the next are read into the other slots."""
    return max(1, min(slots // 2, BATCH))


def _by_name(record: Record) -> dict[str, Buffer]:
    return {spec.name: d for spec, d in zip(record.header.tensors, record.data, strict=True)}


def _specs(layout: Layout, piece: Piece) -> list[TensorSpec]:
    count = len(piece.tokens) // 8
    return [
        TensorSpec(name, dtype, (heads, count, dim))
        for name, (dtype, heads, dim) in layout.groups.items()
    ]


def _place(
    landing: mx.array,
    layout: Layout,
    rows: dict[str, mx.array],
    whole: dict[str, mx.array],
    piece: Piece,
    job: ReadJob,
    places: Places,
) -> None:
    """Copy one record out of the landing, but for what is decoded by half; lazily."""
    for name, (at, spec) in places.items():
        if name in (job.halves or {}):
            continue
        found = landing[at : at + spec.nbytes]
        if name not in rows:
            whole[name] = mx.bitwise_or(
                found, mx.array(0, mx.uint8)
            )  # a copy, whatever MLX makes of a slice
        elif piece.use:
            kind = rows[name].dtype
            tensor = found.view(kind).reshape(spec.shape)
            rows[name][:, piece.start : piece.start + piece.use] = tensor[:, : piece.use]


def _multiply_out(
    layout: Layout, jobs: Sequence[ReadJob], pieces: Sequence[Piece], arrays: dict[str, mx.array]
) -> None:
    """Put in place what the reads decoded by half."""
    used = {id(job): piece for job, piece in zip(jobs, pieces, strict=True)}
    for batch in batches(layout, jobs):
        whole = arrays.pop(batch.name)
        for job, decoded in zip(batch.jobs, batch.rows, strict=True):
            piece = used[id(job)]
            whole[:, piece.start : piece.start + piece.use] = decoded[:, : piece.use].view(
                whole.dtype
            )
        mx.async_eval(whole)
        arrays[batch.name] = whole


def by_layer(
    layout: Layout, arrays: dict[str, mx.array]
) -> Iterator[tuple[tuple[str, int], mx.array]]:
    """Each layer's part of the rows: (path, position) and ``[1, heads, capacity, dim]``."""
    for path, _, _, placed in layout.parts:
        for i, (name, first, heads) in enumerate(placed):
            yield (path, i), arrays[name][first : first + heads][None]
