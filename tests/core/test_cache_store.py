"""The store from outside: what is put in comes back, whatever happens to the files."""

import errno
import os
import shutil
import stat
import threading
import time

import numpy as np
import pytest

from tests.core.cache_support import (
    BLOCK,
    LAYOUT,
    ROOT,
    block,
    blocks,
    counts,
    file_of,
    files,
    folder_bytes,
    job,
    open_store,
    read,
    snapshot,
)
from thunder_patches.cache.file import RawCodec
from thunder_patches.cache.folder import MAX_BAD_FILES
from thunder_patches.cache.keys import chain, root_key
from thunder_patches.cache.record import Coded, Header, Record

PROMPT = list(range(100, 118))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "v1"


@pytest.fixture
def opened(folder):
    """Opens stores on the folder, and closes them after the test."""
    stores = []

    def open_(**changes):
        stores.append(open_store(folder, **changes))
        return stores[-1]

    yield open_
    for store in stores:
        store.close(1)


def filled(store, prompt=PROMPT, stamp=1):
    """The prompt's records, stored and written."""
    records = [*blocks(ROOT, prompt), snapshot(ROOT, prompt, len(prompt), end=True)]
    for record in records:
        store.put(record, stamp)
    assert store.flush()
    return [record.header for record in records]


class Slow(RawCodec):
    """Holds the writers up until told otherwise."""

    def __init__(self):
        self.gate = threading.Event()

    def encode(self, record):
        self.gate.wait(20)
        return super().encode(record)


# What is put in comes back


def test_after_a_restart_everything_is_found(opened):
    store = opened()
    headers = filled(store)
    store.close()
    store = opened()
    assert [read(store, header) for header in headers] == ["ssd"] * 5
    assert store.match(chain(ROOT, np.array(PROMPT), BLOCK), ROOT) == 4
    assert [ref.key for ref in store.snapshots(headers[3].key)] == [headers[4].key]
    assert store.header(headers[4].key, headers[4].parent, "snapshot") == headers[4]


def test_a_lookup_does_not_wait_for_the_first_scan(opened, monkeypatch):
    headers = filled(opened())
    gate = threading.Event()
    from thunder_patches.cache.folder import Folder

    scan = Folder.scan
    monkeypatch.setattr(Folder, "scan", lambda self: gate.wait(20) and scan(self))
    store = opened()
    assert not store.stats()["ssd"]["scanned"]
    assert store.match([h.key for h in headers[:4]], ROOT) == 4
    assert [ref.key for ref in store.snapshots(headers[3].key)] == [headers[4].key]
    assert [read(store, header) for header in headers] == ["ssd"] * 5
    assert store.match([h.key for h in headers[:4]], bytes(16)) == 0, "another root"
    gate.set()
    assert store.ready()


def test_a_record_is_found_the_moment_it_is_put_in(opened):
    """A second request 0 ms after the first: slow writers, and memory for one record at most."""
    slow = Slow()
    for budget in (0, 600):
        store = opened(codec=slow, ram_budget=budget)
        records = [*blocks(ROOT, PROMPT), snapshot(ROOT, PROMPT, 18, end=True)]
        for record in records:
            store.put(record, 1)
        assert [read(store, record.header) for record in records] == ["ram"] * 5
        assert store.match([r.header.key for r in records[:4]], ROOT) == 4
        assert len(store.snapshots(records[3].header.key)) == 1
        assert store.children(ROOT) == (records[0].header.key,)
    slow.gate.set()
    assert store.flush()
    assert [read(store, record.header) for record in records][-1] == "ssd"


def test_blocks_shared_by_two_prompts_are_stored_once(opened, folder):
    store = opened()
    filled(store)
    filled(store, [*PROMPT[:12], 1, 2, 3, 4, 5, 6], stamp=2)
    assert counts(store)["blocks_written"] == 7
    assert len(files(folder)) == 7


