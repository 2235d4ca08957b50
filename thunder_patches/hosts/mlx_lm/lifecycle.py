"""Start and shutdown of the server process, and its parts of the status."""

from __future__ import annotations

from typing import Any

from ...config import Settings
from ...patching import report
from ...patching.guard import shield
from ..pilot import save_now
from ..runtime import runtime
from .load import loaded


def start(settings: Settings) -> None:
    """Called by the registry before the first patch of this host is applied."""
    report.add_section("cache", _cache)
    report.add_section("model", _model)


def stop_and_join(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``ResponseGenerator.stop_and_join``: what is queued gets onto the disk."""
    result = wrapped(*args, **kwargs)
    with shield("ssd_cache", "flush"):
        runtime().store.flush(30)
    with shield("context_pilot", "save"):
        save_now()
    return result


def _cache() -> dict[str, Any]:
    return {**runtime().store.stats(), "counts": runtime().counters.snapshot()}


def _model() -> dict[str, Any]:
    return {
        "identity": loaded.session.identity if loaded.session else None,
        "family": loaded.family or None,
        "eligible": None if loaded.key is None else loaded.session is not None,
        "reason": loaded.reason or None,
    }
