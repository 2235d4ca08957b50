"""What a store knows of its files: sizes, stamps, and the tree that their names tell."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from thunder_patches.cache.folder import Found
from thunder_patches.cache.record import Kind, Ref, Tree


@dataclass(slots=True)
class Entry:
    """A file. `stuck`: it couldn't be deleted. `added`: the index's count when it came in."""

    ref: Ref
    size: int
    stamp: int
    added: int
    stuck: bool = False


class Index:
    """Entries by key, and the order in which they may go: the least recently used leaf first.

    A record is a leaf when none hangs off it, so children go before their parents, whatever the
    stamps say. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[bytes, Entry] = {}
        self._tree = Tree()
        self._pins: dict[bytes, set[str]] = {}
        self._only: dict[str, AbstractSet[bytes]] = {}
        # (stamp, key). Every evictable leaf is in here, with a stamp no newer than its own; what
        # else is in here is out of date, and dropped when it comes up.
        self._heap: list[tuple[int, bytes]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def added(self) -> int:
        """How many entries were ever added; see `replace`."""
        return self._added

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def add(self, found: Found) -> None:
        with self._lock:
            self._add(found)

    def remove(self, key: bytes) -> None:
        with self._lock:
            self._remove(key)

    def touch(self, key: bytes, stamp: int) -> None:
        """Note a use at `stamp` (ns); an older one than known changes nothing."""
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                entry.stamp = max(entry.stamp, stamp)

    def children(self, parent: bytes, kind: Kind) -> list[Entry]:
        with self._lock:
            refs = self._tree.after(parent)
            return [self._entries[ref.key] for ref in refs if ref.kind == kind]

    def by_use(self) -> list[Entry]:
        """All entries, the least recently used first."""
        with self._lock:
            return sorted(self._entries.values(), key=lambda entry: entry.stamp)

    def listed(self) -> list[tuple[Entry, tuple[str, ...]]]:
        """All entries, each with who pinned it."""
        with self._lock:
            return [(e, tuple(self._pins.get(key, ()))) for key, e in self._entries.items()]

    def pin(self, keys: Iterable[bytes], owner: str) -> None:
        with self._lock:
            for key in keys:
                self._pins.setdefault(key, set()).add(owner)

    def pin_only(self, keys: AbstractSet[bytes], owner: str) -> None:
        """Have just these keys pinned by `owner`; quick where nothing changed."""
        if self._only.get(owner) is not keys:
            before = self._only.get(owner, frozenset())
            self._only[owner] = keys
            self.pin(keys - before, owner)
            self.unpin(before - keys, owner)

    def unpin(self, keys: Iterable[bytes], owner: str) -> None:
        with self._lock:
            for key in keys:
                owners = self._pins.get(key, set())
                owners.discard(owner)
                if not owners:
                    self._pins.pop(key, None)
                    self._offer(key)

    def offer(self, key: bytes) -> None:
        """Look again at whether the record may go."""
        with self._lock:
            self._offer(key)

    def victim(self, awaits: Callable[[bytes], bool]) -> Entry | None:
        """The least recently used leaf that is neither pinned nor stuck; it stays until removed.

        awaits: whether a record on its way to the disk hangs off a key; `offer` that key when the
        record is there, or isn't coming.
        """
        with self._lock:
            while self._heap:
                stamp, key = self._heap[0]
                entry = self._entries.get(key)
                if entry is None or not self._evictable(entry) or awaits(key):
                    heapq.heappop(self._heap)
                elif entry.stamp != stamp:
                    heapq.heapreplace(self._heap, (entry.stamp, key))
                else:
                    return entry
            return None

    def mark_stuck(self, key: bytes) -> None:
        """The file can't be deleted; it no longer keeps its parent from going."""
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                entry.stuck = True
                self._detach(entry.ref)

    def replace(self, found: Sequence[Found], before: int) -> None:
        """Take over what a scan found. Entries added since `before` (see `added`) stay."""
        with self._lock:
            present = {f.ref.key for f in found}
            gone = [
                key
                for key, entry in self._entries.items()
                if key not in present and entry.added <= before
            ]
            for key in gone:
                self._remove(key)
            for f in found:
                self._add(f)

    def _add(self, found: Found) -> None:
        ref = found.ref
        entry = self._entries.get(ref.key)
        if entry is not None and entry.ref == ref:
            entry.size = found.size
            entry.stamp = max(entry.stamp, found.stamp)
            return
        if entry is not None:
            self._remove(ref.key)
        self._added += 1
        self._entries[ref.key] = Entry(ref, found.size, found.stamp, self._added)
        self._tree.add(ref)
        self._offer(ref.key)

    def _remove(self, key: bytes) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._detach(entry.ref)

    def _detach(self, ref: Ref) -> None:
        if self._tree.discard(ref):
            self._offer(ref.parent)

    def _offer(self, key: bytes) -> None:
        entry = self._entries.get(key)
        if entry is not None and self._evictable(entry):
            heapq.heappush(self._heap, (entry.stamp, key))

    def _evictable(self, entry: Entry) -> bool:
        key = entry.ref.key
        return not entry.stuck and key not in self._pins and key not in self._tree
