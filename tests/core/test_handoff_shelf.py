"""Descriptors and where they stand: form, owners, holders, ends, and what killed processes leave."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thunder_patches.handoff.context import BadContext, Context, Payload, Pinned, encode_ids
from thunder_patches.handoff.names import checked_id, checked_name, new_id, owner_of
from thunder_patches.handoff.refusal import Refused
from thunder_patches.handoff.shelf import STALE_SECONDS, Shelf

OWNER = owner_of("")


def made(id: str | None = None, **changes: Any) -> Context:
    pins = (Pinned("block", "ab" * 16, "cd" * 16, 1000),)
    context = Context(
        id=id or new_id(),
        named=False,
        owner=OWNER,
        model="model",
        model_name="name",
        layout="KVCache",
        block_tokens=32,
        precision="exact",
        ids=encode_ids(np.arange(40)),
        position=40,
        said={"prompt": "text"},
        pins=pins,
        created=time.time(),
        expires=time.time() + 60,
        holders=("maker",),
    )
    return replace(context, **changes)


def reason(wrong: pytest.ExceptionInfo[Refused]) -> str:
    return wrong.value.reason


def test_a_descriptor_and_back() -> None:
    context = made(payload=Payload(7, "ab"))
    assert Context.loads(context.dumps()) == context
    assert list(context.tokens) == list(range(40))
    told = context.described()
    assert "ids" not in told and "text" not in str(told)
    assert (told["tokens"], told["next_position"]) == (40, 40)


@pytest.mark.parametrize("at", range(20, 900, 40))
def test_any_flipped_bit_is_seen(at: int) -> None:
    data = bytearray(made().dumps())
    data[at] ^= 1
    with pytest.raises(BadContext):
        Context.loads(bytes(data))


def test_what_the_checksum_cannot_tell() -> None:
    for wrong in ({"precision": "int2"}, {"position": 41}, {"expires": float("nan")}):
        with pytest.raises(BadContext):
            Context.loads(made(**wrong).dumps())


def test_ids_and_names() -> None:
    assert len({new_id() for _ in range(1000)}) == 1000
    for wrong in (None, 7, "", "0" * 47, "G" * 48, "0" * 49, "../" * 16):
        with pytest.raises(Refused):
            checked_id(wrong)
    assert checked_name("agent-1.base_2") == "agent-1.base_2"
    for wrong in (None, "", ".", "..", "a/b", "a\\b", "A", "é", "a\0", "a" * 65, "-a", "a.", "a\n"):
        with pytest.raises(Refused):
            checked_name(wrong)
    assert owner_of("a") != owner_of("b") and owner_of("a") != "a"


def test_owners_and_ends(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    context = made()
    shelf.put(context)
    assert shelf.get(context.id, OWNER) == context
    with pytest.raises(Refused) as wrong:
        shelf.get(context.id, owner_of("other"))
    assert (wrong.value.status, reason(wrong)) == (403, "owner")
    gone = made(expires=time.time() - 1)
    shelf.put(gone)
    with pytest.raises(Refused) as wrong:
        shelf.get(gone.id, OWNER)
    assert (wrong.value.status, reason(wrong)) == (410, "expired")
    assert set(shelf.pins()) == {bytes.fromhex("ab" * 16)}


def test_holders(tmp_path: Path) -> None:
    """It stays until the last one who needs it has released it; twice is once."""
    shelf, other = Shelf(tmp_path), Shelf(tmp_path)
    context = made()
    shelf.put(context)
    other.hold(context, "writer")
    shelf.hold(context, "editor")
    assert shelf.get(context.id, OWNER).holders == ("maker", "writer", "editor")
    assert not shelf.release(context, "maker")
    assert not other.release(context, "maker")
    assert not other.release(context, "nobody")
    assert not shelf.release(context, "editor")
    assert shelf.release(context, "writer")
    assert other.release(context, "writer")
    assert not list(tmp_path.glob("handoff/*"))
    assert shelf.kept() == frozenset()


def test_held_from_many_threads(tmp_path: Path) -> None:
    context = made()
    Shelf(tmp_path).put(context)
    names = [f"h{i}" for i in range(12)]
    threads = [threading.Thread(target=lambda n=n: Shelf(tmp_path).hold(context, n)) for n in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(Shelf(tmp_path).get(context.id, OWNER).holders) == {"maker", *names}


def test_kept_follows_what_others_do(tmp_path: Path) -> None:
    shelf, other = Shelf(tmp_path), Shelf(tmp_path)
    assert shelf.kept() == frozenset()
    first, second = made(), made(pins=(Pinned("block", "ef" * 16, "cd" * 16, 5),))
    other.put(first)
    kept = shelf.kept()
    assert len(kept) == 1 and shelf.kept() is kept
    other.put(second)
    assert len(shelf.kept()) == 2
    assert shelf.held() == 1005
    other.release(first)
    assert shelf.kept() == {bytes.fromhex("ef" * 16)}


def test_replaced_by_name(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    for pin in ("ab", "ef"):
        pins = (Pinned("block", pin * 16, "cd" * 16, 5),)
        shelf.put(made("base", named=True, holders=(), expires=None, pins=pins))
        assert shelf.kept() == {bytes.fromhex(pin * 16)}
    assert [c.id for c in shelf.names(OWNER)] == ["base"]
    assert shelf.names(owner_of("other")) == []


def test_sweep(tmp_path: Path) -> None:
    """What expired goes, and what has no descriptor, and what dead writers left; the rest stays."""
    shelf = Shelf(tmp_path)
    stays, ends = made(), made(expires=time.time() - 1, payload=Payload(7, "x"))
    for context in (stays, ends):
        temporary = shelf.temporary()
        temporary.write_bytes(b"state")
        shelf.put(context, temporary)
    orphan = tmp_path / "handoff" / f"{new_id()}.safetensors"
    orphan.write_bytes(b"state")
    own, dead = shelf.temporary(), tmp_path / "tmp" / "999999999-x.part"
    old = tmp_path / "tmp" / f"{os.getpid()}-old.part"
    for file in (own, dead, old):
        file.write_bytes(b"")
    os.utime(old, (1, time.time() - STALE_SECONDS - 5))
    assert shelf.sweep() == 7
    left = {f.name for f in tmp_path.rglob("*") if f.is_file()} - {"lock"}
    assert left == {f"{stays.id}.json", f"{stays.id}.safetensors", own.name}


def test_links_and_foreign_files(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "shelf")
    context = made()
    shelf.put(context)
    file = tmp_path / "shelf" / "handoff" / f"{context.id}.json"
    moved = tmp_path / "elsewhere.json"
    file.rename(moved)
    file.symlink_to(moved)
    with pytest.raises(Refused) as wrong:
        shelf.get(context.id, OWNER)
    assert wrong.value.status == 409
    assert shelf.kept() == frozenset()
    (tmp_path / "shelf" / "handoff" / "notes.json").mkdir()
    assert shelf.kept() == frozenset()
