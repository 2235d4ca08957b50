"""Bring what is stored out of a GPU's memory, into pinned memory that it is restored from as fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from .cuda import DEPARTURE, Gpu


def download(
    gpu: Gpu, records: Sequence[Mapping[str, mx.array]]
) -> list[dict[str, memoryview] | None]:
    """Copy each record's arrays, uint8 and lazy or not, into memory of its own.

    Returns:
        per record its bytes by name; None for one that no pinned memory is free for.

    Raises:
        cuda.CudaError: when the driver refuses something.
    """
    found: list[dict[str, memoryview] | None] = []
    group: list[tuple[mx.array, memoryview]] = []
    with gpu.lock:
        for arrays in records:
            size = sum(array.nbytes for array in arrays.values())
            slab = gpu.slabs.take(size) if 0 < size <= DEPARTURE else None
            if slab is None:
                found.append(None)
                continue
            views, at = {}, 0
            for name, array in arrays.items():
                views[name] = slab[at : at + array.nbytes]
                at += array.nbytes
            found.append(views)
            if sum(view.nbytes for _, view in group) + size > DEPARTURE:
                gpu.bring(group)
                group = []
            group += [(arrays[name], view) for name, view in views.items()]
        if group:
            gpu.bring(group)
    return found
