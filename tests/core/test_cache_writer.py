import threading

import pytest

from tests.core.cache_support import ROOT
from tests.core.test_cache_ram import SIZE, key, record
from thunder_patches.cache.writer import WriteQueue


class Disk:
    """A writer that waits at a gate before each record."""

    def __init__(self, open_gate=True):
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)
        self.written, self.left, self.lost, self.idled = [], [], [], 0
        if open_gate:
            self.gate.set()

    def write(self, record, stamp):
        self.begun.release()
        assert self.gate.wait(20)
        if record.header.key == key("bad"):
            raise RuntimeError("a fault in the writer")
        self.written.append(record.header.key)

    def idle(self):
        self.idled += 1

    def queue(self, threads=1, max_bytes=100 * SIZE):
        return WriteQueue(
            self.write, idle=self.idle, gone=self.gone, threads=threads, max_bytes=max_bytes
        )

    def gone(self, record, dropped):
        self.left.append(record.header.key)
        if dropped:
            self.lost.append(record)


def test_a_record_is_found_until_it_is_written():
    disk = Disk(open_gate=False)
    queue = disk.queue()
    for name in "ab":
        queue.put(record(name), 1)
    assert disk.begun.acquire(timeout=20)
    for name in "ab":
        assert queue.get(key(name)).header.key == key(name) and key(name) in queue
    assert len(queue.after(ROOT)) == 2 and queue.bytes == 2 * SIZE
    assert not queue.flush(0.01), "the gate is closed"
    disk.gate.set()
    assert queue.flush(20)
    assert disk.written == [key("a"), key("b")]
    assert queue.get(key("a")) is None and len(queue) == 0 and queue.bytes == 0
    assert queue.after(ROOT) == []
    queue.close(1)


def test_the_oldest_that_no_writer_has_taken_is_dropped():
    disk = Disk(open_gate=False)
    queue = disk.queue(max_bytes=3 * SIZE)
    queue.put(record("taken"), 1)
    assert disk.begun.acquire(timeout=20)
    for name in "abcd":
        queue.put(record(name), 1)
    assert [r.header.key for r in disk.lost] == [key("a"), key("b")]
    assert queue.bytes == 3 * SIZE
    disk.gate.set()
    assert queue.flush(20)
    assert disk.written == [key("taken"), key("c"), key("d")]
    assert sorted(disk.left) == sorted(map(key, ["taken", *"abcd"]))
    queue.close(1)


def test_the_newest_is_kept_however_large():
    disk = Disk(open_gate=False)
    queue = disk.queue(max_bytes=SIZE)
    queue.put(record("taken"), 1)
    assert disk.begun.acquire(timeout=20)
    queue.put(record("a"), 1)
    queue.put(record("big", 50 * SIZE), 1)
    assert [r.header.key for r in disk.lost] == [key("a")]
    assert key("big") in queue
    disk.gate.set()
    queue.close(20)
    assert disk.written == [key("taken"), key("big")]


def test_what_is_on_its_way_is_not_queued_again():
    disk = Disk(open_gate=False)
    queue = disk.queue()
    for _ in range(3):
        queue.put(record("a"), 1)
        queue.put(record("b"), 1)
    disk.gate.set()
    assert queue.flush(20) and disk.written == [key("a"), key("b")]
    queue.close(1)


def test_a_snapshot_with_logits_overtakes_one_without():
    disk = Disk(open_gate=False)
    queue = disk.queue()
    queue.put(record("taken"), 1)
    assert disk.begun.acquire(timeout=20)
    queue.put(record("s", kind="snapshot"), 1)
    queue.put(record("s", kind="snapshot", end=True), 1)
    queue.put(record("s", kind="snapshot"), 1)
    assert queue.get(key("s")).header.end and len(queue.after(ROOT)) == 2
    disk.gate.set()
    assert queue.close(20)
    assert disk.written == [key("taken"), key("s")] and not disk.lost


def test_a_fault_in_the_writer_costs_that_record_only():
    disk = Disk()
    queue = disk.queue()
    for name in ("a", "bad", "b"):
        queue.put(record(name), 1)
    assert queue.flush(20)
    assert disk.written == [key("a"), key("b")] and len(queue) == 0
    assert disk.left == [key("a"), key("bad"), key("b")]
    queue.close(1)


def test_idle_runs_after_the_records():
    disk = Disk(open_gate=False)
    queue = disk.queue()
    queue.put(record("a"), 1)
    queue.poke()
    assert disk.begun.acquire(timeout=20)
    assert disk.idled == 0
    disk.gate.set()
    assert queue.flush(20) and disk.idled == 1
    queue.close(1)


@pytest.mark.parametrize("threads", [1, 3])
def test_closing_writes_what_waits(threads):
    disk = Disk()
    queue = disk.queue(threads)
    for i in range(50):
        queue.put(record(str(i)), 1)
    assert queue.close(20)
    assert sorted(disk.written) == sorted(key(str(i)) for i in range(50)) and not disk.lost
    queue.put(record("late"), 1)
    queue.poke()
    assert len(queue) == 0
    assert not any(thread.is_alive() for thread in queue._threads)


def test_closing_drops_what_can_not_be_written_in_time():
    disk = Disk(open_gate=False)
    queue = disk.queue()
    for name in "abc":
        queue.put(record(name), 1)
    assert disk.begun.acquire(timeout=20)
    assert not queue.close(0.01)
    assert [r.header.key for r in disk.lost] == [key("b"), key("c")]
    disk.gate.set()
