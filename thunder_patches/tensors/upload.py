"""Read stored blocks into a GPU's memory: the next ones are read while it fetches the last ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

import mlx.core as mx

from ..cache.match import Piece
from ..cache.record import Header, TensorSpec
from ..cache.store import CacheStore, ReadJob, Source
from .cuda import LANDING, Gpu
from .kvtc_batches import batches
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
) -> Read:
    """Read ``jobs``, which are those of ``pieces``.

    Args:
        header: of the last record.
        capacity: tokens to make room for in the rows.

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
    sizes = [sum(_room(spec) for spec in each) for each in specs]
    waves = _waves(sizes, LANDING // 2)
    half = max(sum(sizes[i] for i in wave) for wave in waves)

    whole: dict[str, mx.array] = {}
    filled: list[ReadJob] = []
    sources: list[Source | None] = []
    placed: list[tuple[Piece, ReadJob, dict[str, tuple[int, TensorSpec]]]] = []

    def land() -> None:
        """Take what the GPU has fetched to where it belongs."""
        gpu.wait()
        for piece, job, places in placed:
            _place(landing.array, layout, rows, whole, piece, job, places)
        mx.eval(rows, whole)
        placed.clear()

    with gpu.lock:
        landing = gpu.landing(2 * half)
        try:
            for turn, wave in enumerate(waves):
                begin = at = turn % 2 * half
                some, coming = [], []
                for i in wave:
                    places = {}
                    for spec in specs[i]:
                        places[spec.name] = at, spec
                        at += _room(spec)
                    views = {n: landing.pinned[a : a + s.nbytes] for n, (a, s) in places.items()}
                    targets = {name: [view] for name, view in views.items()}
                    some.append(replace(jobs[i], targets=targets, halves={}))
                    coming.append((pieces[i], some[-1], places))
                sources += store.read_many(some)
                land()  # the wave before: the GPU fetched it meanwhile
                if None in sources:
                    return Read({}, {}, sources)
                gpu.fetch(landing, begin, at - begin)
                placed += coming
                filled += some
            land()
        finally:
            gpu.wait()
    _multiply_out(layout, filled, pieces, rows)
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


def _waves(sizes: Sequence[int], room: int) -> list[range]:
    """Runs of records, about as many in each, that fit into ``room`` bytes unless one alone doesn't."""
    fit = max(1, room // max(*sizes, 1))
    waves = ceil(len(sizes) / fit)
    bounds = [len(sizes) * i // waves for i in range(waves + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


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
    places: dict[str, tuple[int, TensorSpec]],
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
