"""What a host process has one of: settings, counters, the store."""

from __future__ import annotations

import atexit
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from ..cache.budget import disk_budget
from ..cache.store import CacheStore
from ..codec.calibration import Shelf
from ..codec.policy import Policy
from ..config import Settings, settings
from ..handoff.shelf import Shelf as Contexts
from ..observe.counters import Counters
from ..observe.history import History
from .activity import Activity

_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True)
class Runtime:
    settings: Settings
    counters: Counters
    store: CacheStore
    codec: Policy | None = None
    contexts: Contexts | None = None
    """Where contexts are kept by id or name."""
    history: History = field(default_factory=History)
    activity: Activity = field(default_factory=Activity)

    def variant(self) -> str:
        """What separates lossy blocks from exact ones: part of the keys, so that neither finds the other."""
        if self.codec is None or not self.codec.allows_lossy:
            return ""
        return f" lossy={self.codec.mode}/{self.codec.quality}"

    @property
    def lossy(self) -> str | None:
        """Name of the lossy codec that restored state may have gone through, if any."""
        return self.codec.lossy if self.codec is not None else None


@cache
def runtime() -> Runtime:
    """The process's runtime, made on first use and closed at exit."""
    chosen = settings()
    counters = Counters()
    codec = Policy(
        chosen.codec,  # type: ignore[arg-type]
        quality=chosen.codec_quality,  # type: ignore[arg-type]
        shelf=Shelf(Path(chosen.cache_dir) / "calibrations"),
        counts=counters,
    )
    folder = Path(chosen.cache_dir) / "v1"
    activity = Activity()
    contexts = Contexts(folder / "contexts")
    store = CacheStore(
        folder if chosen.ssd_cache else None,
        disk_budget=disk_budget(chosen.cache_max_gb, folder),
        ram_budget=ram_budget(chosen),
        prefetch=chosen.prefetch,
        codec=codec,
        counters=counters,
        quiet=activity.quiet,
        kept=contexts.kept,
    )
    atexit.register(store.close)
    return Runtime(chosen, counters, store, codec, contexts, activity=activity)


def ram_budget(chosen: Settings) -> int:
    """Bytes of RAM for hot blocks: as set, else 5 % of the memory that is free now, 4 GiB at most."""
    if chosen.ram_cache_mb is not None:
        return int(chosen.ram_cache_mb) * _MIB
    import psutil

    return min(4 * _GIB, psutil.virtual_memory().available // 20)
