"""The last requests: what was reused of each, why not more, and how soon its first token came.

A request costs the thread that looks its prompt up one append; all sums are made when somebody asks.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

KEPT = 2048
SHOWN = 100
STEP_S = 30.0
SPAN_S = 3600.0
BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 180.0)
RESULTS = ("full", "approximate", "partial", "miss")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prompt lies in the tree of cached blocks (keys as in ``cache.keys``).

    root: of the empty prefix. system: last block that lies in the system prompt, None where it is
    shorter than a block. last: the prompt's last full block, or ``root``. text: the beginning of the
    last message, only where the user allows it.
    """

    root: bytes
    last: bytes
    system: bytes | None = None
    system_hash: str | None = None
    messages: int = 0
    text: str | None = None


@dataclass(slots=True)
class Seen:
    """One request; filled in as its answer comes. ``first_token_s``: seconds since it arrived."""

    at: float
    tokens: int
    cached: int
    skip: str
    source: str | None
    miss: dict[str, Any] | None = None
    first_token_s: float | None = None
    place: Place | None = None

    @property
    def result(self) -> str:
        """As counted: "full", "approximate", "partial" or "miss"."""
        if self.skip != "none":
            return self.skip
        return "partial" if self.cached else "miss"

    def to_json(self) -> dict[str, Any]:
        place = self.place
        return {
            "at": round(self.at, 3),
            "tokens": self.tokens,
            "cached": self.cached,
            "result": self.result,
            "source": self.source,
            "first_token_s": self.first_token_s,
            "miss": self.miss,
            "messages": place.messages if place else None,
            "system": place.system_hash if place else None,
            "text": place.text if place else None,
        }


class Histogram:
    """Counts of seconds by upper bound, and their sum. Safe to use from several threads."""

    def __init__(self, bounds: tuple[float, ...] = BOUNDS_S) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, seconds: float) -> None:
        with self._lock:
            self._counts[bisect.bisect_left(self._bounds, seconds)] += 1
            self._sum += seconds

    def to_json(self) -> dict[str, Any]:
        """``le``: upper bounds in seconds; ``counts``: cumulative, the last one without a bound."""
        with self._lock:
            counts, total = list(accumulate(self._counts)), self._sum
        return {"le": list(self._bounds), "counts": counts, "sum": round(total, 6)}


@dataclass(frozen=True)
class History:
    """A process's last requests. All methods may be called from any thread."""

    _seen: deque[Seen] = field(default_factory=lambda: deque(maxlen=KEPT))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _first: dict[str, Histogram] = field(
        default_factory=lambda: {result: Histogram() for result in RESULTS}
    )

    def add(self, tokens: int, cached: int, skip: str, source: str | None) -> Seen:
        """A prompt of ``tokens`` tokens was looked up, ``cached`` of which need no computing."""
        seen = Seen(time.time(), tokens, cached, skip, source)
        with self._lock:
            self._seen.append(seen)
        return seen

    def first_token(self, seen: Seen, seconds: float) -> None:
        """Its first token came, ``seconds`` after the request."""
        seen.first_token_s = round(seconds, 4)
        self._first[seen.result].observe(seconds)

    def recent(self, count: int = KEPT) -> list[Seen]:
        """The last ones, newest first."""
        with self._lock:
            found = list(self._seen)
        return found[: -count - 1 : -1]

    def first_tokens(self) -> dict[str, Any]:
        """Histograms of the time to the first token since the start, by result."""
        return {result: histogram.to_json() for result, histogram in self._first.items()}

    def over_time(self, now: float | None = None) -> dict[str, Any]:
        """Sums over steps of `STEP_S` seconds in the last `SPAN_S`, steps without requests left out."""
        now = time.time() if now is None else now
        names = ("at", "requests", "hits", "skipped", "computed")
        rows = _sums(seen for seen in self.recent() if seen.at > now - SPAN_S)
        return {"step_s": STEP_S, "columns": names, "rows": rows, "now": round(now, 3)}


def _sums(requests: Iterable[Seen]) -> list[list[float]]:
    steps: dict[float, list[float]] = {}
    for seen in requests:
        at = seen.at // STEP_S * STEP_S
        row = steps.setdefault(at, [at, 0, 0, 0, 0])
        row[1] += 1
        row[2] += seen.result != "miss"
        row[3] += seen.cached
        row[4] += seen.tokens - seen.cached
    return [steps[at] for at in sorted(steps)]