def test_a_snapshot_with_logits_replaces_one_without(opened, folder):
    store = opened()
    plain, better = (snapshot(ROOT, PROMPT, 18, end) for end in (False, True))
    store.put(plain, 1)
    assert store.flush()
    before = folder_bytes(folder)
    store.put(better, 2)
    store.put(plain, 3)
    assert store.flush()
    assert len(files(folder)) == 1 and read(store, better.header) == "ssd"
    assert store.stats()["ssd"]["bytes"] == folder_bytes(folder) > before
    store.close()
    store = opened()
    assert [ref.end for ref in store.snapshots(plain.header.parent)] == [True]


def test_both_a_snapshot_and_its_better_may_be_left_by_a_crash(opened, folder):
    store = opened()
    better = snapshot(ROOT, PROMPT, 18, end=True)
    store.put(snapshot(ROOT, PROMPT, 18), 1)
    assert store.flush()
    path = file_of(folder, better.header)
    content = path.read_bytes()
    store.put(better, 2)
    assert store.flush()
    store.close()
    path.write_bytes(content)
    store = opened()
    assert store.ready() and not path.exists()
    assert read(store, better.header) == "ssd"
    assert store.stats()["ssd"]["bytes"] == folder_bytes(folder)


def test_memory_alone_is_a_store_too():
    store = open_store(None, ram_budget=1 << 20)
    headers = filled(store)
    assert [read(store, header) for header in headers] == ["ram"] * 5
    stats = store.stats()
    assert stats["ram"]["blocks"] == 5 and stats["ssd"]["bytes"] == 0 and stats["problem"] is None
    store.prefetch([headers[0].key])
    store.pin([headers[0].key], "me")
    store.close()


def test_records_used_twice_come_from_memory(opened):
    headers = filled(opened())
    store = opened(ram_budget=1 << 20)
    sources = []
    for _ in range(50):
        sources.append(read(store, headers[0]))
        if sources[-1] == "ram":
            break
        time.sleep(0.02)
    assert sources[:2] == ["ssd", "ssd"] and sources[-1] == "ram"


def test_only_its_own_tokens_and_layout_are_served(opened):
    """What a collision of keys, or a key made wrongly, would meet."""
    for budget in (0, 1 << 20):
        store = opened(ram_budget=budget)
        header = filled(store)[0]
        wanted, _ = job(header)
        for change in ({"tokens": bytes(32)}, {"layout": "{}"}, {"parent": bytes(16)},
                       {"kind": "snapshot"}):  # fmt: skip
            fields = {name: getattr(wanted, name) for name in wanted.__slots__}
            assert store.read_many([type(wanted)(**{**fields, **change})]) == [None]
        store.put(block(ROOT, PROMPT, 0), 5)
        assert store.flush() and read(store, header) is not None


def test_wrong_targets_are_a_miss_and_harm_nothing(opened):
    for budget in (0, 1 << 20):
        store = opened(ram_budget=budget)
        header = filled(store)[0]
        wanted, _ = job(header)
        for targets in (
            {"k0": [memoryview(bytearray(3))]},
            {"k0": [memoryview(bytes(120))]},
            {"logits": [memoryview(bytearray(28))]},
        ):
            fields = {name: getattr(wanted, name) for name in wanted.__slots__}
            assert store.read_many([type(wanted)(**{**fields, "targets": targets})]) == [None]
        assert read(store, header) is not None
    assert counts(store)["corrupt"] == 0


def test_records_in_memory_are_handed_out_as_they_are(opened):
    store = opened(ram_budget=1 << 20)
    headers = filled(store)
    jobs = [job(header)[0] for header in headers]
    held = store.held(jobs)
    assert [record.header for record in held] == headers
    assert held[0].data[0] == block_data(headers[0])[0]
    other = job(block(ROOT, [9, 9, 9, 9], 0).header)[0]
    assert store.held([*jobs, other]) is None
    assert opened().held(jobs) is None, "they are on the disk only"


def test_many_are_read_at_once_each_into_its_own_targets(opened):
    prompt = list(range(400))
    headers = filled(opened(), prompt)
    jobs = [job(header) for header in headers]
    store = opened()
    assert store.read_many([j for j, _ in jobs]) == ["ssd"] * 101
    for header, (_, into) in zip(headers, jobs, strict=True):
        for spec, expected in zip(header.tensors, block_data(header), strict=True):
            assert into[spec.name] == expected
    assert store.read_many([]) == []


