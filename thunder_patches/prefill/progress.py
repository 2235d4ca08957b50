"""Signs of life while a long prefill runs: from a timer, not from chunk ends.

Server-sent events: a comment line keeps the connection open and is ignored by every client; a progress
event goes only to those that asked, as a chunk of the stream's own form without choices.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

INTERVAL = 2.0
"""Seconds between two signs."""


@dataclass
class Progress:
    """Tokens of one prompt: done counts those restored as well."""

    total: int
    skipped: int = 0
    done: int = 0
    started: float = field(default_factory=time.monotonic)

    def saw(self, computed: int) -> None:
        """``computed`` tokens have been prefilled so far."""
        self.done = min(self.skipped + computed, self.total)

    def as_dict(self) -> dict[str, Any]:
        """Tokens done, skipped and in all; seconds left by the speed so far, or None."""
        elapsed = time.monotonic() - self.started
        computed = self.done - self.skipped
        left = None
        if computed > 0:
            left = round(elapsed / computed * (self.total - self.done), 1)
        return {
            "tokens_done": self.done,
            "tokens_skipped": self.skipped,
            "tokens_total": self.total,
            "seconds_left": left,
        }


def comment(progress: Progress) -> bytes:
    """A keepalive that every client of server-sent events ignores."""
    return f": keepalive {progress.done}/{progress.total}\n\n".encode()


def chunk(progress: Progress, envelope: dict[str, Any]) -> bytes:
    """A progress event as a chunk of the stream's form, without choices."""
    value = {**envelope, "choices": [], "thunder": {"progress": progress.as_dict()}}
    return f"data: {json.dumps(value)}\n\n".encode()


class Ticker:
    """Calls ``sign`` every ``interval`` seconds on a thread of its own until stopped.

    ``sign`` raises OSError when the client has gone; ``gone`` is then called, once.
    """

    def __init__(
        self, sign: Callable[[], None], gone: Callable[[], None], interval: float = INTERVAL
    ) -> None:
        self._sign = sign
        self._gone = gone
        self._interval = interval
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thunder-progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No sign is being given, nor will be, when this returns."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._interval):
            try:
                self._sign()
            except OSError:
                self._gone()
                return
