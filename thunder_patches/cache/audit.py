"""Looking at a cache folder from outside, while servers may be using it: list, verify, clear."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from thunder_patches.cache.file import (
    BadFile,
    Codec,
    Head,
    RawCodec,
    Unwanted,
    read_head,
    read_into,
    read_record,
)
from thunder_patches.cache.folder import Folder, Found, Usage


def records(root: Path) -> list[Found]:
    """What the folder holds, by names and sizes alone, the latest used first; raises OSError."""
    found, _ = Folder(root).scan()
    return sorted(found, key=lambda file: file.stamp, reverse=True)


def head(root: Path, found: Found) -> Head:
    """A record's checked header; raises BadFile or OSError."""
    fd = Folder(root).open_record(found.ref)
    try:
        return read_head(fd)
    finally:
        os.close(fd)


def verify(root: Path, found: Found, codec: Codec | None = None) -> str | None:
    """Read a record from its first byte to its last; what is wrong with it, or None.

    codec: None checks the bytes as they are stored, without decoding them.
    """
    try:
        fd = Folder(root).open_record(found.ref)
        try:
            opened = read_head(fd)
            if opened.header.ref != found.ref:
                raise BadFile(f"expected {found.ref}, found {opened.header.ref}")
            if codec is not None:
                read_record(fd, opened, codec)
            else:
                read_into(fd, opened, {}, _AnyCodec())
        finally:
            os.close(fd)
    except (BadFile, Unwanted, OSError) as error:
        return str(error)
    return None


def clear(root: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
    """Delete all records and what was set aside; returns the bytes freed.

    progress: called with the records done and their number. A server that runs on the folder goes
    on, and misses. Raises OSError, or filelock's Timeout when the folder is locked for long.
    """
    folder = Folder(root)
    with folder.exclusive():
        found, before = folder.scan()
        for done, file in enumerate(found, 1):
            with suppress(OSError):
                folder.remove(file.ref)
            progress(done, len(found))
        folder.remove_bad()
        after = folder.scan()[1]
        seen = folder.read_usage() or Usage(0, 0)
        folder.write_usage(Usage(after, seen.changes + 1))
    return before - after


class _AnyCodec(RawCodec):
    allows_lossy = True
