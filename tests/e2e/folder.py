"""The cache folder as tests see it: which files belong to a prompt, and ways to spoil one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash


class CacheFolder:
    """Reads the names in THUNDER_CACHE_DIR; block files are named after their key and parent."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def blocks(self) -> list[Path]:
        """All block files, parents before their children."""
        files = {f.stem.split("-")[0]: f for f in self.root.glob("v1/blocks/*/*.safetensors")}
        parents = {key: file.stem.split("-")[1] for key, file in files.items()}

        def depth(key: str) -> int:
            return 1 + depth(parents[key]) if key in parents else 0

        return [files[key] for key in sorted(files, key=depth)]

    def snapshots(self) -> list[Path]:
        return sorted(self.root.glob("v1/snapshots/*/*/*.safetensors"))

    def records(self) -> set[Path]:
        return {*self.blocks(), *self.snapshots()}

    def temporary(self) -> list[Path]:
        """Files that are being written, or were when a process was killed."""
        return list(self.root.glob("v1/tmp/*/*.part"))

    def bytes(self) -> int:
        """What the folder holds, everything counted; files that vanish meanwhile are not."""
        total = 0
        for folder, _, names in os.walk(self.root):
            for name in names:
                try:
                    total += os.lstat(os.path.join(folder, name)).st_size
                except FileNotFoundError:
                    continue
        return total


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> Any:
    """The condition's first true value; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s for {what}")
        time.sleep(0.02)
    return value


def edit_header(file: Path, old: bytes, new: bytes) -> None:
    """Replaces bytes in a cache file's header and makes its checksum right again."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    text, payload = data[8 : 8 + size], data[8 + size :]
    lead = text.index(b'"header_checksum":"') + len(b'"header_checksum":"')
    body = text[lead + 16 :]
    if text[lead : lead + 16] != xxhash.xxh3_64(body).hexdigest().encode() or old not in body:
        raise AssertionError(f"expected a header with its checksum and {old!r}, found {text!r}")
    body = body.replace(old, new)
    text = text[:lead] + xxhash.xxh3_64(body).hexdigest().encode() + body
    file.write_bytes(len(text).to_bytes(8, "little") + text + payload)


def flip_bit(file: Path) -> None:
    """One bit of the last tensor's last bytes."""
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)


def write_nans(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-64:] = b"\xff\xff\xc0\x7f" * 16
    file.write_bytes(data)
