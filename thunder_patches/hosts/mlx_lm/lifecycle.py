"""Start and shutdown of the server process, and its parts of the status."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from ...config import Settings
from ...patching import report
from ...patching.guard import shield
from .. import handoff
from ..pilot import save_now
from ..runtime import runtime
from ..seeing import add_sections
from .load import loaded


def start(settings: Settings) -> None:
    """Called by the registry before the first patch of this host is applied."""
    add_sections()
    report.add_section("model", _model)
    report.add_section("contexts", handoff.told)
    _write_on_sigterm()


def _write_on_sigterm() -> None:
    """SIGTERM, which the stock server leaves to the system, first lets the queue reach the disk.

    Where something else handles the signal already, it stays in charge.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def write_and_end(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        # Not on this thread: it may have been stopped inside a lock that the store needs.
        writer = threading.Thread(target=_write, daemon=True)
        writer.start()
        writer.join(_GRACE_S)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, write_and_end)


_GRACE_S = 10.0
"""How long SIGTERM waits for the writes."""


def _write() -> None:
    with shield("ssd_cache", "flush"):
        runtime().store.flush(_GRACE_S)
    with shield("context_pilot", "save"):
        save_now()


def stop_and_join(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``ResponseGenerator.stop_and_join``: what is queued gets onto the disk."""
    result = wrapped(*args, **kwargs)
    _write()
    return result


def _model() -> dict[str, Any]:
    return {
        "identity": loaded.session.identity if loaded.session else None,
        "family": loaded.family or None,
        "eligible": None if loaded.key is None else loaded.session is not None,
        "reason": loaded.reason or None,
    }
