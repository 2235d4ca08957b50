"""Start of the server process, and its parts of the status."""

from __future__ import annotations

import gc
from typing import Any

from ...config import Settings
from ...patching import report
from ...patching.guard import shield
from ..seeing import add_sections
from .engines import engines


def start(settings: Settings) -> None:
    """Called by the registry before the first patch of this host is applied."""
    add_sections()
    report.add_section("model", _model)
    with shield("ssd_cache", "garbage"):
        _set_apart()


def _set_apart() -> None:
    """Keep what the host's imports made out of the collector's later passes.

    A full pass over these half a million objects takes longer than a restore, and would fall into a
    request. No model is loaded yet: what the host collects when it unloads one is not among them.
    """
    gc.collect()
    gc.freeze()


def _model() -> dict[str, Any]:
    models = [engine.describe() for engine in engines()]
    nothing = {"identity": None, "family": None, "eligible": None, "reason": "no model loaded"}
    return {**(models[-1] if models else nothing), "loaded": models}
