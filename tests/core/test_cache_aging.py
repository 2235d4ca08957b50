"""Records are re-encoded in idle time: the same bytes come back, whoever else is at work."""

import errno
import os
import threading
import time

import pytest

from tests.core.cache_child import Child
from tests.core.cache_support import (
    ROOT,
    Shortens,
    age_all,
    block,
    blocks,
    counts,
    file_of,
    files,
    folder_bytes,
    open_store,
    read,
    snapshot,
)
from thunder_patches.cache import aging
from thunder_patches.cache.aging import Ager
from thunder_patches.cache.file import RawCodec, compose

DIM = 400
_ONE = block(ROOT, range(4), 0, DIM)
RECORD = sum(buffer.nbytes for buffer in compose(_ONE, RawCodec().encode(_ONE)))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "v1"


@pytest.fixture
def opened(folder):
    stores = []

    def open_(**changes):
        stores.append(open_store(folder, **{"codec": Shortens(), **changes}))
        return stores[-1]

    yield open_
    for store in stores:
        store.close(1)


def prompt(n, length=16):
    return [n * 1000 + i for i in range(length)]


def put(store, n=0, length=16, stamp=1):
    tokens = prompt(n, length)
    records = [
        *blocks(ROOT, tokens, DIM),
        snapshot(ROOT, tokens, length - 1, dim=DIM),
        snapshot(ROOT, tokens, length, end=True, dim=DIM),
    ]
    for record in records:
        store.put(record, stamp)
    assert store.flush()
    return [record.header for record in records]


def test_the_same_bytes_come_back_from_smaller_files(opened, folder):
    store = opened()
    headers = put(store, stamp=5)
    before = folder_bytes(folder)
    assert age_all(store)
    assert [read(store, header) for header in headers] == ["ssd"] * 6
    assert store.stats()["ssd"]["bytes"] == folder_bytes(folder) < 0.6 * before
    assert counts(store)["blocks_reencoded"] == 6
    assert counts(store)["bytes_saved"] == before - folder_bytes(folder)
    assert counts(store)["corrupt"] == 0 and not list(folder.rglob("*.part"))
    store.close()
    store = opened()
    assert [read(store, header) for header in headers] == ["ssd"] * 6


def test_a_record_is_re_encoded_once_and_keeps_its_age(opened, folder):
    store = opened()
    (header, *_) = put(store, stamp=5)
    assert age_all(store)
    times = {path: path.stat().st_mtime_ns for path in files(folder)}
    assert set(times.values()) == {5}
    inode = file_of(folder, header).stat().st_ino
    assert age_all(store) and age_all(store)
    assert file_of(folder, header).stat().st_ino == inode
    assert counts(store)["blocks_reencoded"] == 6


def test_a_codec_that_gains_nothing_leaves_files_alone(opened, folder):
    store = opened(codec=RawCodec())
    put(store)
    before = {path: path.stat().st_ino for path in files(folder)}
    assert age_all(store)
    assert {path: path.stat().st_ino for path in files(folder)} == before


def test_only_what_has_not_been_used_for_long(opened):
    store = opened()
    put(store, 1, stamp=time.time_ns())
    old = put(store, 2, stamp=time.time_ns() - int(2e9 * aging.AGED_SECONDS))
    assert Ager(store._disk, lambda: 3600.0).sweep()
    assert counts(store)["blocks_reencoded"] == len(old)


def test_in_a_folder_under_pressure_everything(opened):
    store = opened(disk_budget=17 * RECORD)
    for n in range(3):
        put(store, n, stamp=time.time_ns())
    assert store.stats()["ssd"]["bytes"] > 0.8 * store.stats()["ssd"]["budget_bytes"]
    assert Ager(store._disk, lambda: 3600.0).sweep()
    # As much as it takes, and no more.
    assert 1 <= counts(store)["blocks_reencoded"] < 18
    assert store.stats()["ssd"]["bytes"] <= 0.8 * store.stats()["ssd"]["budget_bytes"]


def test_a_request_puts_an_end_to_it(opened):
    store = opened()
    put(store)
    looks = iter([3600.0, 3600.0])
    assert not Ager(store._disk, lambda: next(looks, 0.0), aged_seconds=0.0).sweep()
    assert counts(store)["blocks_reencoded"] == 2


