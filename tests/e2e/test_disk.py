"""C13: small, full, broken and read-only disks cost speed only, and the status says so."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.folder import CacheFolder
from tests.e2e.steps import MISS, counts, served
from tests.harness.fleet import Fleet
from tests.harness.models import Model, ModelFactory, text_of

GIB = 1 << 30
ONE_BLOCK = 1 << 20
"""More than any block or snapshot of these models takes, headers included."""


class Sampler:
    """Watches the folder's size while a test runs."""

    def __init__(self, folder: CacheFolder) -> None:
        self.folder = folder
        self.largest = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.largest = max(self.largest, self.folder.bytes())
            time.sleep(0.005)


def test_c13_tiny_budget(fleet: Fleet, models: ModelFactory, seed: int, tmp_path: Path) -> None:
    """Two models in turn on 2 MiB; then a restart with half of it."""
    one, two = models.get("qwen3"), models.get("llama")
    folder = CacheFolder(tmp_path / "cache")
    server = fleet.server(None, cache_dir=folder.root, env={"THUNDER_CACHE_MAX_GB": "0.002"})
    with Sampler(folder) as sampler:
        for number in range(10):
            model = (one, two)[number % 2]
            prompt = text_of(200, seed + number)
            served(fleet, server, model, prompt=prompt, cached=MISS, model=str(model.path))
        served(fleet, server, two, prompt=prompt, cached=200, model=str(two.path))
    assert 0 < sampler.largest <= 0.002 * GIB + ONE_BLOCK
    assert counts(server)["blocks_evicted"] > 0

    server.restart(THUNDER_CACHE_MAX_GB="0.001")
    with Sampler(folder) as sampler:
        for number in range(4):
            prompt = text_of(200, seed + 20 + number)
            served(fleet, server, one, prompt=prompt, cached=MISS, model=str(one.path))
    server.stop()
    assert folder.bytes() <= 0.001 * GIB + ONE_BLOCK


def test_c13_full_disk(fleet: Fleet, full: Model, seed: int, tmp_path: Path) -> None:
    """A disk smaller than the budget: requests go on, what is written stays sound."""
    with mounted(tmp_path / "disk", "size=1m"):
        env = {"THUNDER_CACHE_MAX_GB": "1"}
        server = fleet.server(full, cache_dir=tmp_path / "disk" / "cache", env=env)
        for number in range(6):
            served(fleet, server, full, prompt=text_of(250, seed + number), cached=MISS)
        served(fleet, server, full, prompt=text_of(250, seed + 5), cached=250)
        assert complaint(server.status(), server.log())
        server.restart()
        for number in range(6):
            served(fleet, server, full, prompt=text_of(250, seed + number))
        server.kill()


def test_c13_read_only(fleet: Fleet, full: Model, seed: int, tmp_path: Path) -> None:
    """A folder that can't be written is read and no more; one that can't be made is done without."""
    disk = tmp_path / "disk"
    with mounted(disk, "size=16m"):
        server = fleet.server(full, cache_dir=disk / "cache")
        known = text_of(150, seed)
        served(fleet, server, full, prompt=known, cached=MISS)
        server.stop()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        server.start()
        served(fleet, server, full, prompt=known, cached=range(0, 151))
        new = text_of(150, seed + 1)
        served(fleet, server, full, prompt=new, cached=MISS)
        served(fleet, server, full, prompt=new, cached=150)
        assert complaint(server.status(), server.log())
        server.kill()
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    server = fleet.server(full, cache_dir=blocked / "cache")
    for cached in (MISS, 150):
        served(fleet, server, full, prompt=known, cached=cached)
    assert complaint(server.status(), server.log())


def test_c13_undeletable_file(fleet: Fleet, full: Model, seed: int, tmp_path: Path) -> None:
    """Eviction goes round a file that can't be deleted."""
    folder = CacheFolder(tmp_path / "cache")
    server = fleet.server(full, cache_dir=folder.root, env={"THUNDER_CACHE_MAX_GB": "0.002"})
    served(fleet, server, full, prompt=text_of(200, seed), cached=MISS)
    server.stop()
    stuck = folder.blocks()[-1]
    if subprocess.run(["chattr", "+i", str(stuck)], capture_output=True).returncode != 0:
        pytest.skip("this file system or user can't make a file immutable")
    try:
        server.start()
        with Sampler(folder) as sampler:
            for number in range(1, 8):
                served(fleet, server, full, prompt=text_of(200, seed + number), cached=MISS)
        assert sampler.largest <= 0.002 * GIB + ONE_BLOCK
        assert counts(server)["blocks_evicted"] > 0
    finally:
        server.kill()
        subprocess.run(["chattr", "-i", str(stuck)], check=True)


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A file system in memory at `folder`; skips the test where mounting isn't allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting isn't allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def complaint(status: dict[str, Any], log: str) -> bool:
    """Whether the status or the log tells of trouble with the disk."""
    words = ("space", "read-only", "Read-only", "Not a directory", "ENOSPC", "EROFS")
    told = [status["features"]["ssd_cache"]["reason"], *status["problems"]]
    told += [value for value in status["cache"].values() if isinstance(value, str)]
    told += [line for line in log.splitlines() if "thunder" in line]
    return any(word in line for line in told for word in words)
