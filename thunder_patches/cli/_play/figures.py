"""Numbers as people read them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the least and the greatest of the values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Spread of ``over[i] / under[i]``, pairs of one repetition each."""
    return Spread.of([a / max(b, 1e-9) for a, b in zip(over, under, strict=True)])


def seconds(value: float) -> str:
    """``4.3 ms``, ``210 ms``, ``1.52 s``, ``38 s``."""
    if value < 0.01:
        return f"{value * 1e3:.1f} ms"
    if value < 1:
        return f"{value * 1e3:.0f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def times(value: float) -> str:
    """A ratio: ``0.98 x``, ``12.4 x``, ``310 x``."""
    if value < 10:
        return f"{value:.2f} x"
    return f"{value:.1f} x" if value < 100 else f"{value:,.0f} x"


def size(count: float) -> str:
    """Bytes in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def folder_size(folder: Path) -> int:
    """Bytes of all regular files under ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
