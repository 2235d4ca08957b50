"""Records in memory, LRU-2: what was used once never pushes out what was used twice.

After E. O'Neil, P. O'Neil and G. Weikum, "The LRU-K page replacement algorithm for database disk
buffering", SIGMOD 1993, with K = 2: a record is worth its last use but one. Uses are told apart by
their tick; all that one request does has one tick, so that a long prompt can't push out its own
beginning, and a prompt larger than the budget doesn't cycle through it.
"""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict
from dataclasses import dataclass

from thunder_patches.cache.record import Listed, Record, Ref, Tree

MAX_HISTORY = 16384

# Ticks of the last use but one and of the last; NEVER in the first place: used once.
Uses = tuple[int, int]
NEVER = -1


@dataclass(slots=True)
class _Held:
    record: Record
    size: int
    uses: Uses


class RamTier:
    """At most `budget` bytes of records. All methods may be called from any thread.

    Those used once are the cold queue, those used twice the hot queue: every cold record goes
    before any hot one, and each queue's oldest goes first.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.bytes = 0
        self._lock = threading.Lock()
        self._held: dict[bytes, _Held] = {}
        self._tree = Tree()
        # Uses of records that aren't held, the latest last.
        self._history: OrderedDict[bytes, Uses] = OrderedDict()
        # (uses, key) for every record held; also some that are out of date.
        self._heap: list[tuple[Uses, bytes]] = []

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def put(self, record: Record, tick: int) -> bool:
        """Note a use and hold the record if it's worth more than what would have to go."""
        key = record.header.key
        with self._lock:
            uses = self._use(key, tick)
            if (held := self._held.get(key)) is not None:
                if held.record.header.ref.covers(record.header.ref):
                    return True
                self._drop(key)
            return self._admit(record, uses)

    def hold(self, record: Record) -> bool:
        """Hold a record whose use was noted before (see `wants`)."""
        key = record.header.key
        with self._lock:
            if key in self._held:
                return True
            return self._admit(record, self._history.get(key, (NEVER, 0)))

    def get(self, key: bytes, tick: int) -> Record | None:
        """The record if it's held; notes a use."""
        with self._lock:
            held = self._held.get(key)
            if held is None:
                return None
            self._use(key, tick)
            return held.record

    def peek(self, key: bytes) -> Record | None:
        held = self._held.get(key)
        return held.record if held is not None else None

    def wants(self, key: bytes, size: int, tick: int) -> bool:
        """Note a use of a record that isn't held; True when it was used before and would fit."""
        with self._lock:
            uses = self._use(key, tick)
            if uses[0] == NEVER or size > self.budget or key in self._held:
                return False
            return self._victims(size, uses) is not None

    def listed(self) -> list[Listed]:
        """All records held, without their tensors."""
        with self._lock:
            return [
                Listed(held.record.header.ref, held.size, held.uses[1], in_ram=True)
                for held in self._held.values()
            ]

    def after(self, parent: bytes) -> list[Ref]:
        """The records held that hang off `parent`."""
        with self._lock:
            return self._tree.after(parent)

    def clear(self) -> None:
        with self._lock:
            for key in list(self._held):
                self._drop(key)

    def _use(self, key: bytes, tick: int) -> Uses:
        held = self._held.get(key)
        before, last = held.uses if held else self._history.get(key, (NEVER, NEVER))
        uses = (last, tick) if tick > last else (before, last)
        if held is not None:
            held.uses = uses
        else:
            self._remember(key, uses)
        return uses

    def _remember(self, key: bytes, uses: Uses) -> None:
        self._history[key] = uses
        self._history.move_to_end(key)
        while len(self._history) > MAX_HISTORY:
            self._history.popitem(last=False)

    def _admit(self, record: Record, uses: Uses) -> bool:
        size = record.nbytes
        victims = self._victims(size, uses)
        if victims is None:
            return False
        for key in victims:
            self._drop(key)
        key = record.header.key
        self._history.pop(key, None)
        self._held[key] = _Held(record, size, uses)
        self._tree.add(record.header.ref)
        self.bytes += size
        heapq.heappush(self._heap, (uses, key))
        return True

    def _victims(self, size: int, uses: Uses) -> list[bytes] | None:
        """What has to go for `size` bytes last used at `uses`; None when that is worth as much."""
        need = self.bytes + size - self.budget
        if need <= 0:
            return []
        if size > self.budget:
            return None
        popped: dict[bytes, Uses] = {}
        while need > 0 and self._heap:
            noted, key = heapq.heappop(self._heap)
            held = self._held.get(key)
            if held is None or key in popped:
                continue
            if held.uses != noted:
                heapq.heappush(self._heap, (held.uses, key))
                continue
            popped[key] = noted
            if noted >= uses:
                break
            need -= held.size
        for key, noted in popped.items():
            heapq.heappush(self._heap, (noted, key))
        return list(popped) if need <= 0 else None

    def _drop(self, key: bytes) -> None:
        held = self._held.pop(key)
        self._tree.discard(held.record.header.ref)
        self.bytes -= held.size
        self._remember(key, held.uses)
