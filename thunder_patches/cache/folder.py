"""The store's folder: names, permissions, what processes that share it agree on, and bad files.

    blocks/<ab>/<key>-<parent>.safetensors                       ab: the first two digits of the key
    snapshots/<ab>/<parent>/<tail>-<key>[-end].safetensors       ab: those of the parent
    tmp/<process>/                                               files being written
    bad/                                                         files set aside
    lock  usage                                                  see `Folder.exclusive`

The names alone tell the tree of prefixes, so that nothing but names and sizes is read at start.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import struct
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from os.path import basename, dirname, join
from pathlib import Path

import xxhash
from filelock import FileLock, Timeout

from thunder_patches.cache.file import open_file
from thunder_patches.cache.record import Ref

LOCK_SECONDS = 10.0
MAX_BAD_FILES = 32

_HEX = "([0-9a-f]{32})"
_BLOCK_NAME = re.compile(rf"{_HEX}-{_HEX}\.safetensors")
_SNAPSHOT_NAME = re.compile(rf"(0|[1-9][0-9]{{0,8}})-{_HEX}(-end)?\.safetensors")
_USAGE = struct.Struct("<QQ8s")


@dataclass(frozen=True, slots=True)
class Found:
    """A record's file as a scan found it: size in bytes, stamp (its mtime) in ns."""

    ref: Ref
    size: int
    stamp: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What the processes on one folder share: bytes used or reserved, and a count of changes."""

    bytes: int
    changes: int


class Outside(OSError):
    """A directory of the folder is a link, which may lead anywhere."""


class Folder:
    """One directory tree. Every method may raise OSError; `exclusive` also filelock's Timeout."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self._mutex = threading.Lock()
        self._lock = FileLock(join(self.root, "lock"), mode=0o600, thread_local=False)
        self._own: FileLock | None = None
        self._own_name = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._numbers = count()
        self._checked: set[str] = set()

    # Names

    def path(self, ref: Ref) -> str:
        key, parent = ref.key.hex(), ref.parent.hex()
        if ref.kind == "block":
            return join(self.root, "blocks", key[:2], f"{key}-{parent}.safetensors")
        end = "-end" if ref.end else ""
        name = f"{ref.tail_length}-{key}{end}.safetensors"
        return join(self.root, "snapshots", parent[:2], parent, name)

    def snapshots(self, parent: bytes) -> list[Ref]:
        """The snapshots after `parent` that are in the folder now, by their names."""
        digits = parent.hex()
        folder = join(self.root, "snapshots", digits[:2], digits)
        try:
            names = os.listdir(folder)
            self._check_inside(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [ref for name in names if (ref := _snapshot_ref(name, parent)) is not None]

    def find(self, ref: Ref) -> Found | None:
        """The record's file, when a regular file has its name."""
        path = self.path(ref)
        try:
            status = os.lstat(path)
            self._check_inside(dirname(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return Found(ref, status.st_size, status.st_mtime_ns)

    # Opening and closing

    def open(self) -> None:
        """Make the folder and this process's part of it; remove what dead processes left."""
        os.makedirs(self.root, 0o700, exist_ok=True)
        with suppress(OSError):
            os.chmod(self.root, 0o700)
        self._checked.clear()
        for name in ("blocks", "snapshots", "bad", "tmp"):
            self._make_inside(join(self.root, name))
        with self.exclusive():
            own = join(self.root, "tmp", self._own_name)
            if self._own is None or not os.path.isdir(own):
                self._make_inside(own)
                self._own = FileLock(join(own, "owner"), mode=0o600, thread_local=False)
                self._own.acquire(timeout=0)
            self.remove_leftovers()

    def close(self) -> None:
        """Remove this process's part of the folder."""
        if self._own is None:
            return
        with self.exclusive():
            self._own.release()
            self._own = None
            shutil.rmtree(join(self.root, "tmp", self._own_name), ignore_errors=True)

    def remove_leftovers(self) -> None:
        """Remove the temporary files of processes that are gone. The caller holds `exclusive`.

        A living process holds the lock of its directory; one that died, however hard, doesn't.
        """
        for entry in os.scandir(join(self.root, "tmp")):
            if entry.name == self._own_name:
                continue
            if entry.is_dir(follow_symlinks=False):
                owner = FileLock(join(entry.path, "owner"), mode=0o600, thread_local=False)
                with suppress(Timeout, OSError):
                    owner.acquire(timeout=0)
                    try:
                        shutil.rmtree(entry.path, ignore_errors=True)
                    finally:
                        owner.release()
            else:
                with suppress(OSError):
                    os.unlink(entry.path)

    # What processes share

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the folder against other threads and processes, to read and change `usage`."""
        with self._mutex, self._lock.acquire(timeout=LOCK_SECONDS, poll_interval=0.002):
            yield

    def read_usage(self) -> Usage | None:
        """The shared usage, or None when there is none yet, or none that can be trusted."""
        try:
            fd = os.open(join(self.root, "usage"), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            data = os.read(fd, _USAGE.size + 1)
        except OSError:
            return None
        finally:
            os.close(fd)
        if len(data) != _USAGE.size:
            return None
        used, changes, check = _USAGE.unpack(data)
        return Usage(used, changes) if check == _check(data) else None

    def write_usage(self, usage: Usage) -> None:
        data = _USAGE.pack(max(usage.bytes, 0), usage.changes, b"")
        data = _USAGE.pack(max(usage.bytes, 0), usage.changes, _check(data))
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(join(self.root, "usage"), flags, 0o600)
        try:
            os.pwrite(fd, data, 0)
        finally:
            os.close(fd)

    # Files

    def create_temporary(self, size: int) -> tuple[int, str]:
        """A new file for a record: descriptor and path.

        It has its final size at once, so that a scan by another process counts it in full.
        """
        path = join(self.root, "tmp", self._own_name, f"{next(self._numbers)}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        try:
            os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        return fd, path

    def open_record(self, ref: Ref) -> int:
        """A descriptor to read the record's file; raises BadFile when it is no regular file."""
        path = self.path(ref)
        self._check_inside(dirname(path))
        return open_file(path)

    def publish(self, temporary: str, ref: Ref) -> None:
        """Give a written file its name, in one step."""
        path = self.path(ref)
        self._make_inside(dirname(path))
        try:
            os.rename(temporary, path)
        except FileNotFoundError:
            # Its directory went away with another process's last snapshot in it.
            self._checked.discard(dirname(path))
            self._make_inside(dirname(path))
            os.rename(temporary, path)

    def remove(self, ref: Ref) -> None:
        """Delete the record's file, and its directory when that was the last snapshot in it."""
        path = self.path(ref)
        os.unlink(path)
        if ref.kind == "snapshot":
            with suppress(OSError):
                os.rmdir(dirname(path))

    def set_aside(self, ref: Ref) -> bool:
        """Move whatever has the record's name to bad/, or delete it; False when neither works.

        Raises FileNotFoundError when nothing has that name.
        """
        path = self.path(ref)
        target = join(self.root, "bad", f"{uuid.uuid4().hex[:8]}-{basename(path)}")
        try:
            self._make_inside(dirname(target))
            os.rename(path, target)
        except FileNotFoundError:
            raise
        except OSError:
            return _delete(path)
        self._bound_bad()
        return True

    def remove_bad(self) -> int:
        """Delete all that was set aside; returns the bytes that this freed."""
        bad = join(self.root, "bad")
        before = _size(bad)
        for entry in os.scandir(bad):
            _delete(entry.path)
        return before - _size(bad)

    def scan(self) -> tuple[list[Found], int]:
        """All records, and the bytes of everything in the folder.

        tmp/ comes first: a file that gets its name during the scan is then seen, and counted once.
        """
        moving: set[int] = set()
        total = _size(join(self.root, "tmp"), moving)
        found: list[Found] = []
        for path, status in _files(self.root, skip=join(self.root, "tmp")):
            if status.st_ino not in moving:
                total += status.st_size
            if stat.S_ISREG(status.st_mode) and (ref := self._ref(path)) is not None:
                found.append(Found(ref, status.st_size, status.st_mtime_ns))
        return found, total

    def _ref(self, path: str) -> Ref | None:
        """The record that a file at `path` must hold, if its place is that of a record."""
        parent_path, name = os.path.split(path)
        ref = None
        if match := _BLOCK_NAME.fullmatch(name):
            key, parent = map(bytes.fromhex, match.groups())
            ref = Ref("block", key, parent) if key != parent else None
        elif re.fullmatch(_HEX, basename(parent_path)):
            ref = _snapshot_ref(name, bytes.fromhex(basename(parent_path)))
        return ref if ref is not None and self.path(ref) == path else None

    def _make_inside(self, path: str) -> None:
        """Make the directory `path` of the folder, and those above it."""
        if path not in self._checked:
            for at in self._way(path):
                with suppress(FileExistsError):
                    os.mkdir(at, 0o700)
            self._check_inside(path)

    def _check_inside(self, path: str) -> None:
        """Raise Outside when a link on the way leads out of the folder; looks once at each path."""
        if path not in self._checked:
            for at in self._way(path):
                if stat.S_ISLNK(os.lstat(at).st_mode):
                    raise Outside(errno.ELOOP, "expected a directory, found a link", at)
            self._checked.add(path)

    def _way(self, path: str) -> Iterator[str]:
        """The directories from the folder's root, excluded, down to `path`."""
        at = path.find(os.sep, len(self.root) + 1)
        while at > 0:
            yield path[:at]
            at = path.find(os.sep, at + 1)
        yield path

    def _bound_bad(self) -> None:
        bad = join(self.root, "bad")
        with suppress(OSError):
            entries = sorted(os.scandir(bad), key=lambda e: e.stat(follow_symlinks=False).st_ctime)
            for entry in entries[:-MAX_BAD_FILES]:
                _delete(entry.path)


def _check(usage: bytes) -> bytes:
    return xxhash.xxh3_64(usage[:16]).digest()


def _snapshot_ref(name: str, parent: bytes) -> Ref | None:
    match = _SNAPSHOT_NAME.fullmatch(name)
    if match is None:
        return None
    tail, key, end = match.groups()
    return Ref("snapshot", bytes.fromhex(key), parent, int(tail), end is not None)


def _files(path: str, skip: str | None = None) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below `path`, but not below `skip`, that is no directory; follows no links."""
    folders = [path]
    while folders:
        if (folder := folders.pop()) == skip:
            continue
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    yield entry.path, entry.stat(follow_symlinks=False)
            except OSError:
                continue


def _size(path: str, inodes: set[int] | None = None) -> int:
    total = 0
    for _, status in _files(path):
        total += status.st_size
        if inodes is not None:
            inodes.add(status.st_ino)
    return total


def _delete(path: str) -> bool:
    """Delete a file, link or tree; links are not followed."""
    try:
        os.unlink(path)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)
