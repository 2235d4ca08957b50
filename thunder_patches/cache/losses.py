"""What the store had and lost: not needed to serve, but to tell a user why a prompt wasn't found."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

REMEMBERED = 8192
"""Keys, the latest; about 1 MB."""


@dataclass(frozen=True, slots=True)
class Lost:
    """``evicted`` for its budget, ``damaged`` and set aside, or ``dropped`` before it was written."""

    how: Literal["evicted", "damaged", "dropped"]
    at: float
    """Seconds, `time.time`."""


class Losses:
    """The latest losses of this process, by key. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lost: OrderedDict[bytes, Lost] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, key: bytes, how: Literal["evicted", "damaged", "dropped"]) -> None:
        with self._lock:
            self._lost[key] = Lost(how, time.time())
            self._lost.move_to_end(key)
            if len(self._lost) > REMEMBERED:
                self._lost.popitem(last=False)

    def get(self, key: bytes) -> Lost | None:
        with self._lock:
            return self._lost.get(key)
