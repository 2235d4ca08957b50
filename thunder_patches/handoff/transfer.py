"""Contexts out of one cache folder and into another, each as one file.

What comes in is stored under keys that are made anew from its tokens, for whoever takes it in.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from thunder_patches.cache.keys import TOKEN_DTYPE, chain, root_key, snapshot_key, token_bytes
from thunder_patches.cache.record import Kind, Record
from thunder_patches.cache.store import CacheStore, ReadJob
from thunder_patches.codec.base import CodecError

from .context import Context, Pinned
from .names import checked_name, owner_of
from .parcel import BadParcel, Packed, Parcel, write
from .precision import decoded, lossless
from .refusal import Refused
from .shelf import Shelf

FLUSH_SECONDS = 60.0
_QUANTISED = " kv_bits="


def read(store: CacheStore, wanted: Sequence[tuple[Kind, bytes, bytes]]) -> list[Record]:
    """Records by (kind, key, parent), decoded.

    Raises:
        Refused: 507, one is no longer there.
    """
    gone = Refused(507, "budget", "a part of this context's state is no longer in the cache")
    jobs: list[ReadJob] = []
    records: list[Record] = []
    for kind, key, parent in wanted:
        header = store.header(key, parent, kind)
        if header is None:
            raise gone
        data = [bytearray(spec.nbytes) for spec in header.tensors]
        targets = {s.name: [memoryview(d)] for s, d in zip(header.tensors, data, strict=True)}
        jobs.append(ReadJob(key, kind, parent, header.tokens, header.layout, targets))
        records.append(Record(header, tuple(data)))
    if None in store.read_many(jobs):
        raise gone
    return records


def export(store: CacheStore, context: Context, file: Path) -> int:
    """Write an exact context with all of its state to a new file; returns its size in bytes.

    Raises:
        Refused: 409 for one that isn't exact, 507 where part of its state has gone.
        OSError: the file can't be written.
    """
    if context.precision != "exact" or _QUANTISED in context.layout:
        raise Refused(409, "precision", "only exact contexts without --kv-bits can be exported")
    packed = []
    for pin in context.pins:
        (record,) = read(store, [(pin.kind, bytes.fromhex(pin.key), bytes.fromhex(pin.parent))])
        pairs = zip(record.header.tensors, record.data, strict=True)
        tensors = tuple(lossless(spec, data, record.header) for spec, data in pairs)
        packed.append(Packed(record.header, tensors))
    write(file, context, packed)
    return file.stat().st_size


def take_in(
    store: CacheStore,
    shelf: Shelf,
    file: Path,
    *,
    salt: str,
    name: str | None = None,
    expires: float | None = None,
) -> Context:
    """Store an exported context, and keep it by name.

    Args:
        salt: of whoever takes it in. name: None for the one that it had.

    Raises:
        Refused: 422 for a file that is no such context, 507 where there is no room.
    """
    try:
        parcel = Parcel(file)
        context = parcel.context
        root = root_key(context.model, context.layout, salt, context.block_tokens)
        pins = []
        stamp = time.time_ns()
        for record in _rekeyed(parcel, root):
            header = record.header
            store.put(record, stamp)
            pins.append(Pinned(header.kind, header.key.hex(), header.parent.hex(), record.nbytes))
    except (BadParcel, CodecError) as error:
        raise Refused(422, "file", f"this is no exported context: {error}") from error
    store.flush(FLUSH_SECONDS)
    pins = [replace(pin, size=store.size(bytes.fromhex(pin.key))) for pin in pins]
    taken = replace(
        context,
        id=checked_name(context.id if name is None else name),
        named=True,
        owner=owner_of(salt),
        pins=tuple(pins),
        created=time.time(),
        expires=expires,
        holders=(),
    )
    shelf.put(taken)
    wanted = [(p.kind, bytes.fromhex(p.key), bytes.fromhex(p.parent)) for p in pins]
    if not store.all_there(wanted):
        shelf.release(taken)
        raise Refused(507, "budget", "the cache has no room for the state of this context")
    return taken


def _rekeyed(parcel: Parcel, root: bytes) -> list[Record]:
    """A parcel's records, decoded, under the keys that its tokens have after `root`.

    Raises:
        BadParcel, CodecError: when they are not the records of its tokens, in order.
    """
    context = parcel.context
    if context.precision != "exact" or context.payload is not None:
        raise BadParcel(f"expected an exact context, found {context.precision}")
    step = context.block_tokens
    tokens = np.asarray(context.tokens[: context.position], TOKEN_DTYPE)
    parents = [root, *chain(root, tokens, step)]
    found: list[Record] = []
    at, text = 0, None
    for packed in parcel.records():
        old = packed.header
        expected = token_bytes(tokens[at : at + old.n_tokens])
        if old.start != at or old.tokens != expected:
            raise BadParcel(f"record {len(found)} does not hold the context's tokens from {at}")
        if at % step or (old.kind == "block") != (old.n_tokens == step):
            raise BadParcel(f"record {len(found)}: a {old.kind} of {old.n_tokens} tokens at {at}")
        parent = parents[at // step]
        block = old.kind == "block"
        key = parents[at // step + 1] if block else snapshot_key(parent, old.tokens)
        at += old.n_tokens
        inner = _inner(old.layout)
        text = inner if text is None else text
        if inner != text or classes(inner) != kinds(context.layout):
            raise BadParcel(f"record {len(found)} has another layout than the context")
        if block and old.end:
            raise BadParcel(f"record {len(found)}: a block holds no logits")
        found.append(decoded(replace(old, key=key, parent=parent), packed.tensors))
    if at != context.position or (found and any(r.header.kind != "block" for r in found[:-1])):
        raise BadParcel(f"expected records of {context.position} tokens, found {at}")
    return found


def _inner(layout: str) -> str:
    value: Any = json.loads(layout)
    return str(value["layout"]) if isinstance(value, dict) and "layout" in value else layout


def classes(layout: str) -> list[str]:
    """The cache classes of a record's layout, leaf by leaf."""
    return [str(layer["class"]) for layer in json.loads(layout)["layers"]]


def kinds(layout: str) -> list[str]:
    """The same from a context's layout, such as ``"3*ArraysCache(2) KVCache"``.

    Raises:
        BadParcel: when it isn't one.
    """
    found: list[str] = []
    for part in layout.split():
        match = re.fullmatch(r"(?:(\d{1,5})\*)?(?:[\d.]+:)?([A-Za-z]+)(?:\([\w,]*\))?", part)
        if match is None:
            raise BadParcel(f"expected the kinds of a model's caches, found {layout[:80]!r}")
        found += [match.group(2)] * int(match.group(1) or 1)
    return found
