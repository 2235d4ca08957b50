"""The folder stays within its budget, and a disk that fails costs blocks, never more."""

import errno
import os
import random
import shutil
import subprocess
import threading
import time

import pytest

from tests.core.cache_child import Child
from tests.core.cache_support import (
    BLOCK,
    ROOT,
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
from thunder_patches.cache import folder as folder_module
from thunder_patches.cache.file import RawCodec, compose
from thunder_patches.cache.folder import Folder

# Bytes of a block's file in these tests. A budget of `size(9)` holds 9, and what else there is.
_ONE = block(ROOT, range(4), 0)
RECORD = sum(buffer.nbytes for buffer in compose(_ONE, RawCodec().encode(_ONE)))


def size(records):
    return records * RECORD + RECORD // 2


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "v1"


@pytest.fixture
def opened(folder):
    stores = []

    def open_(**changes):
        stores.append(open_store(folder, **changes))
        return stores[-1]

    yield open_
    for store in stores:
        store.close(1)


def put(store, prompt, stamp=1):
    records = blocks(ROOT, prompt)
    for record in records:
        store.put(record, stamp)
    assert store.flush()
    return [record.header for record in records]


def prompt(n, length=16):
    return [n * 1000 + i for i in range(length)]


def there(store, headers):
    return [read(store, header) is not None for header in headers]


@pytest.fixture
def watched(folder, monkeypatch):
    """The folder's size, taken each time that a file was just created at its final size."""
    sizes = []
    create = Folder.create_temporary

    def measured(self, size):
        made = create(self, size)
        sizes.append(folder_bytes(folder))
        return made

    monkeypatch.setattr(Folder, "create_temporary", measured)
    return sizes


def test_the_folder_never_exceeds_its_budget(opened, folder, watched):
    budget = size(10)
    store = opened(disk_budget=budget, writers=1)
    for n in range(20):
        put(store, prompt(n), stamp=n)
        assert folder_bytes(folder) <= budget
    assert len(watched) == 80 and max(watched) <= budget
    assert store.stats()["ssd"]["bytes"] == folder_bytes(folder)
    assert store.stats()["ssd"]["blocks"] == len(files(folder)) >= 8
    assert counts(store)["blocks_evicted"] == 80 - len(files(folder))
    assert store.stats()["problem"] is None


def test_without_a_budget_it_would(opened, folder, watched):
    """The control of the test above."""
    store = opened(writers=1)
    for n in range(20):
        put(store, prompt(n), stamp=n)
    assert max(watched) > size(10)


def test_leaves_go_before_their_parents_whatever_the_stamps_say(opened, folder):
    store = opened(disk_budget=size(12))
    chooser = random.Random(1)
    shared = prompt(0, 8)
    stored = {}
    for n in range(30):
        tokens = shared[: chooser.choice([0, 4, 8])] + prompt(n, 8)
        records = [*blocks(ROOT, tokens), snapshot(ROOT, tokens, len(tokens) - 1)]
        for record in records:
            stored[record.header.key] = record.header
            store.put(record, chooser.randrange(1000))
        assert store.flush()
        names = [(path, path.stem.split("-")) for path in files(folder)]
        keys = [name[0 if "blocks" in path.parts else 1] for path, name in names]
        left = {bytes.fromhex(key) for key in keys}
        assert all(stored[key].parent in {ROOT, *left} for key in left)
    assert counts(store)["blocks_evicted"] > 20


def test_of_a_prompt_larger_than_the_budget_the_beginning_is_kept(opened):
    store = opened(disk_budget=size(9))
    other = put(store, prompt(1), 1)
    headers = put(store, prompt(2, 80), 2)
    assert there(store, other) == [False] * 4
    kept = there(store, headers)
    assert kept == [True] * 9 + [False] * 11
    assert counts(store)["blocks_written"] - counts(store)["blocks_evicted"] == 9
    assert counts(store)["writes_dropped"] >= 10
    assert there(store, put(store, prompt(3, 8), 3)) == [True] * 2


def test_the_least_recently_used_goes_first(opened):
    store = opened(disk_budget=size(9))
    first, second = put(store, prompt(1), 10), put(store, prompt(2), 20)
    store.touch([header.key for header in first], 30)
    put(store, prompt(3, 8), 40)
    assert there(store, first) == [True] * 4
    assert there(store, second) != [True] * 4


def test_a_smaller_budget_takes_effect_at_the_next_start(opened, folder):
    store = opened()
    headers = put(store, prompt(0, 80))
    store.close()
    before = folder_bytes(folder)
    store = opened(disk_budget=before // 2)
    assert store.ready()
    assert before // 2 - 2 * RECORD < folder_bytes(folder) <= before // 2
    kept = there(store, headers)
    assert kept == sorted(kept, reverse=True) and any(kept), "the beginning is what is kept"


def test_pinned_records_and_their_parents_stay(opened):
    store = opened(disk_budget=size(9))
    pinned = put(store, prompt(1), 1)
    store.pin([pinned[2].key], "mine")
    store.pin([pinned[2].key], "yours")
    for n in range(2, 9):
        put(store, prompt(n), n)
    assert there(store, pinned) == [True, True, True, False]
    store.unpin([pinned[2].key], "yours")
    put(store, prompt(10), 10)
    assert there(store, pinned[:3]) == [True] * 3
    store.unpin([pinned[2].key], "mine")
    # Reading them was a use; these come after it.
    for n in range(11, 16):
        put(store, prompt(n), time.time_ns() + n)
    assert there(store, pinned) == [False] * 4


def test_what_was_set_aside_goes_first(opened, folder):
    store = opened(disk_budget=size(9))
    headers = put(store, prompt(1, 28))
    for header in headers[5:]:
        file_of(folder, header).write_bytes(b"x" * RECORD)
        assert read(store, header) is None
    assert len(os.listdir(folder / "bad")) == 2
    put(store, prompt(2), 2)
    assert os.listdir(folder / "bad") == [] and counts(store)["blocks_evicted"] == 0
    assert there(store, headers[:5]) == [True] * 5
    assert folder_bytes(folder) <= size(9)


def test_files_of_others_count_and_are_left_alone(opened, folder):
    folder.mkdir(parents=True)
    (folder / "notes").mkdir()
    (folder / "notes" / "mine.txt").write_bytes(b"x" * (7 * RECORD))
    store = opened(disk_budget=size(10))
    for n in range(5):
        put(store, prompt(n), n)
        assert folder_bytes(folder) <= size(10)
    assert (folder / "notes" / "mine.txt").stat().st_size == 7 * RECORD
    assert len(files(folder)) == 3


def test_no_room_at_all_is_said(opened, folder):
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_bytes(b"x" * size(10))
    store = opened(disk_budget=size(10))
    headers = [put(store, prompt(n, 4))[0] for n in range(4)]
    assert there(store, headers) == [False] * 4
    assert counts(store)["writes_dropped"] == 4
    assert "nothing there can go" in store.stats()["problem"]
    assert f"{folder_bytes(folder)} bytes in the folder" in store.stats()["problem"]


def test_a_record_larger_than_the_budget_pushes_nothing_out(opened):
    store = opened(disk_budget=size(6))
    headers = put(store, prompt(1))
    large = block(ROOT, prompt(2), 0, dim=500)
    store.put(large, 5)
    assert store.flush()
    assert read(store, large.header) is None
    assert there(store, headers) == [True] * 4
    assert "exceeds the budget" in store.stats()["last_fault"]
    put(store, prompt(3, 4), 6)
    assert store.stats()["problem"] is None


def test_a_file_that_can_not_be_deleted_is_left_and_said(opened, folder, monkeypatch):
    store = opened(disk_budget=size(9))
    headers = put(store, prompt(1), 1)
    stuck = str(file_of(folder, headers[3]))
    unlink = os.unlink

    def unlink_others(path, **kwargs):
        if path == stuck:
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        unlink(path, **kwargs)

    monkeypatch.setattr(folder_module.os, "unlink", unlink_others)
    for n in range(2, 8):
        put(store, prompt(n), n)
        assert folder_bytes(folder) <= size(9)
    assert os.path.exists(stuck) and there(store, headers) == [False, False, False, True]
    assert "Operation not permitted" in store.stats()["problem"]


def test_a_folder_that_vanishes_is_made_again(opened, folder):
    store = opened()
    first = put(store, prompt(1))
    shutil.rmtree(folder)
    assert there(store, first) == [False] * 4
    second = put(store, prompt(2))
    assert there(store, second) == [True] * 4
    assert store.stats()["ssd"]["bytes"] == folder_bytes(folder)
    assert store.stats()["problem"] is None
    assert (folder.stat().st_mode & 0o777) == 0o700


def test_files_deleted_by_hand_are_forgotten(opened, folder):
    store = opened(disk_budget=size(9))
    headers = put(store, prompt(1))
    for path in files(folder)[:3]:
        path.unlink()
    assert there(store, headers).count(True) == 1
    for n in range(2, 8):
        put(store, prompt(n), time.time_ns())
        assert folder_bytes(folder) <= size(9)
    store.close()
    store = opened(disk_budget=size(9))
    assert store.ready() and store.stats()["ssd"]["bytes"] == folder_bytes(folder)


@pytest.mark.parametrize("damage", [b"", b"x" * 24, bytes(24), b"\xff" * 100])
def test_a_damaged_count_is_made_anew(opened, folder, damage):
    store = opened(disk_budget=size(9))
    headers = put(store, prompt(1))
    (folder / "usage").write_bytes(damage)
    put(store, prompt(2, 8))
    assert there(store, headers) == [True] * 4
    assert store.stats()["ssd"]["bytes"] == folder_bytes(folder)


def test_a_file_in_place_of_the_folder_is_said(folder):
    folder.parent.mkdir(parents=True)
    folder.write_text("not a folder")
    store = open_store(folder, ram_budget=1 << 20)
    record = block(ROOT, prompt(1), 0)
    store.put(record, 1)
    assert store.flush() and read(store, record.header) == "ram"
    assert store.stats()["problem"]
    store.close()
    assert folder.read_text() == "not a folder"


# Full and read-only disks


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True
    )
    if made.returncode:
        pytest.skip("needs the right to mount a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_keeps_what_fits(small_disk):
    """The budget allows far more than the disk: the oldest goes for the newest."""
    folder = small_disk / "v1"
    store = open_store(folder)
    headers = []
    for n in range(120):
        headers.append(put(store, prompt(n, 4), stamp=n)[0])
    kept = there(store, headers)
    assert 20 <= kept.count(True) < 120 and kept[-1]
    assert kept == sorted(kept)
    assert counts(store)["corrupt"] == 0
    store.close()


def test_a_disk_that_others_filled_is_said_and_recovers(small_disk):
    folder = small_disk / "v1"
    store = open_store(folder, ram_budget=1 << 20)
    assert store.ready()
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(1 << 20))
    record = block(ROOT, prompt(1), 0)
    store.put(record, 1)
    assert store.flush() and read(store, record.header) == "ram"
    assert "No space left" in store.stats()["problem"]
    assert counts(store)["writes_dropped"] >= 1
    filler.unlink()
    deadline = time.monotonic() + 20
    while store.stats()["problem"] and time.monotonic() < deadline:
        time.sleep(0.1)
        put(store, prompt(2, 4))
    assert store.stats()["problem"] is None
    assert not list(folder.rglob("*.part"))
    store.close()


def test_what_only_memory_has_is_written_when_it_is_used(opened, folder, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.EIO, "I/O error")

    store = opened(ram_budget=1 << 20)
    assert store.ready()
    monkeypatch.setattr(os, "writev", fail)
    headers = put(store, prompt(1))
    monkeypatch.undo()
    assert store.flush() and files(folder) == []
    store._disk._paused_until = 0
    assert there(store, headers) == [True] * 4
    assert store.flush() and len(files(folder)) == 4


@pytest.mark.parametrize("call", ["writev", "ftruncate", "rename", "open"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_every_call_on_the_way_to_the_disk_may_fail(opened, folder, monkeypatch, call, number):
    store = opened(disk_budget=size(20))
    before = put(store, prompt(1))
    used = folder_bytes(folder)

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    put(store, prompt(2))
    monkeypatch.undo()
    assert os.strerror(number) in store.stats()["problem"]
    assert counts(store)["writes_dropped"] == 4
    assert not list(folder.rglob("*.part")) or call == "open"
    if number not in (errno.ENOSPC, errno.EDQUOT):
        assert there(store, before) == [True] * 4 and folder_bytes(folder) == used
    store._disk._paused_until = 0
    assert there(store, put(store, prompt(3))) == [True] * 4
    assert store.stats()["problem"] is None
    assert store.stats()["ssd"]["bytes"] == folder_bytes(folder)


def test_a_disk_that_keeps_no_times_is_good_enough(opened, monkeypatch):
    def fail(*args, **kwargs):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "utime", fail)
    store = opened()
    headers = put(store, prompt(1))
    assert there(store, headers) == [True] * 4 and store.flush()
    assert store.stats()["problem"] is None


def test_a_failing_disk_is_left_alone_for_a_while(opened, folder, monkeypatch):
    store = opened()
    assert store.ready()
    tries = []

    def fail(*args, **kwargs):
        tries.append(args)
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "writev", fail)
    put(store, prompt(1, 400))
    assert 1 <= len(tries) < 20 and counts(store)["writes_dropped"] == 100


@pytest.fixture
def shared(tmp_path_factory):
    """A folder that another user may reach."""
    import tempfile

    place = tempfile.mkdtemp()
    os.chmod(place, 0o755)
    yield type(tmp_path_factory.getbasetemp())(place)
    shutil.rmtree(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run as somebody else")
def test_a_read_only_folder_serves_and_says_why_it_stores_nothing(shared):
    folder = shared / "v1"
    store = open_store(folder)
    put(store, prompt(1))
    store.close()
    for path in [folder, *folder.rglob("*")]:
        os.chmod(path, 0o755 if path.is_dir() else 0o644)
    listing = sorted(folder.rglob("*"))
    with Child(folder, user=65534) as nobody:
        assert nobody.opened
        assert nobody.ask("put", prompt=prompt(2)) is True
        assert nobody.ask("read", prompt=prompt(2)) == [None] * 4
        assert nobody.ask("read", prompt=prompt(1)) == ["ssd"] * 4
        stats = nobody.ask("stats")
        assert "Permission denied" in stats["problem"]
        assert stats["counts"]["writes_dropped"] == 4 and stats["ssd"]["blocks"] == 4
    assert sorted(folder.rglob("*")) == listing


# Two processes


def test_another_process_finds_what_this_one_writes(folder, opened):
    store = opened()
    assert store.ready()
    with Child(folder) as other:
        assert other.ask("put", prompt=prompt(1))
        assert there(store, [r.header for r in blocks(ROOT, prompt(1))]) == [True] * 4
        put(store, prompt(2))
        assert other.ask("read", prompt=prompt(2)) == ["ssd"] * 4
        tail = snapshot(ROOT, prompt(2), 15)
        store.put(tail, 1)
        assert store.flush()


def test_two_processes_share_one_budget(folder):
    budget = size(40)
    sizes, stop = [], threading.Event()

    def watch():
        while not stop.is_set():
            sizes.append(sum(sizes_of(folder)))

    thread = threading.Thread(target=watch)
    with Child(folder, disk_budget=budget) as one, Child(folder, disk_budget=budget) as two:
        thread.start()
        try:
            for n in range(12):
                for i, child in enumerate((one, two)):
                    child.tell("put", prompt=prompt(2 * n + i, 40), stamp=time.time_ns())
                assert one.answer() and two.answer()
        finally:
            stop.set()
            thread.join(20)
        told = [child.ask("stats") for child in (one, two)]
        for stats in told:
            assert stats["problem"] is None
            assert stats["ssd"]["bytes"] == folder_bytes(folder) <= budget
            assert stats["counts"]["corrupt"] == 0
        written = sum(stats["counts"]["blocks_written"] for stats in told)
        evicted = sum(stats["counts"]["blocks_evicted"] for stats in told)
        assert written == 240 and written - evicted == len(files(folder))
        assert one.ask("read", prompt=prompt(23, 40)).count("ssd") >= 8
    # A walk isn't a moment: a file that gets its name meanwhile may be seen twice.
    assert len(sizes) > 20 and max(sizes) <= budget + 2 * RECORD


def sizes_of(folder):
    for path in folder.rglob("*"):
        try:
            yield 0 if path.is_dir() else path.lstat().st_size
        except FileNotFoundError:
            continue


def test_a_use_by_another_process_counts(folder):
    """One process only reads what the other wrote; the other makes room and spares it."""
    with Child(folder, disk_budget=size(12)) as writer, Child(folder) as reader:
        assert writer.ask("put", prompt=prompt(1), stamp=1)
        assert writer.ask("put", prompt=prompt(2), stamp=2)
        assert reader.ask("read", prompt=prompt(1)) == ["ssd"] * 4
        assert reader.ask("put", prompt=[]) is True  # flushes the uses
        for n in range(3, 6):
            assert writer.ask("put", prompt=prompt(n, 8), stamp=n)
        assert writer.ask("read", prompt=prompt(1)) == ["ssd"] * 4
        assert writer.ask("read", prompt=prompt(2)) != ["ssd"] * 4


def test_only_what_dead_processes_left_is_removed(folder):
    with Child(folder) as dead, Child(folder) as alive:
        places = sorted((folder / "tmp").iterdir())
        assert len(places) == 2
        for place in places:
            (place / "0.part").write_bytes(bytes(5000))
        pid = dead.process.pid
        dead.close()
        store = open_store(folder)
        assert store.ready()
        left = sorted(path.parent.name for path in (folder / "tmp").glob("*/*.part"))
        assert [name.split("-")[0] for name in left] == [str(alive.process.pid)] != [str(pid)]
        assert store.stats()["ssd"]["bytes"] == folder_bytes(folder) > 5000
        store.close()
        alive.close()
    store = open_store(folder)
    assert store.ready() and not list((folder / "tmp").glob("*/*.part"))
    assert store.stats()["ssd"]["bytes"] == folder_bytes(folder)
    store.close()
    assert os.listdir(folder / "tmp") == []


def test_a_process_that_holds_the_lock_for_ever_costs_blocks_only(opened, folder, monkeypatch):
    monkeypatch.setattr(folder_module, "LOCK_SECONDS", 0.2)
    store = opened()
    headers = put(store, prompt(1))
    other = Folder(folder)
    with other.exclusive():
        lost = put(store, prompt(2, BLOCK))
        assert there(store, headers) == [True] * 4
    assert there(store, lost) == [False]
    assert "lock" in store.stats()["problem"]


def test_what_was_lost_is_known(folder, opened):
    """Evicted or damaged: the store tells how, of its own records only."""
    store = opened(disk_budget=size(3))
    first = put(store, range(2 * BLOCK), stamp=1)
    put(store, range(1000, 1000 + 3 * BLOCK), stamp=2)
    assert store.flush(10)
    gone = [h.key for h in first if not store.match([h.key], h.parent)]
    assert gone
    assert {store.lost(key).how for key in gone} == {"evicted"}
    assert store.lost(b"never seen there") is None
