"""Put stored blocks back into a prompt cache: bytes straight from the store into the final buffers.

One preallocated array per row tensor of a layer, with room for the rest of the prompt and the answer;
one ``mx.eval`` for the whole restore. Where an evaluated array can be written through its buffer
(unified memory, CPU) the store reads into it; elsewhere into host memory, copied over once. What KVTC
stored is multiplied out on the device, in batches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Literal

import mlx.core as mx
import numpy as np

from ..cache.file import copy_into
from ..cache.match import Piece
from ..cache.record import Buffer, Header, Record
from ..cache.store import CacheStore, ReadJob
from .cuda import CudaError, gpu
from .cut import state_name
from .kvtc_batches import Batch, batches
from .layers import DTYPES, SAME_SIZE, CacheObject, Layout, Meta, fill
from .upload import by_layer, upload


class RestoreFailed(Exception):
    """A record that the plan counted on could not be read; the store has set it aside."""


@dataclass(frozen=True)
class Restored:
    """A filled prompt cache, the last token's logits if they were stored, and who had the bytes."""

    caches: list[CacheObject]
    logits: mx.array | None
    sources: Sequence[str]


def restore(
    store: CacheStore,
    pieces: Sequence[Piece],
    fresh: Sequence[CacheObject],
    *,
    length: int,
    capacity: int,
    logits: bool = False,
) -> Restored:
    """Fill a fresh prompt cache with the first ``length`` tokens of a stored prefix.

    Args:
        pieces: what to read, in order (`cache.match.Plan.pieces`); at least one.
        fresh: the host's new, empty prompt cache for this model.
        length: tokens that the cache stands for afterwards; at most what the pieces hold.
        capacity: tokens to make room for, at least ``length``.
        logits: also read the snapshot's last-token logits.

    Raises:
        RestoreFailed: when a record is missing or bad.
        layers.UnsupportedCache, ValueError: when a record does not fit this model's cache.
    """
    last = pieces[-1]
    if last.start + last.use < length:
        raise RestoreFailed(
            f"{length} tokens asked for, {last.start + last.use} are in the records"
        )
    header = store.header(last.key, last.parent, last.kind)
    if header is None:
        raise RestoreFailed("the last record has gone")
    text, metas = split_layout(header.layout)
    layout = Layout.loads(text)

    jobs = [
        ReadJob(p.key, p.kind, p.parent, p.tokens, header.layout if p is last else text, {})
        for p in pieces
    ]
    held = store.held(jobs)
    brought: Brought | None = None
    if (device := gpu()) is not None:
        # What lies in other memory, threads copy to pinned memory, as they read files.
        pinned = held if held and device.slabs.hold_all(held) else None
        with suppress(CudaError):  # no room for pinned memory, say
            read = upload(device, store, layout, header, jobs, pieces, capacity, pinned)
            sources = _all_read(read.sources)
            brought = dict(by_layer(layout, read.rows)), read.whole, sources
    if brought is None and held is not None:
        brought = *_assemble(layout, held, pieces, length, capacity), ["ram"] * len(held)
    rows, whole, found = brought or _read(store, layout, header, jobs, pieces, capacity)
    states = {
        path: ([whole[state_name(path, i)] for i in range(meta["arrays"])], meta)
        for path, meta in metas.items()
    }
    caches = fill(fresh, layout, rows, states, length)
    return Restored(caches, whole["logits"] if logits else None, found)


Rows = dict[tuple[str, int], mx.array]
"""(path of a leaf, position among its rows) to array ``[1, heads, capacity, dim]``."""
Brought = tuple[Rows, dict[str, mx.array], list[Literal["ram", "ssd"]]]
"""Rows, the last record's other tensors by name, and who had each record."""


def _assemble(
    layout: Layout, records: Sequence[Record], pieces: Sequence[Piece], length: int, capacity: int
) -> tuple[Rows, dict[str, mx.array]]:
    """Put together on the device what memory holds: no byte goes through the host."""
    tensors = [
        {
            spec.name: array_of(data, spec.dtype, spec.shape)
            for spec, data in zip(record.header.tensors, record.data, strict=True)
        }
        for record in records
    ]

    def joined(name: str, first: int, heads: int) -> mx.array:
        dtype, _, dim = layout.groups[name]
        parts = [
            held[name][first : first + heads, : min(piece.use, length - piece.start)]
            for held, piece in zip(tensors, pieces, strict=True)
        ]
        before, after = (
            mx.zeros((heads, size, dim), DTYPES[dtype])
            for size in (pieces[0].start, capacity - length)
        )
        return mx.concatenate([before, *parts, after], axis=1)

    rows = {
        (path, i): joined(*place)[None]
        for path, _, _, placed in layout.parts
        for i, place in enumerate(placed)
    }
    mx.eval(list(rows.values()))
    whole = {name: array for name, array in tensors[-1].items() if name not in layout.groups}
    return rows, whole


def array_of(data: Buffer, dtype: str, shape: Sequence[int]) -> mx.array:
    """The array of a record's tensor: the very one it was cut as, or made from its bytes."""
    owner: object = data.obj if isinstance(data, memoryview) else None
    array = owner if isinstance(owner, mx.array) else mx.array(np.frombuffer(data, np.uint8))
    flat = array.reshape(-1)
    return (flat.view(DTYPES[dtype]) if flat.size else flat.astype(DTYPES[dtype])).reshape(shape)


