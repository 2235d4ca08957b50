"""Progress on standard error: a bar in a terminal, one line a step elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Steps:
    """Counts steps as they are done; a context manager."""

    def __init__(self, total: int) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._total = total
        self._task = self._bar.add_task("", total=total)
        self._lines = not sys.stderr.isatty()
        self._done = 0

    def now(self, what: str) -> None:
        """Say what begins."""
        self._bar.update(self._task, description=what)

    def done(self, what: str) -> None:
        """One step is over."""
        self._done += 1
        self._bar.update(self._task, advance=1, description=what)
        if self._lines:
            print(f"{self._done}/{self._total} {what}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if not self._lines:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._lines:
            self._bar.stop()


def say(line: str) -> None:
    """One line on standard error."""
    print(line, file=sys.stderr, flush=True)