def block_data(header):
    from tests.core.cache_support import content

    return [content(header.key, spec) for spec in header.tensors]


def test_prefetch_reads_ahead_and_never_fails(opened, folder):
    headers = filled(opened())
    store = opened()
    assert store.ready()
    file_of(folder, headers[1]).unlink()
    store.prefetch([header.key for header in headers] + [bytes(16)])
    store.prefetch([header.key for header in headers])
    assert [read(store, header) for header in headers] == ["ssd", None, "ssd", "ssd", "ssd"]
    opened(prefetch=False).prefetch([headers[0].key])


@pytest.mark.parametrize("advice", [True, False])
def test_prefetch_has_the_system_read_every_byte(opened, folder, monkeypatch, advice):
    """By advice where there is such a call; elsewhere (macOS) by reading into the void."""
    store = opened()
    headers = filled(store)
    seen = []
    if advice:
        monkeypatch.setattr(os, "posix_fadvise", lambda *a: seen.append(a[3]), raising=False)
        monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
    else:
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
        readv = os.readv
        monkeypatch.setattr(os, "readv", lambda *a: seen.append(n := readv(*a)) or n)
    store.prefetch([header.key for header in headers])
    store._ahead.shutdown(wait=True)
    if advice:
        assert seen == [os.POSIX_FADV_WILLNEED] * 5
    else:
        assert sum(seen) == sum(path.stat().st_size for path in files(folder))


def test_after_closing_nothing_breaks(opened):
    store = opened()
    headers = filled(store)
    store.close()
    store.close()
    store.put(block(ROOT, [1, 2, 3, 4], 0), 1)
    store.touch([headers[0].key], 9)
    store.prefetch([headers[0].key])
    assert [read(store, header) for header in headers] == ["ssd"] * 5
    assert store.read_many([job(header)[0] for header in headers]) == ["ssd"] * 5
    assert store.flush(1)