def _read(
    store: CacheStore,
    layout: Layout,
    header: Header,
    jobs: Sequence[ReadJob],
    pieces: Sequence[Piece],
    capacity: int,
) -> Brought:
    """Read from the store into preallocated buffers.

    Raises:
        RestoreFailed: when a record is missing or bad.
    """
    buffers = Buffers()
    rows = {
        (path, i): buffers.add((1, heads, capacity, layout.groups[name][2]), layout.groups[name][0])
        for path, _, _, placed in layout.parts
        for i, (name, _, heads) in enumerate(placed)
    }
    whole = {
        spec.name: buffers.add(spec.shape, spec.dtype)
        for spec in header.tensors
        if spec.name not in layout.groups
    }
    buffers.allocate()
    filled = []
    for job, piece in zip(jobs, pieces, strict=True):
        targets = _row_targets(layout, rows, buffers, piece, capacity)
        if piece is pieces[-1]:
            targets |= {name: [buffers.view(index)] for name, index in whole.items()}
        filled.append(replace(job, targets=targets, halves={}))
    found = _all_read(store.read_many(filled))
    multiply_out(layout, filled)
    arrays = buffers.arrays()
    return (
        {at: arrays[i] for at, i in rows.items()},
        {name: arrays[i] for name, i in whole.items()},
        found,
    )


def _all_read(found: Sequence[Literal["ram", "ssd"] | None]) -> list[Literal["ram", "ssd"]]:
    there = [origin for origin in found if origin is not None]
    if len(there) < len(found):
        raise RestoreFailed(f"{len(found) - len(there)} of {len(found)} records could not be read")
    return there


def _row_targets(
    layout: Layout, rows: dict[tuple[str, int], int], buffers: Buffers, piece: Piece, capacity: int
) -> dict[str, list[memoryview | int]]:
    """Where each row tensor of a record goes: one segment per head; rows past ``use`` are skipped."""
    count = len(piece.tokens) // 8
    targets: dict[str, list[memoryview | int]] = {name: [] for name in layout.groups}
    for path, _, _, placed in layout.parts:
        for i, (name, _, heads) in enumerate(placed):
            dtype, _, dim = layout.groups[name]
            width = dim * DTYPES[dtype].size
            view, into = buffers.view(rows[path, i]), targets[name]
            for head in range(heads):
                at = (head * capacity + piece.start) * width
                into.append(view[at : at + piece.use * width])
                if piece.use < count:
                    into.append((count - piece.use) * width)
    return targets


def multiply_out(layout: Layout, jobs: Sequence[ReadJob]) -> None:
    """Finish what the reads decoded by half, into the jobs' targets.

    While one batch is copied, the device works on the next.
    """
    before: tuple[Batch, list[mx.array]] | None = None
    for batch in batches(layout, jobs):
        rows = [mx.contiguous(array).view(mx.uint8) for array in batch.rows]
        mx.async_eval(rows)
        if before is not None:
            _deliver(*before)
        before = batch, rows
    if before is not None:
        _deliver(*before)


def _deliver(batch: Batch, rows: Sequence[mx.array]) -> None:
    for job, data in zip(batch.jobs, rows, strict=True):
        copy_into(memoryview(data).cast("B"), job.targets[batch.name])  # type: ignore[arg-type]


def join_layout(layout: str, metas: dict[str, Meta]) -> str:
    """The layout text of a snapshot: the blocks' layout, and the meta of its state by path."""
    return json.dumps({"layout": layout, "state": metas}, sort_keys=True, separators=(",", ":"))


def split_layout(text: str) -> tuple[str, dict[str, Meta]]:
    """Inverse of `join_layout`; a block's layout comes back with no state."""
    value = json.loads(text)
    if "layout" in value:
        return value["layout"], value["state"]
    return text, {}


class Buffers:
    """Arrays that are filled from outside MLX, allocated with a single evaluation."""

    def __init__(self) -> None:
        self._wanted: list[tuple[tuple[int, ...], str]] = []
        self._arrays: list[mx.array] = []
        self._host: list[np.ndarray] = []
        self._views: list[memoryview] = []

    def add(self, shape: tuple[int, ...], dtype: str) -> int:
        """Ask for an array ``shape`` of safetensors type ``dtype``; returns its index."""
        self._wanted.append((tuple(shape), dtype))
        return len(self._wanted) - 1

    def allocate(self) -> None:
        if writes_through():
            self._arrays = [mx.zeros(s, SAME_SIZE[DTYPES[d].size]) for s, d in self._wanted]
            mx.eval(self._arrays)
            self._host = [np.asarray(array) for array in self._arrays]
        else:
            self._host = [
                np.empty(prod(s) * DTYPES[d].size, np.uint8).view(f"u{DTYPES[d].size}").reshape(s)
                for s, d in self._wanted
            ]
        self._views = [memoryview(h.reshape(-1).view(np.uint8).data) for h in self._host]

    def view(self, index: int) -> memoryview:
        """The bytes of one array, writable, C order."""
        return self._views[index]

    def arrays(self) -> list[mx.array]:
        """The arrays in the order asked for, in their own dtypes."""
        arrays = self._arrays or [mx.array(host) for host in self._host]
        return [array.view(DTYPES[d]) for array, (_, d) in zip(arrays, self._wanted, strict=True)]


@cache
def writes_through() -> bool:
    """Whether bytes are best written to an evaluated array's buffer on this device.

    On CUDA that works too, but the pages then move between host and device twice: reading into host memory
    was twice as fast there (tests/bench/results/h200.json).
    """
    if (cuda := getattr(mx, "cuda", None)) is not None and cuda.is_available():
        return False
    try:
        array = mx.zeros((64,), mx.uint16)
        mx.eval(array)
        np.asarray(array)[:] = 7
        return bool((np.asarray(array) == 7).all())  # a copy would still hold zeros
    except Exception:
        return False
