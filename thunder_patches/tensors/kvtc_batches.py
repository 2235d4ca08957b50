"""Which records' row tensors go through KVTC's matrix products together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import mlx.core as mx

from ..cache.store import ReadJob
from ..codec.kvtc import Numbers
from .kvtc_decode import decode
from .layers import DTYPES, Layout

BATCH = 8
"""Blocks that go through one product: enough for the device, and their float32 rows are few."""


class Batch(NamedTuple):
    """Some records of one calibration, and a row tensor of each, lazy: ``[heads, tokens, dim]``."""

    name: str
    jobs: Sequence[ReadJob]
    rows: Sequence[mx.array]


def batches(layout: Layout, jobs: Sequence[ReadJob]) -> Iterator[Batch]:
    """All that the reads of ``jobs`` decoded by half (`ReadJob.halves`)."""
    for name, (dtype, _, _) in layout.groups.items():
        numbers = [
            (job, half) for job in jobs if isinstance(half := (job.halves or {}).get(name), Numbers)
        ]
        for _, run in groupby(numbers, key=lambda pair: pair[1].calibration.id):
            same = list(run)
            for i in range(0, len(same), BATCH):
                some = same[i : i + BATCH]
                rows = decode(name, [half for _, half in some], DTYPES[dtype])
                yield Batch(name, [job for job, _ in some], rows)