def test_files_and_folders_are_private(opened, folder):
    old = os.umask(0)
    try:
        filled(opened())
    finally:
        os.umask(old)
    for path in [folder, *folder.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_a_use_is_the_files_time_of_modification(opened, folder):
    store = opened()
    headers = filled(store, stamp=1_700_000_000_000_000_123)
    path = file_of(folder, headers[0])
    assert path.stat().st_mtime_ns == 1_700_000_000_000_000_123
    store.touch([headers[0].key, bytes(16)], 1_800_000_000_000_000_456)
    store.touch([headers[0].key], 5)
    assert store.flush()
    assert path.stat().st_mtime_ns == 1_800_000_000_000_000_456
    assert read(store, headers[0]) and store.flush()
    assert abs(path.stat().st_mtime_ns - time.time_ns()) < 60e9


# Bad files: each is a miss, counted once, set aside, and never looked at again


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 16
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


def other_version(path):
    from tests.core.test_cache_file import forge

    forge(path, lambda header: header["__metadata__"].update(version="0"))


def unknown_codec(path):
    from tests.core.test_cache_file import forge, set_tensors

    forge(path, lambda h: set_tensors(h, lambda t: t[0].update(codec="tomorrow's")))


def foreign(path):
    import safetensors.numpy

    safetensors.numpy.save_file({"k0": np.zeros(3)}, path)


def swap(path):
    """The file of another block, with everything right but its place."""
    other = next(p for p in sorted(path.parents[1].rglob("*.safetensors")) if p != path)
    path.write_bytes(other.read_bytes())


def link_outside(path):
    outside = path.parents[3] / "outside"
    shutil.copy(path, outside)
    path.unlink()
    path.symlink_to(outside)


def dangling_link(path):
    path.unlink()
    path.symlink_to("/nowhere/at/all")


def a_folder(path):
    path.unlink()
    (path / "inside").mkdir(parents=True)


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


BAD = [truncate, flip, empty, other_version, unknown_codec, foreign, swap, link_outside,
       dangling_link, a_folder, a_pipe]  # fmt: skip


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
def test_a_bad_file_is_a_counted_miss_and_set_aside(opened, folder, spoil, restart):
    store = opened()
    headers = filled(store)
    path = file_of(folder, headers[1])
    outside = set(os.listdir(folder.parent))
    if restart:
        store.close()
    spoil(path)
    if restart:
        store = opened()
        assert store.ready()
    assert read(store, headers[1]) is None
    assert read(store, headers[1]) is None
    gone = restart and spoil in (link_outside, dangling_link, a_folder, a_pipe)
    if gone:
        assert store.match([h.key for h in headers[:4]], ROOT) == 1, "never taken for a block"
    else:
        assert counts(store)["set_aside"] == 1
        assert not os.path.lexists(path) and len(os.listdir(folder / "bad")) == 1
        assert "set aside block" in store.stats()["last_fault"]
        assert counts(store)["corrupt"] + counts(store).get("read_errors", 0) == 1
    assert set(os.listdir(folder.parent)) - outside <= {"outside"}
    # The rest is as good as before, and the block can be stored again.
    assert [read(store, h) for h in (headers[0], *headers[2:])] == ["ssd"] * 4
    store.put(block(ROOT, PROMPT, 1), 2)
    assert store.flush() and read(store, headers[1]) == "ssd"


def test_the_spoilers_are_what_spoils(opened, folder):
    """The control of the tests above."""
    store = opened()
    headers = filled(store)
    file_of(folder, headers[1]).write_bytes(file_of(folder, headers[1]).read_bytes())
    assert [read(store, header) for header in headers] == ["ssd"] * 5
    assert counts(store)["corrupt"] == counts(store)["set_aside"] == 0
    assert store.stats()["problem"] is store.stats()["last_fault"] is None


def test_numbers_that_are_not_numbers_come_back_as_they_were(opened):
    """NaN inside is the model's business: bytes are bytes."""
    good = block(ROOT, PROMPT, 0)
    data = tuple(b"\xff" * len(d) for d in good.data)
    store = opened()
    store.put(Record(good.header, data), 1)
    assert store.flush()
    wanted, into = job(good.header)
    assert store.read_many([wanted]) == ["ssd"]
    assert [bytes(into[spec.name]) for spec in good.header.tensors] == list(data)


def test_a_bad_header_is_set_aside_before_its_payload_is_read(opened, folder):
    store = opened()
    headers = filled(store)
    path = file_of(folder, headers[0])
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    assert store.header(headers[0].key, ROOT) is None
    assert counts(store)["corrupt"] == counts(store)["set_aside"] == 1
    assert store.match([headers[0].key], ROOT) == 0


def test_what_is_set_aside_is_bounded(opened, folder):
    store = opened()
    headers = filled(store, list(range(4 * (MAX_BAD_FILES + 10))))
    for path in files(folder):
        truncate(path)
    assert all(read(store, header) is None for header in headers)
    assert len(os.listdir(folder / "bad")) == MAX_BAD_FILES
    assert counts(store)["set_aside"] == len(headers)


def test_a_bad_file_that_can_not_be_moved_is_never_read_again(opened, folder, monkeypatch):
    store = opened()
    header = filled(store)[0]
    truncate(file_of(folder, header))
    from thunder_patches.cache import folder as module

    def refuse(*args, **kwargs):
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(module.os, "rename", refuse)
    monkeypatch.setattr(module.os, "unlink", refuse)
    opens = []
    really = module.open_file
    monkeypatch.setattr(module, "open_file", lambda path: opens.append(path) or really(path))
    for _ in range(3):
        assert read(store, header) is None
    assert len(opens) == 1 and counts(store)["corrupt"] == 1 and counts(store)["set_aside"] == 0
    monkeypatch.undo()
    store.put(block(ROOT, PROMPT, 0), 2)
    assert store.flush() and read(store, header) == "ssd"


def test_a_linked_directory_leads_nowhere(opened, folder):
    store = opened()
    header = filled(store)[0]
    store.close()
    place = file_of(folder, header).parent
    outside = folder.parent / "elsewhere"
    place.rename(outside)
    place.symlink_to(outside)
    before = sorted(outside.iterdir())
    store = opened()
    assert read(store, header) is None and store.match([header.key], ROOT) == 0
    store.put(block(ROOT, PROMPT, 0), 2)
    assert store.flush()
    assert sorted(outside.iterdir()) == before, "nothing written or moved outside"
    assert "found a link" in store.stats()["problem"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_disk_that_fails_to_read_is_a_miss(opened, folder, monkeypatch, number):
    store = opened()
    headers = filled(store)
    from thunder_patches.cache import file as module

    def fail(fd, buffers):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module.os, "readv", fail)
    assert read(store, headers[0]) is None
    monkeypatch.undo()
    assert read(store, headers[0]) is None, "never read twice"
    assert os.strerror(number) in store.stats()["problem"]
    assert [read(store, header) for header in headers[1:]] == ["ssd"] * 4


def test_a_process_out_of_descriptors_loses_no_file(opened, folder, monkeypatch):
    store = opened()
    headers = filled(store)
    from thunder_patches.cache import file as module

    def fail(*args, **kwargs):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(module.os, "open", fail)
    assert read(store, headers[0]) is None
    monkeypatch.undo()
    assert read(store, headers[0]) == "ssd"


# Codecs


class Halves(RawCodec):
    """Stores the first half of each tensor's bytes, and says so."""

    def __init__(self, lossy="halves", allows_lossy=False):
        self.lossy, self.allows_lossy = lossy, allows_lossy

    def encode(self, record):
        from thunder_patches.cache.file import Raw

        return Raw([Coded("halves", bytes(d[: len(d) // 2])) for d in record.data], self.lossy)

    def decode(self, spec, coded, header):
        return bytes(coded.data) + bytes(spec.nbytes - coded.nbytes)


def test_a_lossy_record_is_never_served_as_an_exact_one(opened):
    store = opened(codec=Halves(allows_lossy=True))
    header = filled(store)[0]
    assert store.read_many([job(header)[0]]) == ["ssd"]
    with pytest.raises(AssertionError, match="served wrong bytes"):
        read(store, header)
    store.close()
    store = opened(codec=Halves())
    assert read(store, header) is None
    assert counts(store)["set_aside"] == 1 and counts(store)["corrupt"] == 0
    store = opened()
    store.put(block(ROOT, PROMPT, 0), 2)
    assert store.flush() and read(store, header) == "ssd"


def test_a_codec_that_fails_to_encode_costs_the_record_only(opened):
    class Moody(RawCodec):
        def encode(self, record):
            if record.header.start == BLOCK:
                raise MemoryError("no room to encode")
            return super().encode(record)

    store = opened(codec=Moody())
    headers = filled(store)
    assert [read(store, h) for h in headers] == ["ssd", None, "ssd", "ssd", "ssd"]
    assert counts(store)["writes_dropped"] == 1
    assert "no room to encode" in store.stats()["last_fault"]


# Many threads


def test_parallel_requests_each_get_their_own(opened):
    """Six prompts that share a beginning, memory for two records, fifty rounds."""
    store = opened(ram_budget=900, disk_budget=40_000)
    prompts = [[*PROMPT[:8], *range(1000 * i, 1000 * i + 10)] for i in range(6)]
    wrong, barrier = [], threading.Barrier(6)

    def run(prompt):
        try:
            barrier.wait(20)
            for round_ in range(50):
                records = [*blocks(ROOT, prompt), snapshot(ROOT, prompt, 18, end=True)]
                for record in records:
                    if read(store, record.header) is None and round_ % 7:
                        store.put(record, time.time_ns())
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert store.flush()
    assert store.stats()["ram"]["bytes"] <= 900
    assert store.stats()["ssd"]["bytes"] <= 40_000
    assert store.stats()["problem"] is None
    assert counts(store)["corrupt"] == counts(store)["set_aside"] == 0


def test_other_models_and_tenants_never_meet(opened):
    store = opened()
    filled(store)
    for root in (root_key("another model", LAYOUT, "", BLOCK),
                 root_key("a model", LAYOUT, "tenant", BLOCK)):  # fmt: skip
        assert store.match(chain(root, np.array(PROMPT), BLOCK), root) == 0
        assert store.snapshots(root) == () and store.children(root) == ()


def test_headers_are_described_by_their_names():
    header = Header(b"k" * 16, ROOT, "snapshot", 4, bytes(16), LAYOUT, (), True)
    assert (header.ref.tail_length, header.ref.end, header.n_tokens) == (2, True, 2)
