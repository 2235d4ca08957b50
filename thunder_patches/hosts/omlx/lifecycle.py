"""Start of the server process, and its parts of the status."""

from __future__ import annotations

from typing import Any

from ...config import Settings
from ...patching import report
from ..runtime import runtime
from .engines import engines


def start(settings: Settings) -> None:
    """Called by the registry before the first patch of this host is applied."""
    report.add_section("cache", _cache)
    report.add_section("model", _model)


def _cache() -> dict[str, Any]:
    return {**runtime().store.stats(), "counts": runtime().counters.snapshot()}


def _model() -> dict[str, Any]:
    models = [engine.describe() for engine in engines()]
    nothing = {"identity": None, "family": None, "eligible": None, "reason": "no model loaded"}
    return {**(models[-1] if models else nothing), "loaded": models}
