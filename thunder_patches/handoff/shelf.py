"""Where contexts stand: a folder of descriptors that all processes on one cache folder share.

    handoff/<id>.json            named/<owner>/<name>.json          descriptors
    handoff/<id>.safetensors                                        state that isn't exact
    tmp/                                                            files being written
    lock

A descriptor gets its name in one step, after its payload has one, and loses it first. What a killed
process left behind is removed by `sweep`.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from filelock import FileLock

from .context import BadContext, Context
from .names import checked_id, checked_name
from .refusal import Refused

LOCK_SECONDS = 10.0
STALE_SECONDS = 3600.0
"""A file that was not finished for so long has no writer any more."""
PAYLOAD = ".safetensors"
_MAX_DESCRIPTOR = 64 << 20


@dataclass(frozen=True, slots=True)
class _Need:
    """What one descriptor has others keep: as little of it as that takes, since there may be many."""

    file: Path
    stamp: tuple[int, int, int]
    expires: float | None
    pins: tuple[tuple[bytes, int], ...]
    payload: int

    @classmethod
    def of(cls, file: Path, stamp: tuple[int, int, int], context: Context) -> _Need:
        pins = tuple((bytes.fromhex(pin.key), pin.size) for pin in context.pins)
        payload = context.payload.size if context.payload is not None else 0
        return cls(file, stamp, context.expires, pins, payload)

    def expired(self, now: float) -> bool:
        return self.expires is not None and now >= self.expires


class Shelf:
    """The contexts of one cache folder. Methods may be called from any thread of any process.

    All may raise OSError, and filelock's Timeout where they change something.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mutex = threading.Lock()
        self._known: dict[Path, _Need] = {}
        self._kept: frozenset[bytes] = frozenset()

    # Using

    def get(self, id: object, owner: str) -> Context:
        """A handoff.

        Raises:
            Refused: 404 unknown, 403 of another owner, 409 damaged, 410 expired.
        """
        known = checked_id(id)
        context = self._load(self._handoff(known), f"handoff {known[:8]}...")
        if context.id != known or context.named:
            raise Refused(409, "tampered", f"handoff {known[:8]}...: its descriptor is another's")
        if context.owner != owner:
            raise Refused(
                403, "owner", f"handoff {known[:8]}...: expected the API key that made it"
            )
        return self._lasting(context, f"handoff {known[:8]}...")

    def named(self, name: object, owner: str) -> Context:
        """A named cache.

        Raises:
            Refused: 400 no name, 404 unknown, 409 damaged, 410 expired.
        """
        known = checked_name(name)
        context = self._load(self._named(owner, known), f"cache {known}")
        if (context.id, context.owner, context.named) != (known, owner, True):
            raise Refused(409, "tampered", f"cache {known}: its descriptor is another's")
        return self._lasting(context, f"cache {known}")

    def payload(self, context: Context) -> Path:
        """The file with the state of a context that isn't exact."""
        return self._file(context).with_suffix(PAYLOAD)

    def names(self, owner: str | None = None) -> list[Context]:
        """The named caches of one owner, or of all, by name; damaged ones are left out."""
        folders = [owner] if owner is not None else _list(self.folder / "named")
        found = [
            context
            for folder in folders
            for file in _list(self.folder / "named" / folder)
            if (context := self._try(self.folder / "named" / folder / file)) is not None
        ]
        return sorted(found, key=lambda context: (context.id, context.owner))

    def handoffs(self) -> list[Context]:
        """All handoffs, the oldest first."""
        folder = self.folder / "handoff"
        found = [context for file in _list(folder) if (context := self._try(folder / file))]
        return sorted(found, key=lambda context: context.created)

    def pins(self) -> dict[bytes, int]:
        """Keys of the records that must stay in the store, and the bytes of each."""
        now = time.time()
        return {key: n for need in self._needs() if not need.expired(now) for key, n in need.pins}

    def kept(self) -> frozenset[bytes]:
        """The keys of `pins`; the same set as before while they are the same."""
        kept = frozenset(self.pins())
        with self._mutex:
            if kept != self._kept:
                self._kept = kept
            return self._kept

    def held(self) -> int:
        """Bytes that contexts keep from going: records, each counted once, and payloads."""
        return sum(self.pins().values()) + sum(need.payload for need in self._needs())

    def counts(self) -> dict[str, int]:
        """How many handoffs and named caches there are."""
        handoffs = sum(need.file.parent.name == "handoff" for need in self._needs())
        return {"handoffs": handoffs, "named": len(self._needs()) - handoffs}

    # Changing

    def put(self, context: Context, payload: Path | None = None) -> None:
        """Give a context its place; one of the same name is replaced.

        Args:
            payload: a file made by `temporary`, which moves.
        """
        file = self._file(context)
        with self._exclusive():
            _make(file.parent)
            if payload is not None:
                os.replace(payload, self.payload(context))
            self._write(file, context)

    def hold(self, context: Context, holder: str) -> Context:
        """Note one more who needs the handoff."""
        with self._exclusive():
            current = self.get(context.id, context.owner)
            held = current.held_by(*current.holders, holder)
            self._write(self._file(held), held)
        return held

    def release(self, context: Context, holder: str | None = None) -> bool:
        """One holder, or all, need it no longer; True once it is gone."""
        with self._exclusive():
            current = self._try(self._file(context))
            if current is None:
                return True
            left = tuple(h for h in current.holders if holder is not None and h != holder)
            if left:
                self._write(self._file(current), replace(current, holders=left))
                return False
            self._remove(current)
        return True

    def temporary(self) -> Path:
        """A name for a file that `put` will move to its place."""
        _make(self.folder / "tmp")
        return self.folder / "tmp" / f"{os.getpid()}-{uuid4().hex}.part"

    def sweep(self, now: float | None = None) -> int:
        """Remove what has expired, and what killed processes left; returns the payloads' bytes."""
        now = time.time() if now is None else now
        if not self.folder.is_dir():
            return 0
        freed = 0
        with self._exclusive():
            for need in self._needs():
                if need.expired(now):
                    _unlink(need.file)
                    _unlink(need.file.with_suffix(PAYLOAD))
                    freed += need.payload
            names = set(_list(self.folder / "handoff"))
            for name in names:
                if name.endswith(PAYLOAD) and Path(name).with_suffix(".json").name not in names:
                    _unlink(self.folder / "handoff" / name)
            for name in _list(self.folder / "tmp"):
                if _is_stale(self.folder / "tmp" / name, now):
                    _unlink(self.folder / "tmp" / name)
        return freed

    # Files

    def _handoff(self, id: str) -> Path:
        return self.folder / "handoff" / f"{id}.json"

    def _named(self, owner: str, name: str) -> Path:
        return self.folder / "named" / owner / f"{name}.json"

    def _file(self, context: Context) -> Path:
        if context.named:
            return self._named(context.owner, checked_name(context.id))
        return self._handoff(checked_id(context.id))

    def _load(self, file: Path, what: str) -> Context:
        try:
            return Context.loads(_read(file))
        except FileNotFoundError:
            raise Refused(404, "unknown", f"{what} is not known here, or was released") from None
        except (BadContext, OSError) as error:
            raise Refused(409, "tampered", f"{what} cannot be used: {error}") from error

    def _try(self, file: Path) -> Context | None:
        if file.suffix != ".json":
            return None
        with suppress(BadContext, OSError):
            return Context.loads(_read(file))
        return None

    def _lasting(self, context: Context, what: str) -> Context:
        now = time.time()
        if context.expired(now):
            assert context.expires is not None
            raise Refused(410, "expired", f"{what} expired {now - context.expires:.0f} s ago")
        return context

    def _needs(self) -> list[_Need]:
        """What each context needs; only new and changed descriptors are read."""
        folders = [self.folder / "handoff"]
        folders += [self.folder / "named" / owner for owner in _list(self.folder / "named")]
        found: dict[Path, _Need] = {}
        with self._mutex:
            for file in (f / name for f in folders for name in _list(f) if name.endswith(".json")):
                try:
                    status = os.lstat(file)
                except OSError:
                    continue
                stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
                need = self._known.get(file)
                if need is None or need.stamp != stamp:
                    context = self._try(file)
                    need = _Need.of(file, stamp, context) if context is not None else None
                if need is not None:
                    found[file] = need
            self._known = found
        return list(found.values())

    def _write(self, file: Path, context: Context) -> None:
        temporary = self.temporary()
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as out:
                out.write(context.dumps())
            os.replace(temporary, file)
        except BaseException:
            _unlink(temporary)
            raise

    def _remove(self, context: Context) -> None:
        _unlink(self._file(context))
        _unlink(self.payload(context))

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        _make(self.folder)
        lock = FileLock(self.folder / "lock", mode=0o600, thread_local=False)
        with lock.acquire(timeout=LOCK_SECONDS, poll_interval=0.002):
            yield


def _read(file: Path) -> bytes:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as opened:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_DESCRIPTOR:
            raise BadContext("expected a regular file of a descriptor's size")
        return opened.read()


def _make(folder: Path) -> None:
    """The folder, and those above it that are missing, for this user alone."""
    if not folder.is_dir():
        _make(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)


def _list(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_stale(file: Path, now: float) -> bool:
    try:
        if now - file.stat().st_mtime > STALE_SECONDS:
            return True
        os.kill(int(file.name.partition("-")[0]), 0)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, ValueError):
        return False
    return False


def _unlink(file: Path) -> None:
    with suppress(FileNotFoundError):
        os.unlink(file)
