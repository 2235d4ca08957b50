"""In idle time, records that haven't been used for long are stored in fewer bytes, without loss."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from thunder_patches.cache.disk import DiskStore

QUIET_SECONDS = 5.0  # without a request, before anything is done
AGED_SECONDS = 3600.0  # since the last use of a record; less only when the folder is pressed
SWEEP_SECONDS = 30.0  # between two looks at all records


class Ager:
    """A thread that goes through a folder's records, the least recently used first.

    It looks up between two records, so that a request meets one of them at most being re-encoded.

    Args:
        quiet: seconds since the last request ended, 0 while one runs.
    """

    def __init__(
        self,
        disk: DiskStore,
        quiet: Callable[[], float],
        *,
        quiet_seconds: float = QUIET_SECONDS,
        aged_seconds: float = AGED_SECONDS,
    ) -> None:
        self._disk = disk
        self._quiet = quiet
        self._quiet_seconds = quiet_seconds
        self._aged_ns = int(aged_seconds * 1e9)
        self._stopped = threading.Event()
        # What has been looked at: keys, and the size that the file had.
        self._seen: dict[bytes, int] = {}
        self._thread = threading.Thread(target=self._run, name="thunder-age", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop after the record that is being worked on."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def sweep(self) -> bool:
        """Re-encode what is due; False when a request, or a disk that refuses, put an end to it."""
        records = self._disk.by_use()
        self._seen = {e.ref.key: self._seen.get(e.ref.key, -1) for e in records}
        for entry in records:
            if time.time_ns() - entry.stamp < self._aged_ns and not self._disk.pressed:
                break
            if self._seen[entry.ref.key] == entry.size:
                continue
            if self._stopped.is_set() or self._quiet() < self._quiet_seconds:
                return False
            if not self._disk.age(entry.ref):
                return False
            self._seen[entry.ref.key] = entry.size
        return True

    def _run(self) -> None:
        while not self._stopped.wait(min(self._quiet_seconds, SWEEP_SECONDS)):
            if self._quiet() >= self._quiet_seconds:
                self.sweep()
                self._stopped.wait(SWEEP_SECONDS)
