"""C8 and C11: errors inside the host, hard kills, two processes on one folder."""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest

from tests.e2e.folder import CacheFolder, wait_for
from tests.e2e.steps import MISS, served
from tests.harness.fleet import Fleet
from tests.harness.models import Model, text_of

FAILED = (OSError, http.client.HTTPException, RuntimeError)


@pytest.mark.parametrize("path", ["serial", "batched"])
@pytest.mark.one_hybrid
def test_c8_failure_inside(fleet: Fleet, model: Model, kind: str, seed: int, path: str) -> None:
    """Restored prefix, an error in the third chunk, a retry, a third client with that prefix.

    The stock server's generation thread dies of such an error on the batched path; the operator
    restarts it.
    """
    extra = {"seed": 4} if path == "serial" else {}
    args = ("--prefill-step-size", "24")
    server = fleet.server(model, args=args, timeout=20)
    prefix = text_of(100, seed)
    long = prefix + text_of(150, seed + 1)
    served(fleet, server, model, args=args, prompt=prefix, cached=MISS, **extra)
    fleet.expected(model, args=args, prompt=long, **extra)

    server.inject(after=2, error="injected by the test")
    with pytest.raises(FAILED):
        server.complete(long, timeout=8, **extra)
    assert "injected by the test" in server.log()
    if path == "batched":
        server.restart(kill=True)

    third = prefix + text_of(60, seed + 2)
    retry = served(fleet, server, model, args=args, prompt=long, cached=range(1, 250), **extra)
    assert retry.cached_tokens is not None and retry.cached_tokens >= 99
    served(fleet, server, model, args=args, prompt=third, cached=range(99, 104), **extra)
    served(fleet, server, model, args=args, prompt=long, cached=250, **extra)


@pytest.mark.one_hybrid
def test_c11_killed(fleet: Fleet, model: Model, seed: int, tmp_path: Path) -> None:
    """A hard kill while a slowed writer is busy: finished files serve, no half one does."""
    folder = CacheFolder(tmp_path / "cache")
    server = fleet.server(model, cache_dir=folder.root, env={"HARNESS_SLOW_WRITES": "1.0"})
    prompt = text_of(400, seed)
    fleet.expected(model, prompt=prompt)  # beforehand, so that the kill comes soon enough
    served(fleet, server, model, prompt=prompt, cached=MISS)
    wait_for(lambda: len(folder.records()) >= 2, "the first finished files")
    server.kill()
    finished = folder.records()
    assert folder.temporary(), "the writer was not busy when the process was killed"

    server.restart(HARNESS_SLOW_WRITES=None)
    served(fleet, server, model, prompt=prompt)
    served(fleet, server, model, prompt=prompt, cached=400)
    wait_for(lambda: not folder.temporary(), "the leftovers to be removed")
    assert finished <= folder.records()
    server.restart()
    served(fleet, server, model, prompt=prompt, cached=400)


def test_c11_finished_blocks_are_reused(
    fleet: Fleet, full: Model, seed: int, tmp_path: Path
) -> None:
    """Killed with all but the last few files written: what is there is used."""
    folder = CacheFolder(tmp_path / "cache")
    server = fleet.server(full, cache_dir=folder.root, env={"HARNESS_SLOW_WRITES": "0.1"})
    prompt = text_of(400, seed)
    fleet.expected(full, prompt=prompt)
    served(fleet, server, full, prompt=prompt, cached=MISS)
    wait_for(lambda: len(folder.blocks()) >= 5, "five finished blocks")
    server.kill()
    whole = 0
    # Blocks are reused as far as they follow each other from the first on.
    for file, parent in zip(folder.blocks(), [None, *folder.blocks()], strict=False):
        if parent is not None and not file.stem.endswith(parent.stem.split("-")[0]):
            break
        whole += 1
    server.restart(HARNESS_SLOW_WRITES=None)
    answer = served(fleet, server, full, prompt=prompt)
    assert answer.cached_tokens is not None
    assert answer.cached_tokens >= min(whole, 5) * 32 - 32


@pytest.mark.one_hybrid
def test_c11_two_processes_on_one_folder(
    fleet: Fleet, model: Model, seed: int, tmp_path: Path
) -> None:
    """Each finds what the other stored, also after the other was killed."""
    folder = CacheFolder(tmp_path / "cache")
    first = fleet.server(model, cache_dir=folder.root)
    other = fleet.server(model, cache_dir=folder.root)
    for number, (writer, reader) in enumerate([(first, other), (other, first)]):
        prompt = text_of(200, seed + number)
        served(fleet, writer, model, prompt=prompt, cached=MISS)
        wait_for(lambda n=number: len(folder.records()) >= 7 * (n + 1), "blocks and snapshot")
        served(fleet, reader, model, prompt=prompt, cached=200)
    first.kill()
    for number in range(2):
        served(fleet, other, model, prompt=text_of(200, seed + number), cached=200)
    served(fleet, other, model, prompt=text_of(200, seed + 9), cached=MISS)
