import random
from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from tests.core.cache_support import ROOT
from thunder_patches.cache import ram
from thunder_patches.cache.ram import RamTier
from thunder_patches.cache.record import Header, Record, TensorSpec

SIZE = 100


def record(name, size=SIZE, parent=ROOT, kind="block", end=False):
    spec = TensorSpec("k0", "U8", (size,))
    header = Header(name.encode().ljust(16, b"."), parent, kind, 0, b"", "", (spec,), end)
    return Record(header, (bytes(size),))


def key(name):
    return record(name).header.key


def holds(tier, names):
    return [name for name in names if key(name) in tier]


def test_what_was_used_once_never_pushes_out_what_was_used_twice():
    tier = RamTier(3 * SIZE)
    tier.put(record("a"), 1)
    tier.put(record("b"), 1)
    assert tier.get(key("a"), 2) and tier.get(key("b"), 2)
    for i in range(100):
        tier.put(record(f"once {i}"), 3 + i)
    assert holds(tier, "ab") == ["a", "b"]
    assert len(tier) == 3 and tier.bytes == 3 * SIZE


def test_a_plain_lru_would_have_lost_both():
    """The control of the test above."""
    lru = OrderedDict.fromkeys("ab")
    for i in range(100):
        lru[f"once {i}"] = None
        while len(lru) > 3:
            lru.popitem(last=False)
    assert "a" not in lru and "b" not in lru


def test_the_cold_queue_goes_oldest_first():
    tier = RamTier(2 * SIZE)
    for tick, name in enumerate("abc"):
        assert tier.put(record(name), tick)
    assert holds(tier, "abc") == ["b", "c"]


def test_the_hot_queue_goes_by_the_last_use_but_one():
    tier = RamTier(2 * SIZE)
    for name, ticks in {"a": (1, 9), "b": (2, 3)}.items():
        tier.put(record(name), ticks[0])
        tier.get(key(name), ticks[1])
    tier.put(record("c"), 4)
    assert holds(tier, "abc") == ["a", "b"], "c was used once"
    tier.put(record("c"), 10)
    assert holds(tier, "abc") == ["b", "c"], "a's last use but one is the oldest"


def test_what_went_is_remembered():
    tier = RamTier(SIZE)
    tier.put(record("a"), 1)
    tier.put(record("b"), 2)
    assert holds(tier, "ab") == ["b"]
    tier.put(record("a"), 3)
    assert holds(tier, "ab") == ["a"], "a second use makes it hot"
    tier.put(record("c"), 4)
    assert holds(tier, "abc") == ["a"]


def test_one_request_does_not_push_out_its_own_beginning():
    tier = RamTier(2 * SIZE)
    for name in "abcd":
        tier.put(record(name), 7)
    assert holds(tier, "abcd") == ["a", "b"]


def test_a_prompt_larger_than_the_budget_does_not_cycle_through_it():
    """The same four records, three requests: the ones held stay, so they serve."""
    tier = RamTier(2 * SIZE)
    served = 0
    for tick in range(1, 4):
        for name in "abcd":
            if tier.get(key(name), tick):
                served += 1
            elif tier.wants(key(name), SIZE, tick):
                tier.hold(record(name))
            else:
                tier.put(record(name), tick)
    assert served == 4 and holds(tier, "abcd") == ["a", "b"]


def test_wants_only_what_was_used_before_and_fits():
    tier = RamTier(SIZE)
    assert not tier.wants(key("a"), SIZE, 1)
    assert tier.wants(key("a"), SIZE, 2)
    assert not tier.wants(key("b"), 2 * SIZE, 2)
    assert not tier.wants(key("b"), 2 * SIZE, 3), "larger than the budget"


def test_nothing_larger_than_the_budget_is_held_and_nothing_goes_for_it():
    tier = RamTier(2 * SIZE)
    tier.put(record("a"), 1)
    assert not tier.put(record("big", 3 * SIZE), 2)
    assert not tier.put(record("big", 3 * SIZE), 3)
    assert holds(tier, "a") == ["a"]
    assert not RamTier(0).put(record("a"), 1)


def test_a_record_that_can_not_come_in_pushes_nothing_out():
    tier = RamTier(3 * SIZE)
    tier.put(record("cold"), 1)
    tier.put(record("hot"), 1)
    tier.get(key("hot"), 2)
    assert not tier.put(record("big", 3 * SIZE), 3), "it would have to push out the hot one too"
    assert len(tier) == 2


def test_a_snapshot_with_logits_takes_the_place_of_one_without():
    tier = RamTier(2 * SIZE)
    without = record("s", kind="snapshot")
    with_logits = record("s", kind="snapshot", end=True)
    tier.put(without, 1)
    tier.put(with_logits, 2)
    assert tier.peek(key("s")) is with_logits and tier.bytes == SIZE
    tier.put(without, 3)
    assert tier.peek(key("s")) is with_logits


def test_what_hangs_off_a_record_is_found():
    tier = RamTier(10 * SIZE)
    for name in "ab":
        tier.put(record(name), 1)
    tier.put(record("c", parent=key("a")), 1)
    assert [ref.key for ref in tier.after(ROOT)] == [key("a"), key("b")]
    assert [ref.key for ref in tier.after(key("a"))] == [key("c")]
    tier.clear()
    assert tier.after(ROOT) == [] and tier.bytes == 0 and len(tier) == 0


@given(st.lists(st.tuples(st.sampled_from("pgw"), st.integers(0, 9), st.integers(1, 3)),
                max_size=60))  # fmt: skip
def test_its_books_are_right_whatever_happens(steps):
    tier = RamTier(5 * SIZE)
    for tick, (what, which, size) in enumerate(steps):
        if what == "p":
            tier.put(record(str(which), which % 3 * SIZE + SIZE), tick // 2)
        elif what == "g":
            tier.get(key(str(which)), tick // 2)
        elif tier.wants(key(str(which)), size * SIZE, tick // 2):
            assert tier.hold(record(str(which), size * SIZE)), "it said that this would fit"
        held = [tier.peek(key(str(i))) for i in range(10)]
        found = [r for r in held if r is not None]
        assert tier.bytes == sum(r.nbytes for r in found) <= tier.budget
        assert len(tier) == len(found) == len(tier.after(ROOT))


def test_its_own_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(ram, "MAX_HISTORY", 500)
    tier = RamTier(4 * SIZE)
    chooser = random.Random(0)
    for tick in range(5_000):
        name = str(chooser.randrange(3_000))
        if not tier.get(key(name), tick):
            tier.put(record(name), tick)
    assert len(tier._history) == 500
    assert len(tier._heap) < 200
