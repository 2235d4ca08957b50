"""What became of a prompt's lookup, told and counted the same way on every host."""

from __future__ import annotations

from dataclasses import dataclass

from ..observe.history import Seen
from .runtime import runtime


@dataclass
class Outcome:
    """The figures of ``usage``: tokens really skipped, how, and who had them."""

    cached_tokens: int = 0
    skip: str = "none"
    source: str | None = None
    seen: Seen | None = None
    """Its place among the last requests, once it is counted."""
    codec: str | None = None
    """What the state went through, where that isn't what the store does."""

    @property
    def lossy(self) -> str | None:
        """The lossy codec that the restored state went through, if any."""
        if self.codec is not None:
            return self.codec
        return runtime().lossy if self.source in ("ram", "ssd") else None


def count(outcome: Outcome, total: int) -> None:
    """Count a prompt of ``total`` tokens."""
    counters, skipped = runtime().counters, outcome.cached_tokens
    name = outcome.skip if outcome.skip != "none" else "partial" if skipped else "miss"
    counters.add(name)
    counters.add("tokens_skipped", skipped)
    counters.add("tokens_computed", total - skipped)
    outcome.seen = runtime().history.add(total, skipped, outcome.skip, outcome.source)
