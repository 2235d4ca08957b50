"""What a host process shows of itself: the parts of its status, and each request's first token."""

from __future__ import annotations

import os
import time
from functools import cache
from typing import Any

from ..observe.history import SHOWN, Place
from ..observe.prefixes import Node, prefix_map
from ..patching import report
from ..pilot.fingerprints import message_text, system_prompt_hash
from .counting import Outcome
from .pilot import Chat
from .runtime import runtime
from .session import Sequence

_MAP_S = 2.0
_MAP_SHARE = 0.02
"""How old the map of prefixes may be, at least, and which share of the time may go into making it: it
walks over all records."""
_TEXT = 120
"""Characters of a message that are shown, where the user allows it."""


def add_sections() -> None:
    """Put the cache, and what the page needs beside it, into the status."""
    report.add_section("cache", _cache)
    report.add_section("process", _process, detail=True)
    report.add_section("requests", _requests, detail=True)
    report.add_section("over_time", lambda: runtime().history.over_time(), detail=True)
    report.add_section("first_tokens", lambda: runtime().history.first_tokens())
    report.add_section("prefixes", _Map().now, detail=True)


def note(outcome: Outcome, started: float, chat: Chat, place: Place | None) -> None:
    """The first token of a request is there.

    Args:
        started: ``time.perf_counter()`` when the request came. place: None where nothing is stored.
    """
    seen = outcome.seen
    if seen is not None:
        seen.miss = chat.miss.to_json(text=runtime().settings.show_text) if chat.miss else None
        seen.place = place
        runtime().history.first_token(seen, time.perf_counter() - started)


def place_of(sequence: object, tokens: int, chat: Chat) -> Place | None:
    """Where a prompt of ``tokens`` tokens lies among the blocks; None where it has no blocks."""
    if not isinstance(sequence, Sequence):
        return None
    block_tokens = sequence.session.block_tokens
    keys = sequence.keys[: tokens // block_tokens]  # it may have grown by the answer
    ends = chat.boundaries.ends if chat.boundaries is not None else ()
    hash = system_prompt_hash(chat.messages)
    blocks = (ends[0] or 0) // block_tokens if ends and hash else 0
    text = None
    if runtime().settings.show_text and chat.messages:
        text = message_text(chat.messages[-1])[:_TEXT]
    return Place(
        root=sequence.root,
        last=keys[-1] if keys else sequence.root,
        system=keys[blocks - 1] if 0 < blocks <= len(keys) else None,
        system_hash=hash,
        messages=len(chat.messages),
        text=text,
    )


def _cache() -> dict[str, Any]:
    codec = runtime().codec
    return {
        **runtime().store.stats(),
        "counts": runtime().counters.snapshot(),
        "codec": codec.describe() if codec is not None else None,
    }


def _process() -> dict[str, Any]:
    return {"pid": os.getpid(), "started": _started(), "text_shown": runtime().settings.show_text}


@cache
def _started() -> float:
    import psutil

    return float(psutil.Process().create_time())


def _requests() -> list[dict[str, Any]]:
    return [seen.to_json() for seen in runtime().history.recent(SHOWN)]


class _Map:
    """The map of cached prefixes, made anew when it is asked for and old."""

    def __init__(self) -> None:
        self._due = 0.0
        self._map: dict[str, Any] = {}

    def now(self) -> dict[str, Any]:
        begun = time.monotonic()
        if begun >= self._due:
            nodes = [
                Node(
                    listed.ref.key,
                    listed.ref.parent,
                    listed.ref.kind == "block",
                    listed.size,
                    listed.stamp,
                    listed.owners,
                    listed.in_ram,
                )
                for listed in runtime().store.listed()
            ]
            self._map = prefix_map(nodes, runtime().history.recent())
            done = time.monotonic()
            self._due = done + max(_MAP_S, (done - begun) / _MAP_SHARE)
        return self._map
