"""The store that the hosts' adapters talk to. (First version: memory only; files follow.)"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from thunder_patches.cache.match import SnapshotRef
from thunder_patches.cache.record import Header, Kind, Record, flat

Source = Literal["ram", "ssd"]
# Where a tensor's bytes go: writable views whose concatenation is the tensor; an int skips so many
# bytes (checked, then thrown away).
Segments = Sequence[memoryview | int]


class Counts(Protocol):
    def add(self, name: str, n: int = 1) -> None: ...


@dataclass(frozen=True, slots=True)
class ReadJob:
    """One record to read: what must be true of it, and where its tensors go.

    A tensor that isn't in `targets` is read and checked, then thrown away.
    """

    key: bytes
    kind: Kind
    parent: bytes
    tokens: bytes
    layout: str
    targets: Mapping[str, Segments]


class CacheStore:
    def __init__(
        self,
        folder: Path | None,
        *,
        disk_budget: int,
        ram_budget: int,
        prefetch: bool = True,
        codec: Any = None,
        counters: Counts | None = None,
        writers: int = 2,
        queue_bytes: int = 1 << 30,
    ) -> None:
        self._lock = threading.Lock()
        self._records: dict[bytes, Record] = {}

    def put(self, record: Record, stamp: int) -> None:
        with self._lock:
            self._records[record.header.key] = record

    def match(self, keys: Sequence[bytes], root: bytes) -> int:
        for i, key in enumerate(keys):
            if key not in self._records:
                return i
        return len(keys)

    def snapshots(self, parent: bytes) -> tuple[SnapshotRef, ...]:
        with self._lock:
            heads = [r.header for r in self._records.values()]
        return tuple(
            SnapshotRef(h.key, h.parent, h.n_tokens, h.end)
            for h in heads
            if h.kind == "snapshot" and h.parent == parent
        )

    def children(self, parent: bytes) -> tuple[bytes, ...]:
        with self._lock:
            heads = [r.header for r in self._records.values()]
        return tuple(h.key for h in heads if h.kind == "block" and h.parent == parent)

    def header(self, key: bytes, parent: bytes, kind: Kind = "block") -> Header | None:
        record = self._records.get(key)
        return record.header if record else None

    def read_many(self, jobs: Sequence[ReadJob]) -> list[Source | None]:
        return [self._read(job) for job in jobs]

    def _read(self, job: ReadJob) -> Source | None:
        record = self._records.get(job.key)
        if record is None:
            return None
        head = record.header
        if (head.kind, head.parent, head.tokens, head.layout) != (
            job.kind,
            job.parent,
            job.tokens,
            job.layout,
        ):
            return None
        for spec, data in zip(head.tensors, record.data, strict=True):
            source = flat(data)
            at = 0
            for segment in job.targets.get(spec.name, ()):
                if isinstance(segment, int):
                    at += segment
                    continue
                part = flat(segment)
                part[:] = source[at : at + part.nbytes]
                at += part.nbytes
        return "ram"

    def prefetch(self, keys: Sequence[bytes]) -> None: ...
    def touch(self, keys: Sequence[bytes], stamp: int) -> None: ...
    def pin(self, keys: Sequence[bytes], owner: str) -> None: ...
    def unpin(self, keys: Sequence[bytes], owner: str) -> None: ...

    def flush(self, timeout: float = 5.0) -> bool:
        return True

    def close(self) -> None: ...

    def stats(self) -> dict[str, Any]:
        size = sum(r.nbytes for r in self._records.values())
        ram = {"bytes": size, "budget_bytes": 0, "blocks": len(self._records)}
        return {"ram": ram, "ssd": {"bytes": 0, "budget_bytes": 0, "blocks": 0}, "problem": None}
