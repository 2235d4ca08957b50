"""Start of the server process, and its parts of the status."""

from __future__ import annotations

from typing import Any

from ...config import Settings
from ...patching import report
from ..seeing import add_sections
from .engines import engines


def start(settings: Settings) -> None:
    """Called by the registry before the first patch of this host is applied."""
    add_sections()
    report.add_section("model", _model)


def _model() -> dict[str, Any]:
    models = [engine.describe() for engine in engines()]
    nothing = {"identity": None, "family": None, "eligible": None, "reason": "no model loaded"}
    return {**(models[-1] if models else nothing), "loaded": models}
