"""Pinned memory, and what is stored on its way out of a GPU's memory; a stand-in makes the copies."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest
from host_gpu import HostCopier, host_gpu
from mlx_lm.models.cache import ArraysCache, KVCache

from thunder_patches.tensors import cuda, download
from thunder_patches.tensors import cut as cutting
from thunder_patches.tensors.cuda import CudaError, Gpu, Slabs
from thunder_patches.tensors.cut import Cut, cut
from thunder_patches.tensors.layers import Layout, leaves

HEADS, DIM, BLOCK = 2, 16, 32


@pytest.fixture
def at_once(monkeypatch) -> None:
    """What is asked for is pinned before the call ends: no other thread, no pause."""
    monkeypatch.setattr(cuda, "PAUSE", 0)

    def want(self: Slabs, room: int) -> None:
        if self._pinned + room <= self._limit:
            self._pinned += room
            self._add(room)

    monkeypatch.setattr(Slabs, "_want", want)


@pytest.fixture
def device(at_once, monkeypatch) -> Gpu:
    made = host_gpu()
    monkeypatch.setattr(cutting, "gpu", lambda: made)
    return made


def caches(length: int) -> list[object]:
    mx.random.seed(length)
    attention, recurrent = KVCache(), ArraysCache(size=2)
    rows = mx.random.normal((2, 1, HEADS, length, DIM)).astype(mx.bfloat16)
    attention.update_and_fetch(rows[0], rows[1])
    recurrent[0] = mx.random.normal((1, 3, 5))
    recurrent[1] = mx.random.normal((1, 7)).astype(mx.float16)
    return [attention, recurrent]


def cuts(live: list[object], blocks: int) -> list[Cut]:
    found = leaves(live)
    spans = [(i * BLOCK, (i + 1) * BLOCK) for i in range(blocks)] + [(blocks * BLOCK,) * 2]
    return cut(found, Layout.of(found), spans, state=True, logits=mx.arange(9.0))


def bytes_of(found: list[Cut]) -> list[dict[str, bytes]]:
    return [{name: bytes(data) for name, (_, _, data) in part.tensors.items()} for part in found]


def test_what_leaves_the_gpu_is_what_the_host_would_have_cut(device, monkeypatch) -> None:
    live = caches(5 * BLOCK)
    first = cuts(live, 5)
    sizes = sum(len(data) for part in bytes_of(first) for data in part.values())
    before = device._copier.sent
    assert before < sizes, "little was pinned yet"
    for _ in range(9):  # what is missing is pinned, one more each time
        sent = device._copier.sent
        again = cuts(live, 5)
    assert device._copier.sent - sent == sizes, "all of it went by the copies"
    monkeypatch.setattr(cutting, "gpu", lambda: None)
    expected = bytes_of(cuts(live, 5))
    assert bytes_of(first) == bytes_of(again) == expected
    assert bytes_of(cuts(caches(5 * BLOCK + 1), 5)) != expected, "the control"


def test_what_was_stored_stays_while_more_is(device) -> None:
    kept = [cuts(caches(length), 2) for length in (64, 70, 80)]
    kept += [cuts(caches(length), 2) for length in (64, 70, 80)]
    now = [bytes_of(found) for found in kept]
    for length in (90, 100):
        cuts(caches(length), 2)
    assert [bytes_of(found) for found in kept] == now
    assert now[:3] == now[3:] and now[0] != now[1]


def test_a_departure_takes_several_turns(device, monkeypatch) -> None:
    live = caches(5 * BLOCK)
    before = bytes_of(cuts(live, 5))
    monkeypatch.setattr(download, "DEPARTURE", 3 * 2 * 2 * HEADS * BLOCK * DIM)
    assert bytes_of(cuts(live, 5)) == before and device._copier.sent
    sent = device._copier.sent
    monkeypatch.setattr(download, "DEPARTURE", 100)
    assert bytes_of(cuts(live, 5)) == before
    assert device._copier.sent - sent <= 100, "what is larger goes through the host"


@pytest.mark.parametrize("refused", ["pin", "to_host"])
def test_what_the_driver_refuses_goes_through_the_host(device, refused: str) -> None:
    live = caches(3 * BLOCK)
    expected = bytes_of(cuts(live, 3))
    device._copier.refuses.add(refused)
    if refused == "pin":
        with pytest.raises(CudaError):
            device.pinned(10)
        device = Gpu(HostCopier(), slabs=0)
    assert bytes_of(cuts(live, 3)) == expected


def test_a_slab_comes_back_when_nothing_refers_to_it(at_once) -> None:
    slabs = Slabs(HostCopier(), 1 << 20)
    assert slabs.take(1000) is None, "nobody waits for one"
    slab = slabs.take(1000)
    assert slab is not None and slab.nbytes == 1000
    part = slab[10:20]
    assert slabs.hold(slab) and slabs.hold(part) and slabs.hold(b"")
    assert not slabs.hold(bytes(10)) and not slabs.hold(memoryview(mx.zeros(4)))
    del slab
    gc.collect()
    assert slabs.take(1000) is None, "a part of it is still in use"
    at = np.frombuffer(part, np.uint8).ctypes.data - 10
    del part
    gc.collect()
    again = [slabs.take(900) for _ in range(2)]
    places = {np.frombuffer(view, np.uint8).ctypes.data for view in again if view is not None}
    assert at in places


def test_slabs_end_at_their_limit(at_once) -> None:
    slabs = Slabs(HostCopier(), 3 << 16)
    for _ in range(9):
        slabs.take(1 << 16)
    held = [slabs.take(1 << 16) for _ in range(9)]
    assert sum(view is not None for view in held) == 3


def test_slabs_are_pinned_in_the_background(monkeypatch) -> None:
    monkeypatch.setattr(cuda, "PAUSE", 0)
    slabs = Slabs(HostCopier(), 1 << 20)
    for _ in range(1000):
        if (slab := slabs.take(5)) is not None:
            break
        mx.eval(mx.zeros(1000))
    assert slab is not None
    refusing = HostCopier()
    refusing.refuses.add("pin")
    slabs = Slabs(refusing, 1 << 20)
    assert [slabs.take(5) for _ in range(5)] == [None] * 5


@pytest.mark.parametrize("size", [1, 65536, 65537, 1 << 20, 37_748_736, (1 << 28) - 1])
def test_rooms_waste_a_quarter_at_most(size: int) -> None:
    room = cuda._room(size)
    assert size <= room < max(1.26 * size, size + 65536)
    assert cuda._room(room) == room


def test_the_first_copies_are_checked() -> None:
    copier = HostCopier()
    assert cuda._copies(Gpu(copier))

    class Wrong(HostCopier):
        def to_gpu(self, target: int, source: int, size: int) -> None:
            super().to_gpu(target, source, size - 1)

    assert not cuda._copies(Gpu(Wrong()))

    class AlsoWrong(HostCopier):
        def to_host(self, target: int, source: int, size: int) -> None:
            super().to_host(target, source, size - 1)

    assert not cuda._copies(Gpu(AlsoWrong()))
