"""Contexts put on the shelf and taken off it, with the room that they take in the cache accounted for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from thunder_patches.cache.record import Kind
from thunder_patches.cache.store import CacheStore

from .context import Context, Payload, Pinned
from .parcel import Packed, write
from .refusal import Refused
from .shelf import Shelf

SHARE = 0.5
"""Of the disk budget, what contexts may keep from being evicted."""

_NO_ROOM = "the cache has no room for the state of this context"


def keep_exact(
    store: CacheStore, shelf: Shelf, context: Context, wanted: Sequence[tuple[Kind, bytes, bytes]]
) -> Context:
    """Keep a context and the records (kind, key, parent) that hold its state.

    Raises:
        Refused: 507, no room, or one of them has gone.
    """
    pins = tuple(Pinned(k, key.hex(), parent.hex(), store.size(key)) for k, key, parent in wanted)
    context = replace(context, pins=pins)
    admit(store, shelf, context.size)
    shelf.put(context)
    # What is evicted from now on is not one of these; what was evicted just before is seen here.
    if not store.all_there(wanted):
        shelf.release(context)
        raise Refused(507, "budget", _NO_ROOM)
    return context


def keep_coded(
    store: CacheStore, shelf: Shelf, context: Context, packed: Sequence[Packed]
) -> Context:
    """Keep a context with its state in a file of its own.

    Raises:
        Refused: 507, no room.
        OSError: the file can't be written.
    """
    reserved = 0
    temporary = shelf.temporary()
    try:
        write(temporary, context, packed)
        context = replace(context, payload=Payload(temporary.stat().st_size, digest(temporary)))
        admit(store, shelf, context.size)
        if not store.reserve(context.size):
            raise Refused(507, "budget", _NO_ROOM)
        reserved = context.size
        shelf.put(context, temporary)
    except BaseException:
        temporary.unlink(missing_ok=True)
        store.give_back(reserved)
        raise
    return context


def release(store: CacheStore, shelf: Shelf, context: Context, holder: str | None = None) -> bool:
    """As `Shelf.release`; the room that its state took is free again."""
    gone = shelf.release(context, holder)
    if gone and context.payload is not None:
        store.give_back(context.payload.size)
    return gone


def admit(store: CacheStore, shelf: Shelf, size: int) -> None:
    """Whether contexts may keep so many bytes more, once those that have ended are gone.

    Raises:
        Refused: 507.
    """
    if freed := shelf.sweep():
        store.give_back(freed)
    budget = int(store.stats()["ssd"]["budget_bytes"] * SHARE)
    if (total := shelf.held() + size) > budget:
        raise Refused(
            507,
            "budget",
            f"contexts may keep {budget} bytes; with this one they would keep {total}",
        )


def digest(file: Path) -> str:
    """sha256 of a file; raises OSError."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
