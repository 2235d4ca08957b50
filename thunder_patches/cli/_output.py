"""What all commands share in what they print: widths, ages, progress, JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PIPED_WIDTH = 140


def console(*, markup: bool = False) -> Console:
    """Standard output: the terminal's width, or one that leaves lines whole in a file or pipe.

    markup: whether ``[red]`` in a text is a colour; a text that isn't ours may hold such by chance.
    """
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, markup=markup, width=None if known else PIPED_WIDTH)


def tell(value: Any) -> None:
    """`value` as JSON."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


Tick = Callable[[int, int | None, str], None]
"""Called with what is done, of how many (None: as before), and what is done now ("": as before)."""


@contextmanager
def progress(what: str, *, quiet: bool = False) -> Iterator[Tick]:
    """A bar on standard error; none when that is no terminal, or with `quiet`."""
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn())
    on = Console(stderr=True)
    bar = Progress(*columns, TimeRemainingColumn(), console=on, disable=quiet or not on.is_terminal)
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, now: bar.update(
            task, completed=done, total=total, description=now or None
        )


def ago(past: float) -> str:
    """``12 s ago``, ``3 min ago``, ``5 h ago``, ``2 days ago``."""
    for length, name in ((86400 * 2, "days"), (3600, "h"), (60, "min")):
        if past >= length:
            return f"{past / (86400 if name == 'days' else length):.0f} {name} ago"
    return f"{max(past, 0):.0f} s ago"
