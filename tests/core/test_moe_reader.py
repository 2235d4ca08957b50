"""Reading pieces of files into buffers: every byte in its place, every failure with its reason."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from thunder_patches.moe.reader import OpenFile, Pool, Read, StreamingError

SIZE = 3 << 20


@pytest.fixture
def data() -> bytes:
    return random.Random(1).randbytes(SIZE)


@pytest.fixture
def file(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "experts"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("threads", [1, 4])
def test_every_byte_in_its_place(file: Path, data: bytes, threads: int) -> None:
    opened, pool, rng = OpenFile(file), Pool(threads), random.Random(2)
    reads, expected = [], []
    for _ in range(40):
        sizes = [rng.choice([1, 4, 4096, 100_000]) for _ in range(rng.choice([1, 3, 700]))]
        sizes = sizes if sum(sizes) < SIZE else sizes[:3]
        start = rng.randrange(SIZE - sum(sizes))
        buffers = [bytearray(size) for size in sizes]
        reads.append(Read(opened, start, [memoryview(b) for b in buffers], sum(sizes)))
        expected.append((start, buffers))
    pool.read(reads)
    for start, buffers in expected:
        for buffer in buffers:
            assert buffer == data[start : start + len(buffer)]
            start += len(buffer)
    pool.close()


def test_nothing_to_read(file: Path) -> None:
    Pool().read([])


def whole(opened: OpenFile, offset: int = 0, nbytes: int = SIZE) -> Read:
    return Read(opened, offset, [memoryview(bytearray(nbytes))], nbytes)


def test_cut_short(file: Path) -> None:
    opened, pool = OpenFile(file), Pool()
    os.truncate(file, SIZE // 2)
    with pytest.raises(StreamingError, match=r"experts: expected \d+ bytes .* was cut short"):
        pool.read([whole(opened, 0, 1000), whole(opened, SIZE - 1000, 1000), whole(opened)])
    with pytest.raises(StreamingError, match="changed under the running server"):
        opened.check()


def test_written_to(file: Path, data: bytes) -> None:
    opened = OpenFile(file)
    opened.check()
    then = file.stat()
    with file.open("r+b") as stream:
        stream.write(b"x")
    os.utime(file, ns=(then.st_atime_ns, then.st_mtime_ns + 1))
    with pytest.raises(StreamingError, match=f"had {SIZE} bytes"):
        opened.check()


def test_deleted_and_replaced(file: Path, data: bytes) -> None:
    """The open file still is what it was."""
    opened = OpenFile(file)
    file.unlink()
    file.write_bytes(bytes(SIZE))
    read = whole(opened)
    Pool().read([read])
    opened.check()
    assert bytes(read.targets[0]) == data


def test_a_failing_disk(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = OpenFile(file)

    def broken(*args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StreamingError, match="Input/output error"):
        Pool().read([whole(opened)])


def test_without_preadv(file: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv")
    first, second = bytearray(1000), bytearray(SIZE - 1000)
    Pool().read([Read(OpenFile(file), 0, [memoryview(first), memoryview(second)], SIZE)])
    assert first + second == data


def test_files_are_closed(file: Path) -> None:
    fd = OpenFile(file).fd
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