def test_its_thread_waits_until_nothing_else_goes_on(opened, monkeypatch):
    monkeypatch.setattr(aging, "SWEEP_SECONDS", 0.01)
    store = opened()
    put(store)
    busy = threading.Event()
    busy.set()
    asked = []

    def quiet():
        asked.append(1)
        return 0.0 if busy.is_set() else 3600.0

    ager = Ager(store._disk, quiet, quiet_seconds=0.01)
    ager.start()
    wait_for(lambda: len(asked) > 5)
    assert counts(store).get("blocks_reencoded", 0) == 0
    busy.clear()
    wait_for(lambda: counts(store).get("blocks_reencoded", 0) == 6)
    ager.close()
    assert not ager._thread.is_alive()


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_full_folder_stays_within_its_budget(opened, folder, monkeypatch):
    from thunder_patches.cache.folder import Folder

    sizes = []
    create = Folder.create_temporary

    def measured(self, size):
        made = create(self, size)
        sizes.append(folder_bytes(folder))
        return made

    store = opened(disk_budget=12 * RECORD + 900)
    for n in range(4):
        put(store, n, stamp=n + 1)
    had = len(files(folder))
    assert store.stats()["ssd"]["bytes"] > 11 * RECORD
    monkeypatch.setattr(Folder, "create_temporary", measured)
    assert age_all(store)
    assert len(files(folder)) >= had - 1, "one had to go to make room for the first, at most"
    assert len(sizes) >= had - 1 and max(sizes) <= 12 * RECORD + 900
    assert store.stats()["ssd"]["bytes"] == folder_bytes(folder) < 8 * RECORD


@pytest.mark.parametrize("call", ["writev", "ftruncate", "rename", "open"])
def test_a_failure_leaves_the_record_as_it_was(opened, folder, monkeypatch, call):
    store = opened()
    headers = put(store)
    before = folder_bytes(folder)
    assert store.ready()

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "I/O error")

    real = getattr(os, call)
    if call == "open":  # of the new file only
        monkeypatch.setattr(
            os, call, lambda p, f, *m: fail() if str(p).endswith(".part") else real(p, f, *m)
        )
    else:
        monkeypatch.setattr(os, call, fail)
    assert not age_all(store)
    monkeypatch.undo()
    assert "I/O error" in store.stats()["last_fault"]
    assert folder_bytes(folder) == before == store.stats()["ssd"]["bytes"]
    assert [read(store, header) for header in headers] == ["ssd"] * 6
    assert age_all(store) and counts(store)["blocks_reencoded"] == 6


def test_what_went_or_changed_meanwhile_is_not_brought_back(opened, folder, monkeypatch):
    store = opened()
    headers = put(store)
    used = folder_bytes(folder)
    write = store._disk._write_temporary

    def write_while_it_goes(*args, **kwargs):
        made = write(*args, **kwargs)
        file_of(folder, headers[0]).unlink(missing_ok=True)
        return made

    gone = file_of(folder, headers[0]).stat().st_size
    monkeypatch.setattr(store._disk, "_write_temporary", write_while_it_goes)
    assert store._disk.age(headers[0].ref)
    assert read(store, headers[0]) is None and counts(store).get("blocks_reencoded", 0) == 0
    assert folder_bytes(folder) == used - gone and not list(folder.rglob("*.part"))


def test_two_processes_at_once_count_each_byte_once(folder):
    """Both re-encode the same files over and over, while one of them also stores new ones."""
    with Child(folder) as one, Child(folder) as two:
        for n in range(12):
            assert one.ask("put", prompt=prompt(n, 80))
            assert two.ask("read", prompt=prompt(n, 80)) == ["ssd"] * 20  # so that it knows them
            one.tell("age")
            two.tell("age")
            assert one.answer() and two.answer()
        told = [child.ask("stats") for child in (one, two)]
        for stats in told:
            assert stats["ssd"]["bytes"] == folder_bytes(folder)
            assert stats["counts"]["corrupt"] == 0 and stats["problem"] is None
        done = [stats["counts"].get("blocks_reencoded", 0) for stats in told]
        assert sum(done) == 240 and all(done), f"{done}: they never met"
        assert two.ask("read", prompt=prompt(11, 80)) == ["ssd"] * 20


def test_readers_at_the_same_time_never_see_anything_else(opened):
    store = opened()
    headers = [header for n in range(6) for header in put(store, n, 40)]
    stop = threading.Event()
    found, faults = [], []

    def reading():
        while not stop.is_set():
            for header in headers:
                try:
                    found.append(read(store, header))
                except AssertionError as fault:
                    faults.append(fault)

    thread = threading.Thread(target=reading)
    thread.start()
    assert age_all(store)
    stop.set()
    thread.join(20)
    assert not faults and set(found) == {"ssd"}
    assert counts(store)["blocks_reencoded"] == len(headers)
