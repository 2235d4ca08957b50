"""Named integers that any thread may add to."""

from __future__ import annotations

import threading

NAMES = (
    "full",
    "approximate",
    "partial",
    "miss",
    "tokens_skipped",
    "tokens_computed",
    "blocks_written",
    "blocks_evicted",
    "writes_dropped",
    "corrupt",
    "set_aside",
)
"""The names under ``cache.counts`` of the status: always present, in this order, from 0."""


class Counters:
    """Thread-safe named integers. Names outside `NAMES` are allowed and come after them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(NAMES, 0)

    def add(self, name: str, n: int = 1) -> None:
        """Add `n` to `name`."""
        with self._lock:
            self._values[name] = self._values.get(name, 0) + n

    def snapshot(self) -> dict[str, int]:
        """All values at one moment."""
        with self._lock:
            return dict(self._values)
