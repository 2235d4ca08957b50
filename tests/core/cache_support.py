"""Records whose every byte follows from their key, so that any reader can tell right from wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thunder_patches.cache.aging import Ager
from thunder_patches.cache.disk import ReadJob
from thunder_patches.cache.file import Raw, RawCodec
from thunder_patches.cache.keys import chain, root_key, snapshot_key, token_bytes
from thunder_patches.cache.match import Piece
from thunder_patches.cache.record import Coded, Header, Record, TensorSpec
from thunder_patches.cache.store import CacheStore
from thunder_patches.observe.counters import Counters

BLOCK = 4
LAYOUT = '{"layers":[{"kind":"kv"}]}'
ROOT = root_key("a model", LAYOUT, "", BLOCK)
HEADS, DIM = 3, 5


def content(key: bytes, spec: TensorSpec) -> bytes:
    return hashlib.shake_128(key + spec.name.encode()).digest(spec.nbytes)


def specs_of(kind: str, n_tokens: int, end: bool, dim: int) -> tuple[TensorSpec, ...]:
    specs = [
        TensorSpec("k0", "BF16", (HEADS, n_tokens, dim)),
        TensorSpec("v0", "BF16", (HEADS, n_tokens, dim)),
    ]
    if kind == "snapshot":
        specs.append(TensorSpec("s0.0", "F32", (2, 3)))
        if end:
            specs.append(TensorSpec("logits", "F32", (7,)))
    return tuple(specs)


def record(header: Header) -> Record:
    return Record(header, tuple(content(header.key, spec) for spec in header.tensors))


def block(root: bytes, tokens: Sequence[int], i: int, dim: int = DIM) -> Record:
    """Block `i` of the prompt `tokens`."""
    keys = chain(root, np.asarray(tokens, np.int64), BLOCK)
    part = token_bytes(tokens[i * BLOCK : (i + 1) * BLOCK])
    parent = keys[i - 1] if i else root
    specs = specs_of("block", BLOCK, False, dim)
    return record(Header(keys[i], parent, "block", i * BLOCK, part, LAYOUT, specs))


def blocks(root: bytes, tokens: Sequence[int], dim: int = DIM) -> list[Record]:
    return [block(root, tokens, i, dim) for i in range(len(tokens) // BLOCK)]


def snapshot(
    root: bytes, tokens: Sequence[int], position: int, end: bool = False, dim: int = DIM
) -> Record:
    """The snapshot after the first `position` tokens of the prompt."""
    keys = chain(root, np.asarray(tokens[:position], np.int64), BLOCK)
    base = len(keys) * BLOCK
    parent = keys[-1] if keys else root
    tail = token_bytes(tokens[base:position])
    specs = specs_of("snapshot", position - base, end, dim)
    key = snapshot_key(parent, tail)
    return record(Header(key, parent, "snapshot", base, tail, LAYOUT, specs, end))


def job(header: Header) -> tuple[ReadJob, dict[str, bytearray]]:
    """A job that reads a whole record, and the buffers that it fills."""
    into = {spec.name: bytearray(spec.nbytes) for spec in header.tensors}
    targets = {name: [memoryview(data)] for name, data in into.items()}
    found = ReadJob(header.key, header.kind, header.parent, header.tokens, header.layout, targets)
    return found, into


def read(store: CacheStore, header: Header) -> str | None:
    """Where the store reads the record from, after checking every byte of it; None: it doesn't."""
    wanted, into = job(header)
    (source,) = store.read_many([wanted])
    if source is not None:
        for spec in header.tensors:
            assert into[spec.name] == content(header.key, spec), "served wrong bytes"
    return source


def read_piece(store: CacheStore, piece: Piece) -> str | None:
    header = store.header(piece.key, piece.parent, piece.kind)
    return None if header is None else read(store, header)


class Shortens(RawCodec):
    """Stores tensors as they are, aged ones without their second half, which `content` tells."""

    def decode(self, spec, coded, header):
        whole = content(header.key, spec)
        if coded.codec != "short" or whole[: spec.nbytes // 2] != bytes(coded.data):
            raise ValueError(f"{spec.name}: expected half of its content")
        return whole

    def ages(self, codecs):
        return all(codec == "raw" for codec in codecs)

    def age(self, record):
        return Raw([Coded("short", bytes(data)[: len(data) // 2]) for data in record.data])


def age_all(store: CacheStore) -> bool:
    """Have the store re-encode all that it can, as in an idle hour."""
    assert store._disk is not None
    return Ager(store._disk, lambda: 3600.0, aged_seconds=0.0).sweep()


def open_store(folder: Path | None, **changes: Any) -> CacheStore:
    settings: dict[str, Any] = {"disk_budget": 1 << 30, "ram_budget": 0, "counters": Counters()}
    return CacheStore(folder, **{**settings, **changes})


def counts(store: CacheStore) -> dict[str, int]:
    counters = store._counters
    assert isinstance(counters, Counters)
    return counters.snapshot()


def folder_bytes(folder: Path) -> int:
    return sum(p.lstat().st_size for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())


def files(folder: Path) -> list[Path]:
    """The records' files."""
    places = (folder / "blocks", folder / "snapshots")
    return sorted(p for place in places for p in place.rglob("*.safetensors"))


def file_of(folder: Path, what: Header | Piece) -> Path:
    """The file of a record, which must be there."""
    pattern = "blocks/*/{}-*" if what.kind == "block" else "snapshots/*/*/*-{}*"
    (path,) = folder.glob(pattern.format(what.key.hex()))
    return path
