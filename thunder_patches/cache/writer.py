"""A bounded queue of records on their way to the disk, and the threads that write them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

from thunder_patches.cache.record import Record, Ref, Tree


class WriteQueue:
    """Calls `write(record, stamp)` for each record put in, on threads of its own.

    At most `max_bytes` wait (but always the newest): when there are more, the oldest that no thread
    has taken yet is dropped. A record can be looked up from the moment it's put in until it's
    written; then, or when it's dropped, `gone(record, dropped)` is called. `idle()` is called on a
    writer thread after `poke`, when nothing waits. None of these may raise; the queue survives it
    if they do.
    """

    def __init__(
        self,
        write: Callable[[Record, int], object],
        *,
        idle: Callable[[], object],
        gone: Callable[[Record, bool], object],
        threads: int,
        max_bytes: int,
    ) -> None:
        self._write = write
        self._idle = idle
        self._gone = gone
        self._max_bytes = max_bytes
        self._n_threads = threads
        self._changed = threading.Condition()
        self._waiting: OrderedDict[bytes, tuple[Record, int]] = OrderedDict()
        self._writing: dict[bytes, Record] = {}
        self._tree = Tree()
        self._threads: list[threading.Thread] = []
        self._poked = False
        self._busy = 0
        self._closed = False
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._writing)

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiting or key in self._writing

    def put(self, record: Record, stamp: int) -> None:
        """Queue the record, unless one as good is on its way already. Never blocks."""
        key = record.header.key
        lost = []
        with self._changed:
            present = self._find(key)
            if self._closed or (present and present.header.ref.covers(record.header.ref)):
                return
            if key in self._waiting:
                self._forget(self._waiting.pop(key)[0])
            self._waiting[key] = (record, stamp)
            self._tree.add(record.header.ref)
            self.bytes += record.nbytes
            while self.bytes > self._max_bytes and len(self._waiting) > 1:
                _, (oldest, _) = self._waiting.popitem(last=False)
                self._forget(oldest)
                lost.append(oldest)
            self._start()
            self._changed.notify_all()
        for oldest in lost:
            self._gone(oldest, True)

    def get(self, key: bytes) -> Record | None:
        with self._changed:
            return self._find(key)

    def after(self, parent: bytes) -> list[Ref]:
        """The records on their way that hang off `parent`."""
        with self._changed:
            return self._tree.after(parent)

    def awaits(self, parent: bytes) -> bool:
        """Whether a record on its way hangs off `parent`."""
        with self._changed:
            return parent in self._tree

    def wait_written(self, key: bytes) -> None:
        """Wait while another thread is writing the record."""
        with self._changed:
            self._changed.wait_for(lambda: key not in self._writing)

    def poke(self) -> None:
        """Have `idle` called soon."""
        with self._changed:
            if not self._closed:
                self._poked = True
                self._start()
                self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until all is written and `idle` has run; False when it took longer (in seconds)."""
        end = time.monotonic() + timeout
        with self._changed:
            return self._changed.wait_for(self._at_rest, max(end - time.monotonic(), 0))

    def close(self, timeout: float) -> bool:
        """Flush, then stop the threads; what isn't written by then is dropped."""
        done = self.flush(timeout)
        with self._changed:
            self._closed = True
            lost = [record for record, _ in self._waiting.values()]
            for record in lost:
                self._forget(record)
            self._waiting.clear()
            self._changed.notify_all()
        for record in lost:
            self._gone(record, True)
        for thread in self._threads:
            thread.join(timeout=1.0)
        return done

    def _find(self, key: bytes) -> Record | None:
        return self._waiting[key][0] if key in self._waiting else self._writing.get(key)

    def _at_rest(self) -> bool:
        return not (self._waiting or self._writing or self._poked or self._busy)

    def _start(self) -> None:
        while len(self._threads) < self._n_threads:
            name = f"thunder-write-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return  # no more threads to be had now; the next call tries again
            self._threads.append(thread)

    def _forget(self, record: Record) -> None:
        self._tree.discard(record.header.ref)
        self.bytes -= record.nbytes

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._poked or self._closed)
                if self._closed:
                    return
                record = None
                if self._waiting:
                    key, (record, stamp) = self._waiting.popitem(last=False)
                    self._writing[key] = record
                else:
                    self._poked = False
                self._busy += 1
            # The store's own callbacks report their faults; a thread that dies would not.
            with suppress(Exception):
                if record is None:
                    self._idle()
                else:
                    self._write(record, stamp)
            with self._changed:
                if record is not None:
                    del self._writing[record.header.key]
                    self._forget(record)
                    self._changed.notify_all()
            if record is not None:
                with suppress(Exception):
                    self._gone(record, False)
                del record
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()
