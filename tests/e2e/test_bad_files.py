"""C10: spoiled files cost time, never an answer, and are looked at once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.folder import CacheFolder, edit_header, flip_bit, wait_for, write_nans
from tests.e2e.steps import MISS, added, counts, served
from tests.harness.fleet import BLOCK, Fleet
from tests.harness.models import Model, text_of

LENGTH = 3 * BLOCK + 10


def test_c10_bad_files(fleet: Fleet, full: Model, tmp_path: Path, seed: int) -> None:
    """The second block of each prompt is spoiled in one way: the first is used, no other."""
    outside = tmp_path / "outside.safetensors"
    folder_inside = CacheFolder(tmp_path / "cache")

    def link_outside(file: Path) -> None:
        shutil.move(file, outside)
        file.symlink_to(outside)

    def directory(file: Path) -> None:
        file.unlink()
        file.mkdir()
        (file / "inside").write_text("not a block")

    spoil: dict[str, Callable[[Path], None]] = {
        "truncated": lambda file: file.write_bytes(file.read_bytes()[:-100]),
        "half a header": lambda file: file.write_bytes(file.read_bytes()[:60]),
        "bit flipped": flip_bit,
        "empty": lambda file: file.write_bytes(b""),
        "other version": lambda file: edit_header(file, b'"version":"1"', b'"version":"9"'),
        "unknown layer kind": lambda file: edit_header(file, b"KVCache", b"QQCache"),
        "NaN inside": write_nans,
        "another prompt's block": lambda file: shutil.copy(folder_inside.blocks()[-1], file),
        "not a cache file": lambda file: file.write_bytes(b"\x80\x04cos\nsystem\n" * 50),
        "symlink to the outside": link_outside,
        "directory": directory,
    }
    server = fleet.server(full, cache_dir=folder_inside.root)
    second: dict[str, Path] = {}
    for number, name in enumerate(spoil):
        before = folder_inside.records()
        served(fleet, server, full, prompt=text_of(LENGTH, seed + number), cached=MISS)
        wait_for(lambda b=before: len(folder_inside.records() - b) >= 4, "the files of a prompt")
        second[name] = [file for file in folder_inside.blocks() if file not in before][1]
    server.stop()
    for name, damage in spoil.items():
        damage(second[name])
    kept = outside.read_bytes()

    server.start()
    for number, name in enumerate(spoil):
        prompt, before_counts = text_of(LENGTH, seed + number), counts(server)
        answer = served(fleet, server, full, prompt=prompt)
        assert answer.cached_tokens == BLOCK, f"{name}: {answer.cached_tokens} tokens cached"
        grown = added(before_counts, counts(server))
        # What is no regular file is passed over when the folder is first looked at.
        irregular = name in ("symlink to the outside", "directory")
        assert irregular or grown.get("set_aside") == 1, f"{name}: {grown}"
        served(fleet, server, full, prompt=prompt, cached=LENGTH)
    assert outside.read_bytes() == kept
    server.restart()
    for number in range(len(spoil)):
        served(fleet, server, full, prompt=text_of(LENGTH, seed + number), cached=LENGTH)
    assert not {"corrupt", "set_aside"} & added({}, counts(server)).keys()


@pytest.mark.one_hybrid
def test_a_spoiled_snapshot(fleet: Fleet, model: Model, seed: int, tmp_path: Path) -> None:
    """Every snapshot has a flipped bit: recurrent and rotating layers start again, rows don't."""
    folder = CacheFolder(tmp_path / "cache")
    server = fleet.server(model, cache_dir=folder.root)
    prompt = text_of(LENGTH, seed)
    served(fleet, server, model, prompt=prompt, cached=MISS)
    server.stop()
    assert folder.snapshots()
    for file in folder.snapshots():
        flip_bit(file)
    server.start()
    served(fleet, server, model, prompt=prompt, cached=range(0, LENGTH))
    served(fleet, server, model, prompt=prompt, cached=LENGTH)
