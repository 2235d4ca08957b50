import pytest

from tests.core.cache_support import (
    ROOT,
    blocks,
    counts,
    file_of,
    files,
    folder_bytes,
    open_store,
    read,
    snapshot,
)
from thunder_patches.cache import audit

PROMPT = list(range(10))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "v1"


@pytest.fixture
def store(folder):
    store = open_store(folder)
    for i, record in enumerate([*blocks(ROOT, PROMPT), snapshot(ROOT, PROMPT, 10, end=True)]):
        store.put(record, 100 - i)
    assert store.flush()
    yield store
    store.close()


def test_records_are_listed_latest_first(store, folder):
    found = audit.records(folder)
    assert [file.stamp for file in found] == [100, 99, 98]
    assert [file.ref.kind for file in found] == ["block", "block", "snapshot"]
    assert sum(file.size for file in found) == sum(path.stat().st_size for path in files(folder))
    head = audit.head(folder, found[2])
    assert head.header == snapshot(ROOT, PROMPT, 10, end=True).header


def test_verifying_finds_what_is_bad_and_changes_nothing(store, folder):
    found = audit.records(folder)
    assert [audit.verify(folder, file) for file in found] == [None] * 3
    path = file_of(folder, audit.head(folder, found[1]).header)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert [audit.verify(folder, file) for file in found] == [
        None,
        "the payload's checksum is wrong",
        None,
    ]
    assert path.exists() and counts(store)["set_aside"] == 0


def test_clearing_leaves_a_running_store_working(store, folder):
    before = folder_bytes(folder)
    freed = audit.clear(folder)
    assert files(folder) == [] and freed > 0 and folder_bytes(folder) <= before - freed
    records = blocks(ROOT, PROMPT)
    assert [read(store, record.header) for record in records] == [None, None]
    for record in records:
        store.put(record, 200)
    assert store.flush()
    assert [read(store, record.header) for record in records] == ["ssd", "ssd"]
    assert store.stats()["ssd"]["bytes"] == folder_bytes(folder)
