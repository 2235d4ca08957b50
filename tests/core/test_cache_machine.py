"""Two stores on one folder, driven at random and compared with a model of what they may answer.

The model knows, for each record, whether a store must find it. Whatever a store serves is compared
byte by byte (see `read`), so it can be missing what it should have, but never be wrong.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.core.cache_support import (
    BLOCK,
    ROOT,
    Shortens,
    age_all,
    blocks,
    folder_bytes,
    open_store,
    read,
    snapshot,
)
from thunder_patches.cache import file as file_module
from thunder_patches.cache.keys import chain
from thunder_patches.cache.match import plan
from thunder_patches.cache.store import CacheStore

# Three prompts with a common beginning, and a few of their snapshots.
PROMPTS = [[1] * 14, [1] * 8 + [2] * 6, [1] * 4 + [3] * 11]
RECORDS = {
    record.header.key: record
    for prompt in PROMPTS
    for record in [
        *blocks(ROOT, prompt),
        snapshot(ROOT, prompt, 8, end=prompt[-1] == 2),
        snapshot(ROOT, prompt, len(prompt), end=True),
    ]
}
KEYS = sorted(RECORDS)
LARGE, SMALL = 1 << 30, 7500

HARM = ["flip", "flip", "flip", "cut", "empty", "link", "folder", "delete"]

keys = st.sampled_from(KEYS)
stores = st.integers(0, 1)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.place = Path(tempfile.mkdtemp())
        self.folder = self.place / "v1"
        self.stores: list[CacheStore] = []
        # Must be found by every store; and by one store, from its queue.
        self.on_disk: set[bytes] = set()
        self.queued: list[set[bytes]] = [set(), set()]
        # Spoiled by us, and not yet noticed: storing it again is no use.
        self.spoiled: set[bytes] = set()
        self.ever: set[bytes] = set()
        self.dead = False

    @initialize(
        budget=st.sampled_from([LARGE, LARGE, SMALL]), ram=st.sampled_from([0, 0, 900, 1 << 20])
    )
    def begin(self, budget: int, ram: int) -> None:
        self.budget, self.ram = budget, ram
        self.stores = [self.open(), self.open()]

    def open(self) -> CacheStore:
        # One writer, so that what is evicted doesn't depend on which of two was sooner.
        return open_store(
            self.folder,
            disk_budget=self.budget,
            ram_budget=self.ram,
            writers=1,
            codec=Shortens(),
        )

    def teardown(self) -> None:
        for store in self.stores:
            store.close(1)
        shutil.rmtree(self.place)

    def must_find(self, which: int) -> set[bytes]:
        return self.on_disk | self.queued[which]

    @rule(which=stores, key=keys, stamp=st.integers(1, 5))
    def put(self, which: int, key: bytes, stamp: int) -> None:
        self.stores[which].put(RECORDS[key], stamp)
        self.ever.add(key)
        if key not in self.spoiled and self.budget == LARGE:
            self.queued[which].add(key)

    @rule(which=stores)
    def flush(self, which: int) -> None:
        assert self.stores[which].flush(20)
        self.on_disk |= self.queued[which]
        self.queued[which] = set()

    @precondition(lambda self: self.ever)
    @rule(which=stores, data=st.data())
    def get(self, which: int, data: st.DataObject) -> None:
        # Of what was harmed rather than of the rest: that's where the mistakes would be.
        key = data.draw(st.sampled_from(sorted(self.spoiled or self.ever)))
        source = read(self.stores[which], RECORDS[key].header)
        if source is None:
            assert key not in self.must_find(which)
            self.spoiled.discard(key)
        else:
            assert key in self.ever
        if source == "ssd":
            assert key not in self.spoiled

    @rule(which=stores, index=st.integers(0, 2), cuttable=st.booleans())
    def resume(self, which: int, index: int, cuttable: bool) -> None:
        """Plan, read, and plan again when a piece failed; each failure takes something away."""
        tokens = np.array(PROMPTS[index])
        prompt_keys = chain(ROOT, tokens, BLOCK)
        must = self.must_find(which)
        sure = next((i for i, key in enumerate(prompt_keys) if key not in must), len(prompt_keys))
        store = self.stores[which]
        for _ in range(3 * len(RECORDS)):
            found = plan(store, prompt_keys, ROOT, tokens, BLOCK, cuttable=cuttable, want_full=True)
            failed = [
                piece for piece in found.pieces if read(store, RECORDS[piece.key].header) is None
            ]
            assert not {piece.key for piece in failed} & must
            self.spoiled -= {piece.key for piece in failed}
            if not failed:
                break
        else:
            raise AssertionError("planning again never ends")
        assert not cuttable or found.position >= min(sure * BLOCK, len(tokens) - 1)

    @rule(which=stores, key=keys, stamp=st.integers(1, 9))
    def touch(self, which: int, key: bytes, stamp: int) -> None:
        self.stores[which].touch([key], stamp)

    @rule(which=stores)
    def age(self, which: int) -> None:
        """Re-encode all that is there; whatever had to be found still has to."""
        age_all(self.stores[which])

    @precondition(lambda self: self.ever)
    @rule(data=st.data(), how=st.sampled_from(HARM))
    def spoil(self, data: st.DataObject, how: str) -> None:
        """Harm a record's file, if it has one. The invariant has flushed: no store is writing."""
        key = data.draw(st.sampled_from(sorted(self.ever)))
        kind = RECORDS[key].header.kind
        pattern = "blocks/*/{}-*" if kind == "block" else "snapshots/*/*/*-{}*"
        path = next(self.folder.glob(pattern.format(key.hex())), None)
        if path is None or path.is_symlink() or not path.is_file():
            return
        content = bytearray(path.read_bytes())
        if how == "flip" and content:
            content[-1] = (content[-1] + 1) % 256
            path.write_bytes(content)
        elif how in ("cut", "empty"):
            path.write_bytes(content[:-1] if how == "cut" else b"")
        else:
            path.unlink()
            if how == "link":
                path.symlink_to("/etc/hostname")
            elif how == "folder":
                path.mkdir()
        self.on_disk.discard(key)
        if how in ("flip", "cut", "empty"):
            self.spoiled.add(key)  # the others don't pass for a record's file by their name

    @rule(which=stores)
    def restart(self, which: int) -> None:
        self.stores[which].close(20)
        self.on_disk |= self.queued[which]
        self.queued[which] = set()
        self.stores[which] = self.open()

    @rule(which=stores, half=st.booleans())
    def crash(self, which: int, half: bool) -> None:
        """Lose what waits, leave a half-written file and the process's lock as a kill would."""
        store = self.stores[which]
        assert store._queue is not None and store._disk is not None
        store._queue.close(0)
        folder = store._disk._folder
        assert store._disk.wait_scanned(20) and folder._own is not None
        if half:
            own = self.folder / "tmp" / folder._own_name / "half.part"
            own.write_bytes(b"a block, half of it")
            self.dead = True
        folder._own.release()
        folder._own = None
        self.queued[which] = set()
        self.stores[which] = self.open()

    @precondition(lambda self: self.budget == LARGE)
    @rule()
    def shrink(self) -> None:
        """Both come back with a small budget: anything may have gone."""
        for which in range(2):
            self.stores[which].close(20)
            self.queued[which] = set()
        self.on_disk = set()
        self.budget = SMALL
        self.stores = [self.open(), self.open()]

    @invariant()
    def within_budget_and_nothing_half_written_left(self) -> None:
        if not self.stores:
            return
        for which, store in enumerate(self.stores):
            assert store.ready(20)
            assert store.stats()["ram"]["bytes"] <= self.ram
            self.flush(which)
        # Damage done by hand may have made files larger than was counted.
        assert folder_bytes(self.folder) <= self.budget + (200 if self.spoiled else 0)
        if self.dead:
            owners = {store._disk._folder._own_name for store in self.stores}  # type: ignore[union-attr]
            assert set(os.listdir(self.folder / "tmp")) <= owners


def run(examples: int, **changes: Any) -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            **changes,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_stores_do_as_the_model_says():
    run(examples=60)


@pytest.mark.parametrize("broken", ["no checksum", "no flush"])
def test_the_machine_finds_a_broken_store(monkeypatch, broken):
    """The controls: a store that serves flipped bytes, and one that forgets what it was given."""
    if broken == "no checksum":

        class Blind:
            def update(self, data: object) -> None: ...

            def hexdigest(self) -> str:
                return "0" * 16

        class Hashes:
            xxh3_64 = staticmethod(lambda *data: Blind())

        monkeypatch.setattr(file_module, "xxhash", Hashes)
    else:
        monkeypatch.setattr(CacheStore, "put", lambda self, record, stamp: None)
    with pytest.raises(AssertionError):
        run(examples=200, derandomize=True, phases=(Phase.generate,))
