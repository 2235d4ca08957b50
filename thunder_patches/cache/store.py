"""The cache that the hosts' adapters talk to: memory, the write queue and the folder as one store.

A record is looked for in memory, then among those on their way to the disk, then in the folder.
No method raises for what a disk, a file or another process does; `stats` says what is wrong.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from filelock import Timeout

from thunder_patches.cache.aging import Ager
from thunder_patches.cache.disk import Counts, DiskStore, NoRoom, ReadJob
from thunder_patches.cache.file import Codec, RawCodec, check_targets, copy_into
from thunder_patches.cache.losses import Lost
from thunder_patches.cache.ram import RamTier
from thunder_patches.cache.record import Header, Kind, Listed, Record, Ref
from thunder_patches.cache.writer import WriteQueue

__all__ = ["CacheStore", "Counts", "ReadJob", "Ref", "Source"]

Source = Literal["ram", "ssd"]
READERS = min(max(4, os.cpu_count() or 4), 8)
"""Threads that read. On a host of 16 cores 8 got 21 GB/s from the page cache where 4 got 18, 16 no more."""

P = ParamSpec("P")
T = TypeVar("T")


class _NoCounts:
    def add(self, name: str, n: int = 1) -> None: ...


class CacheStore:
    """One store for a process. All methods may be called from any thread; none waits for a writer.

    folder: where the files go, None for memory only. disk_budget, ram_budget: bytes; the folder's
    counts everything in it. codec: None stores tensors as they are. counters: gets
    `blocks_written`, `blocks_evicted`, `writes_dropped`, `corrupt`, `set_aside`, `read_errors`.
    writers: threads that write; queue_bytes: how much may wait for them. fsync: have each file on
    the disk before it gets its name (a file torn by a power cut is found out by its checksum).
    quiet: seconds since the last request ended, 0 while one runs; given it, old records are
    re-encoded in idle time (see `aging`), counted as `blocks_reencoded` and `bytes_saved`.
    kept: keys never to be evicted, asked before each time; the same set while nothing changed.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        disk_budget: int,
        ram_budget: int,
        prefetch: bool = True,
        codec: Codec | None = None,
        counters: Counts | None = None,
        writers: int = 2,
        queue_bytes: int = 1 << 30,
        fsync: bool = False,
        quiet: Callable[[], float] | None = None,
        kept: Callable[[], AbstractSet[bytes]] | None = None,
    ) -> None:
        self._counters = counters if counters is not None else _NoCounts()
        self._ram = RamTier(ram_budget)
        self._disk: DiskStore | None = None
        self._queue: WriteQueue | None = None
        self._ager: Ager | None = None
        if folder is not None:
            self._disk = DiskStore(
                folder, disk_budget, codec or RawCodec(), self._counters, fsync=fsync, kept=kept
            )
            self._queue = WriteQueue(
                self._disk.write,
                idle=self._disk.write_touches,
                gone=self._gone,
                threads=writers,
                max_bytes=queue_bytes,
            )
            self._disk.start(self._queue)
            if quiet is not None:
                self._ager = Ager(self._disk, quiet)
                self._ager.start()
        self._readers = ThreadPoolExecutor(READERS, "thunder-read")
        self._ahead = ThreadPoolExecutor(READERS, "thunder-ahead") if prefetch else None
        self._coming: dict[bytes, Future[None]] = {}
        self._closed = False

    def put(self, record: Record, stamp: int) -> None:
        """Keep the record, used at `stamp` (ns since the epoch: the request's time).

        It can be found at once. Its buffers must not change any more.
        """
        self._ram.put(record, stamp)
        if self._queue is not None:
            self._queue.put(record, stamp)

    # Looking up

    def match(self, keys: Sequence[bytes], root: bytes) -> int:
        """How many of a chain's blocks are there before the first that isn't."""
        parent = root
        for i, key in enumerate(keys):
            in_memory = key in self._ram or (self._queue is not None and key in self._queue)
            if not in_memory and not (self._disk and self._disk.has(Ref("block", key, parent))):
                return i
            parent = key
        return len(keys)

    def snapshots(self, parent: bytes) -> tuple[Ref, ...]:
        """The snapshots that hang off `parent` (a block's key or the root key)."""
        refs = self._in_memory(parent, "snapshot")
        if self._disk is not None:
            refs |= {ref.key: ref for ref in self._disk.snapshots(parent) if ref.key not in refs}
        return tuple(refs.values())

    def children(self, parent: bytes) -> tuple[bytes, ...]:
        """Keys of the blocks known to hang off `parent`, about the latest used first."""
        keys = self._in_memory(parent, "block")
        if self._disk is not None:
            keys |= {ref.key: ref for ref in self._disk.children(parent) if ref.key not in keys}
        return tuple(keys)

    def header(self, key: bytes, parent: bytes, kind: Kind = "block") -> Header | None:
        """The record's header; reads the first kilobytes of its file unless it's in memory."""
        record = self._ram.peek(key) or (self._queue.get(key) if self._queue else None)
        if record is not None:
            return record.header
        if self._disk is None:
            return None
        ref = self._disk.locate(kind, key, parent)
        return self._disk.header(ref) if ref is not None else None

    def size(self, key: bytes) -> int:
        """Bytes of the record's file; 0 where there is none."""
        return self._disk.size(key) if self._disk is not None else 0

    # Reading

    def read_many(self, jobs: Sequence[ReadJob]) -> list[Source | None]:
        """Read the records into their targets, several at once; where each came from.

        None: the record is gone, or was bad and is set aside; its targets then hold rubbish.
        """
        tick = time.time_ns()
        for job in jobs:
            self._take_over(job)
        running = [self._submit(self._readers, self._read, job, tick) for job in jobs[1:]]
        sources = [self._read(job, tick) for job in jobs[:1]]
        for job, future in zip(jobs[1:], running, strict=True):
            sources.append(future.result() if future is not None else self._read(job, tick))
        self.finish(jobs, sources, tick)
        return sources

    def begin(self, job: ReadJob, tick: int) -> Future[Source | None]:
        """Read one record into its targets, in the background; `finish` is to be told of it.

        tick: ns since the epoch, the same for all that one request reads.
        """
        self._take_over(job)
        future = self._submit(self._readers, self._read, job, tick)
        if future is None:
            future = Future()
            future.set_result(self._read(job, tick))
        return future

    def finish(self, jobs: Sequence[ReadJob], sources: Sequence[Source | None], tick: int) -> None:
        """Note what was read, and where it came from."""
        used = [job.key for job, source in zip(jobs, sources, strict=True) if source is not None]
        self.touch(used, tick)
        self._promote([j.key for j, s in zip(jobs, sources, strict=True) if s == "ssd"], tick)

    def _take_over(self, job: ReadJob) -> None:
        """Reading ahead is of no use to a record that is read now."""
        if (ahead := self._coming.pop(job.key, None)) is not None:
            ahead.cancel()

    def held(self, jobs: Sequence[ReadJob]) -> list[Record] | None:
        """The records themselves where memory has all of them as the jobs say; None otherwise."""
        tick = time.time_ns()
        found = []
        for job in jobs:
            record = self._ram.get(job.key, tick)
            if record is None and self._queue is not None:
                record = self._queue.get(job.key)
            if record is None or job.refuses(record.header) is not None:
                return None
            found.append(record)
        self.touch([job.key for job in jobs], tick)
        return found

    def _read(self, job: ReadJob, tick: int) -> Source | None:
        record = self._ram.get(job.key, tick) or (self._queue.get(job.key) if self._queue else None)
        if record is not None:
            return "ram" if self._copy(record, job) else None
        return "ssd" if self._disk is not None and self._disk.read(job) else None

    def _copy(self, record: Record, job: ReadJob) -> bool:
        if job.refuses(record.header) is not None:
            return False
        try:
            check_targets(record.header, job.targets)
            for spec, data in zip(record.header.tensors, record.data, strict=True):
                copy_into(data, job.targets.get(spec.name, ()))
        except (ValueError, TypeError):
            return False
        return True

    def _promote(self, keys: Sequence[bytes], tick: int) -> None:
        """Load into memory, afterwards, those records that were used before and fit there."""
        if self._disk is None:
            return
        wanted = [key for key in keys if self._ram.wants(key, self._disk.size(key), tick)]
        if wanted:
            self._submit(self._readers, self._load, wanted)

    def _load(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if self._closed or self._disk is None:
                return
            record = self._disk.load(key)
            if record is not None and not self._ram.hold(record):
                return

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Have the files of these records read ahead, in the background."""
        if self._ahead is None or self._disk is None:
            return
        for key, future in list(self._coming.items()):
            if future.done():
                self._coming.pop(key, None)
        for key in keys:
            if key not in self._ram and key not in self._coming and self._disk.size(key):
                ahead = self._submit(self._ahead, self._disk.read_ahead, key)
                if ahead is not None:
                    self._coming[key] = ahead

    def _submit(
        self, pool: ThreadPoolExecutor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T] | None:
        """None when the pool takes nothing: it's shut down, or no thread can be started."""
        with suppress(RuntimeError):
            return pool.submit(work, *args, **kwargs)
        return None

    # Keeping

    def touch(self, keys: Sequence[bytes], stamp: int) -> None:
        """Note a use of these records at `stamp` (ns); the writers persist it when they're idle.

        One that is in memory only, because it couldn't be written or was deleted, is written again.
        """
        if self._disk is None or self._queue is None:
            return
        self._disk.touch(keys, stamp)
        for key in keys:
            record = self._ram.peek(key)
            if record is not None and not self._disk.knows(record.header.ref):
                self._queue.put(record, stamp)
        self._queue.poke()

    def pin(self, keys: Sequence[bytes], owner: str) -> None:
        """Keep these records, and all that they hang off, until `owner` unpins them."""
        if self._disk is not None:
            self._disk.pin(keys, owner)

    def unpin(self, keys: Sequence[bytes], owner: str) -> None:
        if self._disk is not None:
            self._disk.unpin(keys, owner)

    def lost(self, key: bytes) -> Lost | None:
        """How and when this process's store lost the record, if it had it lately."""
        return self._disk.losses.get(key) if self._disk is not None else None

    def all_there(self, pieces: Sequence[tuple[Kind, bytes, bytes]]) -> bool:
        """Whether the files of these (kind, key, parent) are there, at a moment without evictions."""
        with suppress(OSError, Timeout):
            return self._disk is not None and self._disk.all_there(pieces)
        return False

    def reserve(self, size: int) -> bool:
        """Make room within the budget for a file in the folder that isn't a record; False: none."""
        with suppress(OSError, Timeout, NoRoom):
            if self._disk is not None:
                self._disk.reserve(size)
                return True
        return False

    def give_back(self, size: int) -> None:
        """A file that room was reserved for has gone."""
        with suppress(OSError, Timeout):
            if self._disk is not None:
                self._disk.give_back(size)

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until everything put in is on the disk; False after `timeout` seconds."""
        return self._queue is None or self._queue.flush(timeout)

    def ready(self, timeout: float = 10.0) -> bool:
        """Wait until the folder's files are known by their names; nothing else needs to wait."""
        return self._disk is None or self._disk.wait_scanned(timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Write what waits, for at most `timeout` seconds, and stop all threads."""
        self._closed = True
        if self._ager is not None:
            self._ager.close()
        if self._queue is not None:
            self._queue.close(timeout)
        for pool in (self._readers, self._ahead):
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
        if self._disk is not None:
            self._disk.close()

    def listed(self) -> list[Listed]:
        """All records in the folder and in memory, for looking at: no file is read."""
        in_ram = {listed.ref.key: listed for listed in self._ram.listed()}
        found = []
        for listed in self._disk.listed() if self._disk is not None else ():
            held = in_ram.pop(listed.ref.key, None)
            found.append(replace(listed, in_ram=True) if held is not None else listed)
        return [*found, *in_ram.values()]

    def stats(self) -> dict[str, Any]:
        """`ram` and `ssd` (bytes, budget_bytes, blocks), `queue`; what is wrong now (`problem`) and
        what went wrong last (`last_fault`), or None."""
        none = {"bytes": 0, "budget_bytes": 0, "blocks": 0, "scanned": True}
        problems = self._disk.problems if self._disk is not None else {}
        return {
            "ram": {
                "bytes": self._ram.bytes,
                "budget_bytes": self._ram.budget,
                "blocks": len(self._ram),
            },
            "ssd": self._disk.stats() if self._disk is not None else none,
            "queue": {
                "bytes": self._queue.bytes if self._queue is not None else 0,
                "blocks": len(self._queue) if self._queue is not None else 0,
            },
            "problem": "; ".join(f"{kind}: {text}" for kind, text in list(problems.items()))
            or None,
            "last_fault": self._disk.last_fault if self._disk is not None else None,
        }

    def _gone(self, record: Record, dropped: bool) -> None:
        if dropped:
            self._counters.add("writes_dropped")
        if self._disk is not None:
            if dropped:
                self._disk.losses.note(record.header.key, "dropped")
            self._disk.reconsider(record.header.parent)

    def _in_memory(self, parent: bytes, kind: Kind) -> dict[bytes, Ref]:
        refs = self._ram.after(parent)
        if self._queue is not None:
            refs += self._queue.after(parent)
        return {ref.key: ref for ref in reversed(refs) if ref.kind == kind}
