"""Whether requests run, so that work which can wait does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Activity:
    """What this process is doing for clients. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._last = time.monotonic()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Something is done for a client inside."""
        with self._lock:
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._last = time.monotonic()

    def note(self) -> None:
        """Something was done for a client just now."""
        self._last = time.monotonic()

    def quiet(self) -> float:
        """Seconds since the last of it, 0 while there is any."""
        return 0.0 if self._running else time.monotonic() - self._last
