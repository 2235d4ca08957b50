"""Records in a folder: found by name, written within a budget, checked when read.

Nothing here raises for what a disk or another process can do: a request goes on without the record,
and `problems` says what is wrong.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from filelock import Timeout

from thunder_patches.cache.file import (
    BadFile,
    Codec,
    Head,
    Segments,
    Unwanted,
    compose,
    read_head,
    read_into,
    read_record,
    write_all,
)
from thunder_patches.cache.folder import Folder, Found, Outside, Usage
from thunder_patches.cache.index import Entry, Index
from thunder_patches.cache.losses import Losses
from thunder_patches.cache.record import Header, Kind, Listed, Record, Ref

# The process is short of something for the moment; the file is as good as before.
_TRANSIENT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_HEADERS_KEPT = 256
_RESCAN_SECONDS = 2.0
_MAX_PAUSE_SECONDS = 30.0
_SCRATCH_BYTES = 1 << 20
PRESSURE = 0.8  # share of the budget from which records are re-encoded whatever their age

T = TypeVar("T")


class Counts(Protocol):
    """Where to count; see DESIGN for the names."""

    def add(self, name: str, n: int = 1) -> None: ...


@dataclass(frozen=True, slots=True)
class ReadJob:
    """One record to read: what must be true of it, and where its tensors go.

    `targets`, by tensor name: writable C-contiguous views whose concatenation is the tensor; an int
    skips that many bytes. Bytes without a target are read and checked all the same.
    `halves`, if given, takes what is left to decode for the caller, by tensor name: see `read_into`.
    """

    key: bytes
    kind: Kind
    parent: bytes
    tokens: bytes
    layout: str
    targets: Mapping[str, Segments]
    halves: dict[str, object] | None = None

    def refuses(self, header: Header) -> str | None:
        """What is wrong with a record of this key, if anything."""
        if (header.key, header.kind, header.parent) != (self.key, self.kind, self.parent):
            return f"holds {header.kind} {header.key.hex()} after {header.parent.hex()}"
        if header.tokens != self.tokens:
            return "holds other tokens"
        if header.layout != self.layout:
            return "has another layout"
        return None


class Coming(Protocol):
    """Records on their way to the disk."""

    def awaits(self, parent: bytes) -> bool:
        """Whether one of them hangs off `parent`."""

    def wait_written(self, key: bytes) -> None:
        """Wait while another thread is writing the record `key`."""


class NoRoom(Exception):
    """The budget has no room for the record, whatever is deleted."""


class DiskStore:
    """The records of one folder, whose files together never exceed `budget` bytes.

    `start` opens and scans it on a thread of its own; until that is through, a lookup asks the file
    system. All methods may be called from any thread; `write` and `write_touches` may
    take long, the others only as long as the files they name.
    """

    def __init__(
        self,
        root: Path,
        budget: int,
        codec: Codec,
        counters: Counts,
        *,
        fsync: bool = False,
        kept: Callable[[], AbstractSet[bytes]] | None = None,
    ) -> None:
        self.budget = budget
        # What is wrong now, by what it keeps from working, and what went wrong last.
        self.problems: dict[str, str] = {}
        self.last_fault: str | None = None
        self.losses = Losses()
        self._full_at = 0
        self._codec = codec
        self._counters = counters
        self._fsync = fsync
        self._kept = kept
        self._folder = Folder(root)
        self._index = Index()
        # Names not to look at again: what is there is bad, and can't be moved or deleted.
        self._refused: set[bytes] = set()
        self._headers: OrderedDict[bytes, Header] = OrderedDict()
        self._touched: dict[bytes, int] = {}
        self._lock = threading.Lock()
        # The shared usage as this process last saw it; whether the folder changed since this
        # process last scanned it, other than by its own doing; and when that scan was.
        self._usage_seen = Usage(0, 0)
        self._stale = False
        self._scanned_at = 0.0
        self._failures = 0
        self._paused_until = 0.0
        self._is_open = False
        self._ready = threading.Event()
        self._coming: Coming

    def start(self, coming: Coming) -> None:
        """Open and scan the folder; `coming` are the records on their way to `write`."""
        self._coming = coming
        threading.Thread(target=self._begin, name="thunder-scan", daemon=True).start()

    # Looking up

    def has(self, ref: Ref) -> bool:
        """Whether the record's file is there: by the index, else by one look at the folder."""
        if self.knows(ref):
            return True
        if ref.key in self._refused:
            return False
        try:
            found = self._folder.find(ref)
        except OSError as error:
            self._note("read", error)
            return False
        if found is None:
            return False
        self._index.add(found)
        return True

    def knows(self, ref: Ref) -> bool:
        """Whether the index has the record; never touches the disk."""
        entry = self._index.get(ref.key)
        return entry is not None and entry.ref.covers(ref)

    def locate(self, kind: Kind, key: bytes, parent: bytes) -> Ref | None:
        """The record's name, when it's there."""
        entry = self._index.get(key)
        if entry is not None and (entry.ref.kind, entry.ref.parent) == (kind, parent):
            return entry.ref
        if kind == "block":
            ref = Ref("block", key, parent)
            return ref if self.has(ref) else None
        return next((ref for ref in self.snapshots(parent) if ref.key == key), None)

    def snapshots(self, parent: bytes) -> list[Ref]:
        """The snapshots after `parent`, the most recently used first."""
        try:
            listed = self._folder.snapshots(parent)
        except OSError as error:
            self._note("read", error)
            return []
        present = {ref.key for ref in listed if self.has(ref)}
        entries = self._index.children(parent, "snapshot")
        for entry in entries:
            if entry.ref.key not in present:
                self._forget(entry.ref.key)
        entries.sort(key=lambda entry: entry.stamp, reverse=True)
        return [entry.ref for entry in entries if entry.ref.key in present]

    def children(self, parent: bytes) -> list[Ref]:
        """The blocks after `parent` that the index knows, the most recently used first."""
        entries = self._index.children(parent, "block")
        entries.sort(key=lambda entry: entry.stamp, reverse=True)
        return [entry.ref for entry in entries]

    def size(self, key: bytes) -> int:
        entry = self._index.get(key)
        return entry.size if entry is not None else 0

    # Reading

    def header(self, ref: Ref) -> Header | None:
        """The record's header, without its payload."""
        with self._lock:
            known = self._headers.get(ref.key)
        if known is not None:
            return known
        header = self._with_file(ref, lambda fd, head: head.header)
        if header is not None:
            with self._lock:
                self._headers[ref.key] = header
                while len(self._headers) > _HEADERS_KEPT:
                    self._headers.popitem(last=False)
        return header

    def read(self, job: ReadJob) -> bool:
        """Read the record into the job's targets; False when it's missing or bad."""

        def work(fd: int, head: Head) -> bool:
            if (reason := job.refuses(head.header)) is not None:
                raise BadFile(reason)
            read_into(fd, head, job.targets, self._codec, job.halves)
            return True

        ref = self.locate(job.kind, job.key, job.parent)
        return ref is not None and self._with_file(ref, work) is not None

    def load(self, key: bytes) -> Record | None:
        """The whole record, in buffers of its own; None also for one that isn't exact.

        Decoded, that would take many times the memory of its file, and long on the host.
        """
        entry = self._index.get(key)
        if entry is None:
            return None
        return self._with_file(
            entry.ref,
            lambda fd, head: None if head.lossy else read_record(fd, head, self._codec),
        )

    def read_ahead(self, key: bytes) -> None:
        """Have the system read the record's file into its page cache."""
        entry = self._index.get(key)
        if entry is None:
            return
        with suppress(OSError, BadFile):
            fd = self._folder.open_record(entry.ref)
            try:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
                else:
                    scratch = bytearray(_SCRATCH_BYTES)
                    while os.readv(fd, [scratch]):
                        pass
            finally:
                os.close(fd)

    def _with_file(self, ref: Ref, work: Callable[[int, Head], T]) -> T | None:
        """What `work` makes of the record's open file and checked header; None when it's no good.

        A file that isn't what it should be is set aside, so that it's never read twice.
        """
        try:
            fd = self._folder.open_record(ref)
            try:
                head = read_head(fd)
                if head.header.ref != ref:
                    raise BadFile(f"holds {head.header.ref}")
                result = work(fd, head)
                self.problems.pop("read", None)
                return result
            finally:
                os.close(fd)
        except FileNotFoundError:
            self._forget(ref.key)
        except BadFile as error:
            self._counters.add("corrupt")
            self._set_aside(ref, error)
        except Unwanted as error:
            self._set_aside(ref, error)
        except Outside as error:
            self._forget(ref.key)
            self._note("read", error)
        except OSError as error:
            self._counters.add("read_errors")
            self._note("read", error)
            if error.errno not in _TRANSIENT:
                self._set_aside(ref, error)
        except Exception as error:
            self._counters.add("read_errors")
            self._note("read", error)
        return None

    def _set_aside(self, ref: Ref, reason: Exception) -> None:
        self._forget(ref.key)
        # The first of two readers of one bad file moves it; the other has nothing left to do.
        with self._lock:
            if ref.key in self._refused:
                return
            try:
                moved = self._folder.set_aside(ref)
            except FileNotFoundError:
                return
            except OSError:
                moved = False
            if not moved:
                self._refused.add(ref.key)
        self._stale = True
        self.losses.note(ref.key, "damaged")
        if moved:
            self._counters.add("set_aside")
        self.last_fault = f"set aside {ref.kind} {ref.key.hex()}: {_text(reason)}"

    def _forget(self, key: bytes) -> None:
        self._index.remove(key)
        with self._lock:
            self._headers.pop(key, None)

    # Writing

    def write(self, record: Record, stamp: int) -> bool:
        """Write the record unless it's there; False, counted, when that can't be done."""
        self._ready.wait()
        ref = record.header.ref
        if self._is_there(ref):
            self.touch([ref.key], stamp)
            return True
        written = False
        if time.monotonic() >= self._paused_until:
            try:
                written = self._write(ref, record, stamp)
            except Exception as error:
                self._failed(error)
        if written:
            self._failures = 0
            self.problems.pop("write", None)
            self._counters.add("blocks_written")
        else:
            self.losses.note(ref.key, "dropped")
            self._counters.add("writes_dropped")
        return written

    def reconsider(self, parent: bytes) -> None:
        """A record that hangs off `parent` is no longer on its way, written or not."""
        self._index.offer(parent)

    def _is_there(self, ref: Ref) -> bool:
        """Whether a file is as good as the record, by the folder itself: the index may be old."""
        known = self._index.get(ref.key)
        if known is not None and known.ref.covers(ref):
            ref = known.ref
        with suppress(OSError):
            if ref.key not in self._refused and (found := self._folder.find(ref)):
                self._index.add(found)
                return True
        if known is not None and known.ref == ref:
            self._forget(ref.key)
        return False

    def _write(self, ref: Ref, record: Record, stamp: int) -> bool:
        buffers = compose(record, self._codec.encode(record))
        size = sum(buffer.nbytes for buffer in buffers)
        if size > self.budget:
            raise ValueError(f"a record of {size} bytes exceeds the budget of {self.budget}")
        if not self._is_open:
            self._open()
        orphan = False
        if self._usage_seen.bytes + size > self.budget and record.header.start:
            # Something will have to go for this record: not without its parent being there.
            self._coming.wait_written(ref.parent)
            orphan = self._index.get(ref.parent) is None
        try:
            self._write_file(ref, buffers, size, stamp, orphan)
            if self._usage_seen.bytes > self._full_at:
                self.problems.pop("full", None)
        except OSError as error:
            # Each of these has one remedy, tried once.
            if error.errno in _FULL:
                self._full_at = self._usage_seen.bytes
                self.problems["full"] = (
                    f"no space left on the disk with {self._full_at} bytes of {self.budget} allowed"
                )
                self._free(size)
            elif isinstance(error, FileNotFoundError):
                self._open()
            elif isinstance(error, IsADirectoryError):
                self._folder.set_aside(ref)
            else:
                raise
            self._write_file(ref, buffers, size, stamp, orphan)
        return True

    def _write_file(
        self, ref: Ref, buffers: list[memoryview], size: int, stamp: int, orphan: bool
    ) -> None:
        temporary = self._write_temporary(buffers, size, stamp, orphan, self._fsync)
        try:
            self._folder.publish(temporary, ref)
        except BaseException:
            self._give_back(temporary, size)
            raise
        self._refused.discard(ref.key)
        before = self._index.get(ref.key)
        self._index.add(Found(ref, size, stamp))
        if before is not None and before.ref != ref:
            with self._folder.exclusive():
                used = self._usage().bytes
                self._save(used - before.size if self._remove(before) else used)

    def _write_temporary(
        self, buffers: list[memoryview], size: int, stamp: int, orphan: bool, fsync: bool
    ) -> str:
        """Write a file that has no record's name yet, its bytes reserved; its path."""
        with self._folder.exclusive():
            self._reserve(size, orphan)
            try:
                fd, temporary = self._folder.create_temporary(size)
            except OSError:
                self._save(self._usage_seen.bytes - size)
                raise
        try:
            try:
                write_all(fd, buffers)
                if fsync:
                    os.fsync(fd)
                with suppress(OSError):  # else it counts as used now
                    os.utime(fd, ns=(stamp, stamp))
            finally:
                os.close(fd)
        except BaseException:
            self._give_back(temporary, size)
            raise
        return temporary

    def _give_back(self, temporary: str, size: int) -> None:
        with suppress(OSError):
            os.unlink(temporary)
        with suppress(OSError, Timeout), self._folder.exclusive():
            self._save(self._usage().bytes - size)

    def _failed(self, error: Exception) -> None:
        """Say why, and let a disk that fails alone for a while: longer each time."""
        self._note("write", error)
        if isinstance(error, OSError):
            self._failures += 1
            pause = min(0.25 * 2**self._failures, _MAX_PAUSE_SECONDS)
            self._paused_until = time.monotonic() + pause

    def touch(self, keys: Iterable[bytes], stamp: int) -> None:
        """Note a use at `stamp` (ns); `write_touches` persists it."""
        with self._lock:
            for key in keys:
                if self._index.get(key) is not None:
                    self._index.touch(key, stamp)
                    self._touched[key] = max(stamp, self._touched.get(key, stamp))

    def write_touches(self) -> None:
        """Give the files used since the last call their stamps, as the time of modification."""
        with self._lock:
            touched, self._touched = self._touched, {}
        for key, stamp in touched.items():
            if (entry := self._index.get(key)) is not None:
                try:
                    path = self._folder.path(entry.ref)
                    os.utime(path, ns=(stamp, stamp), follow_symlinks=False)
                except FileNotFoundError:
                    self._forget(key)
                except OSError:
                    return

    # Re-encoding in idle time

    def by_use(self) -> list[Entry]:
        """The records that the index knows, the least recently used first."""
        return self._index.by_use()

    @property
    def pressed(self) -> bool:
        """Whether the folder is so full that records will soon have to go."""
        usage = self._folder.read_usage() or self._usage_seen
        return usage.bytes > PRESSURE * self.budget

    def age(self, ref: Ref) -> bool:
        """Store the record in fewer bytes where the codec can do so without loss.

        The smaller file takes the place of the larger in one step, unless that has changed or gone
        meanwhile. False when it can't be written now; whatever fails, the record stays as it was.
        """
        if time.monotonic() < self._paused_until:
            return False
        try:
            aged = self._with_file(ref, self._smaller)
            if aged is not None:
                self._replace(ref, *aged)
        except (OSError, Timeout, NoRoom) as error:
            self.last_fault = f"re-encoding: {_text(error)}"
            return False
        return True

    def _smaller(self, fd: int, head: Head) -> tuple[list[memoryview], int] | None:
        """A record's file composed anew, and the bytes of the old one; None to leave it alone."""
        if not self._codec.ages([part.codec for part in head.parts]):
            return None
        record = read_record(fd, head, self._codec)
        encoded = self._codec.age(record)
        return None if encoded is None else (compose(record, encoded), os.fstat(fd).st_size)

    def _replace(self, ref: Ref, buffers: list[memoryview], old: int) -> None:
        size = sum(buffer.nbytes for buffer in buffers)
        # It replaces a file that may have been on the disk for long: not by one that isn't yet.
        temporary = self._write_temporary(buffers, size, 0, orphan=False, fsync=True)
        done = False
        try:
            # Under the lock nobody evicts the file, or puts a smaller one there.
            with self._folder.exclusive():
                found = self._folder.find(ref)
                if found is not None and found.size == old:
                    with suppress(OSError):
                        os.utime(temporary, ns=(found.stamp, found.stamp))
                    self._folder.publish(temporary, ref)
                    done = True
                    self._index.add(Found(ref, size, found.stamp))
                    self._save(self._usage().bytes - old)
        finally:
            if not done:
                self._give_back(temporary, size)
        if done:
            self._counters.add("blocks_reencoded")
            self._counters.add("bytes_saved", old - size)

    # Keeping the budget. The callers of these hold the folder's lock.

    def _usage(self) -> Usage:
        """Bytes used or reserved by all processes."""
        usage = self._folder.read_usage()
        if usage is None:
            self._rescan()
        elif usage != self._usage_seen:
            self._usage_seen = usage
            self._stale = True
        return self._usage_seen

    def _save(self, used: int) -> None:
        self._usage_seen = Usage(max(used, 0), self._usage_seen.changes + 1)
        self._folder.write_usage(self._usage_seen)

    def _rescan(self) -> int:
        """Take the folder as it is: forget files that are gone, learn of others', count all."""
        self._folder.remove_leftovers()
        self._save(self._usage_seen.bytes)  # so that the scan counts the usage's own file
        before = self._index.added
        found, total = self._folder.scan()
        best: dict[bytes, Found] = {}
        for file in sorted(found, key=lambda file: file.ref.end):
            worse = best.get(file.ref.key)
            if worse is not None and self._remove(worse):
                total -= worse.size
            best[file.ref.key] = file
        self._index.replace([f for f in best.values() if f.ref.key not in self._refused], before)
        self._stale = False
        self._scanned_at = time.monotonic()
        self._save(total)
        return total

    def _reserve(self, size: int, orphan: bool) -> None:
        """Make room. Nothing goes for an orphan, which can't be reached without its parent."""
        used = self._usage().bytes
        if used + size > self.budget and not orphan:
            used = self._evict(used, self.budget - size)
        if used + size > self.budget:
            reason = "the record's parent isn't stored" if orphan else "nothing there can go"
            raise NoRoom(f"{used} of {self.budget} bytes are taken, and {reason}")
        self.problems.pop("budget", None)
        self._save(used + size)

    def _evict(self, used: int, goal: int) -> int:
        """Delete what was set aside, then the least recently used leaves; returns the bytes left.

        A scan, for what other processes did, comes before and when nothing is left to delete, but
        not more often than the clock allows.
        """
        used = self._rescan_if(self._stale, used)
        if used > goal:
            used -= self._folder.remove_bad()
        while used > goal:
            self._pin_kept()
            entry = self._index.victim(self._coming.awaits)
            if entry is not None:
                used -= self._evict_one(entry)
            elif (recounted := self._rescan_if(True, used)) == used:
                break
            else:
                used = recounted
        return used

    def _pin_kept(self) -> None:
        """Pin what this process or another one is to keep, as it is known at this moment."""
        if self._kept is not None:
            try:
                self._index.pin_only(self._kept(), "kept")
            except Exception as error:  # those of a moment ago stay pinned
                self._note("kept", error)

    def _rescan_if(self, wanted: bool, used: int) -> int:
        due = time.monotonic() - self._scanned_at > _RESCAN_SECONDS
        return self._rescan() if wanted and due else used

    def _evict_one(self, entry: Entry) -> int:
        """Delete an entry's file, unless another process used it lately; the bytes freed."""
        ref = entry.ref
        try:
            found = self._folder.find(ref)
        except OSError:
            found = None
        if found is None:
            # Whoever deleted it has counted that, or the next scan will.
            self._stale = True
            self._forget(ref.key)
            return 0
        if found.stamp > entry.stamp:
            self._index.touch(ref.key, found.stamp)
            return 0
        if not self._remove(found):
            return 0
        self._forget(ref.key)
        self.losses.note(ref.key, "evicted")
        self._counters.add("blocks_evicted")
        return found.size

    def _remove(self, file: Found | Entry) -> bool:
        """Delete a record's file; False when that can't be done."""
        try:
            self._folder.remove(file.ref)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._note("delete", error)
            self._index.mark_stuck(file.ref.key)
            return False
        return True

    def _free(self, size: int) -> None:
        """The disk is full before the budget is: make room by deleting what is ours."""
        with self._folder.exclusive():
            used = self._usage().bytes
            self._save(self._evict(used, max(used - size, 0)))

    # Opening, closing, telling

    def _begin(self) -> None:
        try:
            self._open()
        except Exception as error:
            # It can't be written to; what is there may still be read.
            self._note("open", error)
            with suppress(OSError):
                self._index.replace(self._folder.scan()[0], self._index.added)
        self._ready.set()

    def _open(self) -> None:
        self._folder.open()
        with self._folder.exclusive():
            used = self._evict(self._rescan(), self.budget)
            self._save(used)
        if used > self.budget:
            self.problems["budget"] = f"{used} bytes in the folder, {self.budget} allowed"
        self._is_open = True
        self.problems.pop("open", None)

    def pin(self, keys: Iterable[bytes], owner: str) -> None:
        self._index.pin(keys, owner)

    def unpin(self, keys: Iterable[bytes], owner: str) -> None:
        self._index.unpin(keys, owner)

    def all_there(self, pieces: Iterable[tuple[Kind, bytes, bytes]]) -> bool:
        """Whether the files of these (kind, key, parent) are there, while nothing is evicted."""
        with self._folder.exclusive():
            refs = [self.locate(*piece) for piece in pieces]
            return all(ref is not None and self._folder.find(ref) is not None for ref in refs)

    def reserve(self, size: int) -> None:
        """Make room for a file in the folder that isn't a record; raises NoRoom or OSError."""
        with self._folder.exclusive():
            self._reserve(size, False)

    def give_back(self, size: int) -> None:
        """A file that room was reserved for has gone."""
        with self._folder.exclusive():
            self._save(self._usage().bytes - size)

    def listed(self) -> list[Listed]:
        """All records by name, size and last use, as far as they are known; no file is read."""
        return [
            Listed(entry.ref, entry.size, entry.stamp, owners)
            for entry, owners in self._index.listed()
        ]

    def wait_scanned(self, timeout: float) -> bool:
        """Wait until the first scan is through, at most `timeout` seconds."""
        return self._ready.wait(timeout)

    def stats(self) -> dict[str, Any]:
        usage = self._folder.read_usage() or self._usage_seen
        return {
            "bytes": usage.bytes,
            "budget_bytes": self.budget,
            "blocks": len(self._index),
            "scanned": self._ready.is_set(),
        }

    def close(self) -> None:
        self.write_touches()
        with suppress(OSError, Timeout):
            self._folder.close()

    def _note(self, kind: str, error: Exception) -> None:
        self.problems[kind] = self.last_fault = _text(error)


def _text(error: Exception) -> str:
    return (
        str(error) if isinstance(error, (BadFile, NoRoom)) else f"{type(error).__name__}: {error}"
    )
