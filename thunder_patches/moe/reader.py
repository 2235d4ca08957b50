"""Reads many pieces of files at once, straight into the buffers they are for.

Files stay open, so one that is deleted or replaced is still read as it was. One that is written
to, or cut short, is noticed before its bytes are used.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from thunder_patches.moe.checkpoint import same_file

THREADS = 4
PIECE_BYTES = 4 << 20
"""A longer read is cut, so that threads share it."""
_IOV_MAX = 512


class StreamingError(RuntimeError):
    """Experts can't be read: the request that needs them fails, the server goes on."""


@dataclass(frozen=True, slots=True)
class Read:
    """`targets`, filled one after the other with the bytes of `file` from `offset` on."""

    file: OpenFile
    offset: int
    targets: Sequence[memoryview]
    nbytes: int


class OpenFile:
    """A checkpoint file, open for reading as long as this object lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self._then = os.fstat(self.fd)
        self.size = self._then.st_size
        if hasattr(os, "posix_fadvise"):
            # The kernel would read on behind each expert, and put others out for what it found.
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    def check(self) -> None:
        """Raise `StreamingError` if the file was written to since it was opened."""
        try:
            now = os.fstat(self.fd)
        except OSError as error:
            raise StreamingError(f"{self.path}: {error.strerror or error}") from error
        if not same_file(self._then, now):
            raise StreamingError(
                f"{self.path} changed under the running server: it had {self.size} bytes, it has "
                f"{now.st_size}, written at {now.st_mtime:.0f}. Load the model again."
            )


class Pool:
    """Threads that read. The calling thread does its share, so one thread needs no pool."""

    def __init__(self, threads: int = THREADS) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "thunder-experts") if threads > 1 else None

    def read(self, reads: Sequence[Read]) -> None:
        """Do all `reads`; returns when the last byte is there.

        Raises:
            StreamingError: a file is too short, or the disk fails. Targets are then half filled.
        """
        shares = self._shares(reads)
        waiting: list[Future[None]] = []
        if self._pool is not None:
            waiting = [self._pool.submit(_read_all, share) for share in shares[1:]]
        failure: Exception | None = None
        for work in (lambda: _read_all(shares[0]), *(future.result for future in waiting)):
            # Wait for every thread, whatever happens: their targets must not be used meanwhile.
            try:
                work()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _shares(self, reads: Sequence[Read]) -> list[list[Read]]:
        """`reads` in as many parts as there are threads, of about the same number of bytes."""
        total = sum(read.nbytes for read in reads)
        count = min(self.threads, len(reads), 1 + total // (256 << 10))
        shares: list[list[Read]] = [[] for _ in range(max(1, count))]
        done = 0
        for read in reads:
            shares[min(len(shares) - 1, done * len(shares) // max(1, total))].append(read)
            done += read.nbytes
        return shares

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)


def _read_all(reads: list[Read]) -> None:
    for read in reads:
        _read(read)


def _read(read: Read) -> None:
    done = 0
    targets = list(read.targets)
    while done < read.nbytes:
        try:
            count = _preadv(read.file.fd, targets[:_IOV_MAX], read.offset + done)
        except OSError as error:
            if error.errno == errno.EINTR:
                continue
            raise StreamingError(f"{read.file.path}: {error.strerror or error}") from error
        if count == 0:
            raise StreamingError(
                f"{read.file.path}: expected {read.nbytes} bytes at {read.offset}, found {done}: "
                "the file was cut short"
            )
        done += count
        while targets and count >= len(targets[0]):
            count -= len(targets.pop(0))
        if count:
            targets[0] = targets[0][count:]


def _preadv(fd: int, targets: list[memoryview], offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, targets, offset)
    data = os.pread(fd, len(targets[0]), offset)
    targets[0][: len(data)] = data
    return len(data)
