"""Contexts as files: out of one store, into another, and whatever is wrong with a file is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from thunder_patches.cache.keys import chain, root_key, snapshot_key, token_bytes
from thunder_patches.cache.record import Header, Record, TensorSpec
from thunder_patches.cache.store import CacheStore
from thunder_patches.handoff.context import Context, Pinned, encode_ids
from thunder_patches.handoff.names import owner_of
from thunder_patches.handoff.parcel import BadParcel, Packed, Parcel, write
from thunder_patches.handoff.precision import lossless
from thunder_patches.handoff.refusal import Refused
from thunder_patches.handoff.shelf import Shelf
from thunder_patches.handoff.transfer import export, kinds, read, take_in

STEP = 8
LAYOUT = json.dumps(
    {
        "rows": {"k0": ["F32", 2, 4], "v0": ["F32", 2, 4]},
        "layers": [
            {"path": "0", "class": "KVCache", "meta": {}, "rows": [["k0", 0, 2], ["v0", 0, 2]]},
            {"path": "1", "class": "ArraysCache", "meta": {}, "rows": []},
        ],
    }
)
STATE = json.dumps({"layout": LAYOUT, "state": {"1": {"arrays": 1}}})
TOKENS = np.arange(100, 121)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CacheStore]:
    store = CacheStore(tmp_path / "a" / "v1", disk_budget=1 << 24, ram_budget=0)
    yield store
    store.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[CacheStore]:
    store = CacheStore(tmp_path / "b" / "v1", disk_budget=1 << 24, ram_budget=0)
    yield store
    store.close()


def records(root: bytes) -> list[Record]:
    """Two blocks and a snapshot of five tokens."""
    rng = np.random.default_rng(1)
    parents = [root, *chain(root, TOKENS, STEP)]
    found = []
    for i, start in enumerate(range(0, len(TOKENS), STEP)):
        part = TOKENS[start : start + STEP]
        ids, block = token_bytes(part), len(part) == STEP
        specs = [TensorSpec(n, "F32", (2, len(part), 4)) for n in ("k0", "v0")]
        if not block:
            specs += [TensorSpec("s1.0", "F32", (3,)), TensorSpec("logits", "F32", (5,))]
        key = parents[i + 1] if block else snapshot_key(parents[i], ids)
        kind, text = ("block", LAYOUT) if block else ("snapshot", STATE)
        header = Header(key, parents[i], kind, start, ids, text, tuple(specs), not block)  # type: ignore[arg-type]
        found.append(Record(header, tuple(rng.bytes(s.nbytes) for s in specs)))
    return found


def kept(store: CacheStore, tmp_path: Path, salt: str = "") -> Context:
    root = root_key("model", "KVCache ArraysCache(1)", salt, STEP)
    made = records(root)
    for record in made:
        store.put(record, time.time_ns())
    assert store.flush()
    pins = tuple(
        Pinned(r.header.kind, r.header.key.hex(), r.header.parent.hex(), store.size(r.header.key))
        for r in made
    )
    return Context(
        id="base",
        named=True,
        owner=owner_of(salt),
        model="model",
        model_name="name",
        layout="KVCache ArraysCache(1)",
        block_tokens=STEP,
        precision="exact",
        ids=encode_ids(TOKENS),
        position=len(TOKENS),
        said={"prompt": "x"},
        pins=pins,
        created=1.0,
        expires=None,
    )


def test_out_and_in(store: CacheStore, other: CacheStore, tmp_path: Path) -> None:
    """Under another owner's keys, with the same bytes; the file is the public library's."""
    from safetensors import safe_open

    file = tmp_path / "base.safetensors"
    export(store, kept(store, tmp_path, salt="one"), file)
    assert file.stat().st_mode & 0o777 == 0o600
    with safe_open(file, framework="numpy") as opened:
        assert opened.metadata()["format"] == "thunder-context"
    shelf = Shelf(tmp_path / "b" / "v1" / "contexts")
    taken = take_in(other, shelf, file, salt="two", name="mine")
    assert shelf.named("mine", owner_of("two")) == taken
    root = root_key("model", "KVCache ArraysCache(1)", "two", STEP)
    expected = records(root)
    assert [pin.key for pin in taken.pins] == [r.header.key.hex() for r in expected]
    assert other.match(chain(root, TOKENS, STEP), root) == 2
    found = read(other, [(r.header.kind, r.header.key, r.header.parent) for r in expected])
    for old, new in zip(expected, found, strict=True):
        assert old.header == new.header
        assert [bytes(d) for d in old.data] == [bytes(d) for d in new.data]


def test_every_byte_counts(store: CacheStore, other: CacheStore, tmp_path: Path) -> None:
    """A flipped bit anywhere in the file is refused, and leaves nothing behind."""
    file = tmp_path / "base.safetensors"
    export(store, kept(store, tmp_path), file)
    whole = file.read_bytes()
    shelf = Shelf(tmp_path / "b" / "v1" / "contexts")
    length = 8 + int.from_bytes(whole[:8], "little")
    header = whole[:length].rstrip()
    places = [*range(0, len(header), 97), *range(length, len(whole), 41)]
    for at in places:
        damaged = bytearray(whole)
        damaged[at] ^= 1
        file.write_bytes(damaged)
        try:
            take_in(other, shelf, file, salt="")
        except Refused as error:
            assert error.status == 422
        else:
            raise AssertionError(f"byte {at} of {len(whole)} was changed and not noticed")
    for cut in (0, 7, length, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(Refused):
            take_in(other, shelf, file, salt="")
    assert shelf.names() == []


def packed(changed: list[Record]) -> list[Packed]:
    return [
        Packed(
            r.header,
            tuple(lossless(s, d, r.header) for s, d in zip(r.header.tensors, r.data, strict=True)),
        )
        for r in changed
    ]


def test_what_checksums_cannot_tell(store: CacheStore, other: CacheStore, tmp_path: Path) -> None:
    """Files that somebody made on purpose: other tokens, order, shapes, kinds, names, precision."""
    context = kept(store, tmp_path)
    good = records(b"r" * 16)
    first, second, last = good

    def header(record: Record, **changes: object) -> Record:
        return Record(replace(record.header, **changes), record.data)  # type: ignore[arg-type]

    short = tuple(replace(s, shape=(2, 8, 2)) for s in first.header.tensors)
    spec = tuple(replace(s, name="x0") for s in first.header.tensors)
    cases: dict[str, tuple[Context, list[Record]]] = {
        "tokens": (context, [header(first, tokens=second.header.tokens), second, last]),
        "order": (context, [second, first, last]),
        "missing": (context, [first, last]),
        "short": (context, [first, second]),
        "start": (context, [header(first, start=8), second, last]),
        "kind": (context, [header(first, kind="snapshot"), second, last]),
        "names": (context, [header(first, tensors=spec), second, last]),
        "layout": (context, [header(first, layout="{}"), second, last]),
        "classes": (replace(context, layout="2*KVCache"), good),
        "garbage": (replace(context, layout="; rm"), good),
        "precision": (replace(context, precision="int8"), good),
        "position": (replace(context, position=20), good),
        "name": (replace(context, id="../up"), good),
        "logits": (context, [first, second, header(last, end=False)]),
        "shape": (
            context,
            [Record(replace(first.header, tensors=short), tuple(d[:128] for d in first.data))],
        ),
    }
    shelf = Shelf(tmp_path / "b" / "v1" / "contexts")
    for name, (said, made) in cases.items():
        file = tmp_path / f"{name}.safetensors"
        write(file, said, packed(made))
        with pytest.raises(Refused) as wrong:
            take_in(other, shelf, file, salt="")
        assert wrong.value.status in (400, 422), name
    assert shelf.names() == []
    file = tmp_path / "good.safetensors"
    write(file, context, packed(good))
    assert take_in(other, shelf, file, salt="").id == "base"


def test_kinds_of_a_layout() -> None:
    assert kinds("3*ArraysCache(2) KVCache") == ["ArraysCache"] * 3 + ["KVCache"]
    assert kinds("2*0:KVCache RotatingKVCache(512,0)") == ["KVCache"] * 2 + ["RotatingKVCache"]
    for wrong in ("{}", "KVCache kv_bits=8", "99999999*KVCache"):
        with pytest.raises(BadParcel):
            kinds(wrong)


def test_no_pickle(tmp_path: Path) -> None:
    import pickle

    file = tmp_path / "x.safetensors"
    file.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(BadParcel):
        Parcel(file)


def test_gone_meanwhile(store: CacheStore, tmp_path: Path) -> None:
    context = kept(store, tmp_path)
    for path in (tmp_path / "a").glob("v1/blocks/*/*"):
        path.unlink()
    with pytest.raises(Refused) as wrong:
        export(store, context, tmp_path / "x")
    assert wrong.value.status == 507
