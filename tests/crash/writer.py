"""The process that is killed: it stores blocks as fast or as slowly as it's told."""

from __future__ import annotations

import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

from tests.core.cache_support import ROOT, Shortens, age_all, blocks, open_store, snapshot
from thunder_patches.cache.disk import DiskStore
from thunder_patches.cache.file import write_all
from thunder_patches.cache.folder import Found
from thunder_patches.cache.record import Record, Ref

DIM = 400  # 19 KiB of keys and values a block


def records_of(seed: int) -> list[Record]:
    """What the writer of this seed stores, in order; prompts share their beginnings."""
    chooser = random.Random(seed)
    records = []
    for _ in range(12):
        prompt = [seed] * chooser.choice([0, 4, 8]) + [chooser.randrange(9) for _ in range(14)]
        records += blocks(ROOT, prompt, DIM)
        records.append(snapshot(ROOT, prompt, len(prompt), end=True, dim=DIM))
    return records


def run(folder: str, seed: int, budget: int, slow: bool, careless: bool, told: Connection) -> None:
    """Store records, re-encode some; `told` gets how many are surely on the disk, again and again."""
    if slow:
        write_slowly(random.Random(seed))
    if careless:
        write_in_place()
    store = open_store(Path(folder), disk_budget=budget, codec=Shortens())
    chooser, ages = random.Random(seed), random.Random(seed)
    told.send(0)
    for n, record in enumerate(records_of(seed), 1):
        store.put(record, time.time_ns())
        if chooser.random() < 0.4:
            assert store.flush(60)
            told.send(n)
            if ages.random() < 0.3 and not careless:
                age_all(store)
    store.flush(60)
    told.send(n)
    time.sleep(60)  # to be killed


def write_slowly(chooser: random.Random) -> None:
    """Have each write take several calls, with a pause between them."""
    writev = os.writev

    def slowly(fd: int, buffers: list[memoryview]) -> int:
        time.sleep(chooser.random() * 0.004)
        return writev(fd, [buffers[0][:4000]])

    os.writev = slowly  # type: ignore[assignment]


def write_in_place() -> None:
    """The control: a record is written under its own name from the first byte on."""

    def careless(
        self: DiskStore, ref: Ref, buffers: list[memoryview], size: int, stamp: int, orphan: bool
    ) -> None:
        path = Path(self._folder.path(ref))
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        write_all(fd, buffers)
        os.close(fd)
        self._index.add(Found(ref, size, stamp))

    DiskStore._write_file = careless  # type: ignore[method-assign]
