"""Keeps faults of ours away from the host: swallow, count, and switch a feature off.

Wrappers put their own work inside ``with shield("feature"):`` and call the host's original outside
it, so that the host's exceptions pass untouched.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from thunder_patches.config import settings

LIMIT = 3
"""Faults in a row that switch a feature off for the process."""

log = logging.getLogger("thunder_patches")


@dataclass(frozen=True)
class Faults:
    """What the guard knows of one feature's faults."""

    count: int = 0
    last: str = ""
    """``where: ExceptionType: message`` of the newest one."""
    tripped: bool = False


_lock = threading.Lock()
_on: dict[str, bool] = {}
_children: dict[str, tuple[str, ...]] = {}
_streaks: dict[tuple[str, str], int] = {}
_faults: dict[str, Faults] = {}
_logged: set[tuple[str, str, type]] = set()
_reasons: dict[str, str] = {}


def is_on(feature: str) -> bool:
    """Whether `feature` may act now: applied (or, where no registry ran, its switch is on) and not
    switched off by faults. A dictionary look-up after the first call."""
    on = _on.get(feature)
    if on is None:
        wanted = settings()
        on = _on[feature] = wanted.enabled and bool(getattr(wanted, feature, True))
    return on


def set_features(on: Mapping[str, bool], children: Mapping[str, tuple[str, ...]]) -> None:
    """The registry's decision: which features are on, and which ones go off with another."""
    with _lock:
        _on.update(on)
        _children.update(children)


def turn_off(feature: str, reason: str) -> None:
    """Switch `feature`, and the ones that need it, off for the process."""
    with _lock:
        _turn_off(feature, reason)


def _turn_off(feature: str, reason: str) -> None:
    _on[feature] = False
    _reasons[feature] = reason
    for child in _children.get(feature, ()):
        if _on.get(child, True):
            _turn_off(child, f"needs {feature}, which was switched off: {reason}")


def off_reason(feature: str) -> str | None:
    """Why `feature` was switched off while running, or None."""
    return _reasons.get(feature)


def faults(feature: str) -> Faults:
    """The feature's faults so far."""
    return _faults.get(feature, Faults())


def reset() -> None:
    """Forget everything (undo, tests)."""
    with _lock:
        for memory in (_on, _children, _streaks, _faults, _logged, _reasons):
            memory.clear()


class shield:
    """``with shield("ssd_cache", "store"):`` swallows our exceptions (not KeyboardInterrupt or
    SystemExit), logs each kind once and counts them.

    Three in a row at one `where` of one feature switch the feature off for the process; a block
    left without an exception starts the count anew. After it, ``failed`` tells which it was.
    """

    __slots__ = ("failed", "feature", "where")

    def __init__(self, feature: str, where: str = "") -> None:
        self.feature = feature
        self.where = where
        self.failed = False

    def __enter__(self) -> shield:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            if _streaks.get((self.feature, self.where)):
                _streaks[self.feature, self.where] = 0
            return False
        if not isinstance(error, Exception):
            return False
        self.failed = True
        _record(self.feature, self.where, error)
        return True


def _record(feature: str, where: str, error: Exception) -> None:
    place = f"{where}: " if where else ""
    message = f"{place}{type(error).__name__}: {error}"
    with _lock:
        streak = _streaks[feature, where] = _streaks.get((feature, where), 0) + 1
        trips = streak >= LIMIT and _on.get(feature, True)
        known = _faults.get(feature, Faults())
        _faults[feature] = Faults(known.count + 1, message, known.tripped or trips)
        if trips:
            _turn_off(feature, f"{LIMIT} errors in a row, last {message}")
        kind = (feature, where, type(error))
        first = kind not in _logged
        _logged.add(kind)
    if first:
        details = "".join(traceback.format_exception(error)).rstrip()
        log.warning("%s: %s; the request goes on without it\n%s", feature, message, details)
    if trips:
        log.error("%s is switched off until the server restarts: %s", feature, _reasons[feature])
