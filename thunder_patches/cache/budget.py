"""How large the cache folder may grow where nobody has said so."""

from __future__ import annotations

import shutil
from pathlib import Path

_GIB = 1 << 30


def disk_budget(max_gb: float | None, folder: Path) -> int:
    """Bytes that the cache folder may hold: as set, else 10 % of its disk, 50 GiB at most."""
    if max_gb is not None:
        return int(max_gb * _GIB)
    there = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
    return min(50 * _GIB, shutil.disk_usage(there).total // 10)
