"""Planning against a search of all that is stored, for every position there is."""

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.cache_support import (
    BLOCK,
    ROOT,
    block,
    blocks,
    file_of,
    open_store,
    read_piece,
    snapshot,
)
from thunder_patches.cache.keys import chain, token_bytes
from thunder_patches.cache.match import MAX_HEADERS, plan


def ask(store, tokens, cuttable=True, want_full=True, root=ROOT):
    array = np.array(tokens, np.int64)
    return plan(store, chain(root, array, BLOCK), root, array, BLOCK, cuttable=cuttable,
                want_full=want_full)  # fmt: skip


def memory(*records):
    store = open_store(None, ram_budget=1 << 30)
    for record in records:
        store.put(record, 1)
    return store


def best(stored, tokens, cuttable, want_full):
    """The right answer by search: `stored` is a list of (kind, prompt, position, end)."""
    n = len(tokens)
    have = {tuple(p[:e]) for kind, p, e, _ in stored if kind == "block"}

    def backed(position):
        return all(tuple(tokens[:e]) in have for e in range(BLOCK, position + 1, BLOCK))

    found = 0
    for kind, prompt, position, end in stored:
        base = (position - 1) // BLOCK * BLOCK if kind == "block" else position // BLOCK * BLOCK
        shared = sum(1 for _ in takewhile(lambda ab: ab[0] == ab[1],
                                          zip(prompt[:position], tokens, strict=False)))  # fmt: skip
        if shared < base or not backed(base):
            continue
        whole = shared == position
        if kind == "snapshot" and whole and position == n and end and want_full:
            return n, True
        if cuttable:
            found = max(found, min(shared, n - 1))
        elif kind == "snapshot" and whole and position < n:
            found = max(found, position)
    return found, False


PROMPTS = st.lists(st.integers(0, 1), min_size=0, max_size=14)


@settings(max_examples=400)
@given(st.data(), st.booleans(), st.booleans())
def test_the_plan_is_the_best_there_is(data, cuttable, want_full):
    base = data.draw(PROMPTS)
    stored, records = [], []
    for _ in range(data.draw(st.integers(0, 5))):
        prompt = base[: data.draw(st.integers(0, len(base)))] + data.draw(PROMPTS)
        for i in range(len(prompt) // BLOCK):
            if data.draw(st.integers(0, 5)):
                stored.append(("block", tuple(prompt), (i + 1) * BLOCK, False))
                records.append(block(ROOT, prompt, i))
        position = data.draw(st.integers(0, len(prompt)))
        end = data.draw(st.booleans())
        stored.append(("snapshot", tuple(prompt), position, end))
        records.append(snapshot(ROOT, prompt, position, end))
    tokens = base[: data.draw(st.integers(0, len(base)))] + data.draw(PROMPTS)
    store = memory(*records)
    found = ask(store, tokens, cuttable, want_full)
    assert (found.position, found.full) == best(stored, tokens, cuttable, want_full)
    check(store, found, tokens, cuttable)
    store.close()


def check(store, found, tokens, cuttable):
    """The pieces are there, cover the prompt up to the position without a gap, and are its own."""
    at = 0
    for piece in found.pieces:
        own = np.frombuffer(piece.tokens, "<i8").tolist()
        assert piece.start == at and own[: piece.use] == list(tokens[at : at + piece.use])
        assert read_piece(store, piece) == "ram"
        at += piece.use
    assert at == found.position
    assert found.snapshot is None or found.partial is None
    assert found.full or found.position < max(len(tokens), 1)
    if not cuttable and found.position:
        assert found.pieces[-1].kind == "snapshot"
        assert all(piece.use * 8 == len(piece.tokens) for piece in found.pieces)


def test_nothing_stored_nothing_planned():
    found = ask(memory(), range(10))
    assert (found.position, found.pieces, found.full) == (0, (), False)
    assert ask(memory(*blocks(ROOT, range(8))), []).position == 0


def test_blocks_only_leave_at_least_the_last_token():
    store = memory(*blocks(ROOT, range(8)))
    assert ask(store, range(8)).position == 7
    assert [p.use for p in ask(store, range(8)).pieces] == [4, 3]
    assert ask(store, range(9)).position == 8
    assert ask(store, range(9), cuttable=False).position == 0


def test_a_whole_prompt_is_full_only_with_its_logits_and_where_wanted():
    tokens = list(range(10))
    for end in (False, True):
        store = memory(*blocks(ROOT, tokens), snapshot(ROOT, tokens, 10, end))
        for cuttable in (False, True):
            found = ask(store, tokens, cuttable)
            assert found.full == end
            assert found.position == (10 if end else 9 if cuttable else 0)
            found = ask(store, tokens, cuttable, want_full=False)
            assert not found.full and found.position == (9 if cuttable else 0)


def test_a_prompt_that_ends_with_a_block_can_be_full():
    tokens = list(range(8))
    store = memory(*blocks(ROOT, tokens), snapshot(ROOT, tokens, 8, end=True))
    found = ask(store, tokens)
    assert found.full and found.position == 8 and [p.use for p in found.pieces] == [4, 4, 0]
    longer = ask(store, range(9), cuttable=False)
    assert longer.position == 8 and longer.pieces[-1].kind == "snapshot"


def test_a_missing_block_hides_all_that_hangs_off_it():
    tokens = list(range(14))
    records = [*blocks(ROOT, tokens), snapshot(ROOT, tokens, 14, end=True)]
    del records[1]
    assert ask(memory(*records), tokens).position == 4
    assert ask(memory(*records), tokens, cuttable=False).position == 0


def test_a_snapshot_that_can_not_be_cut_is_taken_whole_or_not_at_all():
    tokens = list(range(12))
    stored = [*blocks(ROOT, tokens), snapshot(ROOT, tokens, 6), snapshot(ROOT, tokens, 10)]
    changed = [*tokens[:9], 99, 98]
    assert ask(memory(*stored), changed, cuttable=False).position == 6
    assert ask(memory(*stored), changed, cuttable=True).position == 9


def test_the_first_tokens_of_a_block_that_differs_are_used():
    tokens = list(range(12))
    store = memory(*blocks(ROOT, tokens))
    found = ask(store, [0, 1, 2, 3, 4, 5, 99, 7, 8, 9, 10, 11])
    assert found.position == 6
    assert found.partial is not None and (found.partial.kind, found.partial.use) == ("block", 2)
    assert found.partial.tokens == token_bytes([4, 5, 6, 7])


def test_how_many_headers_are_read_is_bounded():
    """A thousand conversations begin alike; planning looks at a few of them."""
    prompts = [[1, 2, 3, i] for i in range(1000)]
    store = memory(*(block(ROOT, p, 0) for p in prompts), *(snapshot(ROOT, p, 3) for p in prompts))
    asked = []
    header = store.header
    store.header = lambda *args: asked.append(args) or header(*args)
    assert ask(store, [1, 2, 3, -1, 5]).position == 3
    assert 0 < len(asked) <= 2 * MAX_HEADERS


def test_another_root_finds_nothing():
    store = memory(*blocks(ROOT, range(8)), snapshot(ROOT, range(8), 8, end=True))
    assert ask(store, range(8), root=bytes(16)).position == 0


@pytest.mark.parametrize("cuttable", [True, False])
def test_a_piece_that_fails_is_not_planned_again(tmp_path, cuttable):
    tokens = list(range(18))
    records = blocks(ROOT, tokens)
    records += [snapshot(ROOT, tokens, p, end=p == 18) for p in (6, 10, 18)]
    store = open_store(tmp_path / "v1")
    for record in records:
        store.put(record, 1)
    assert store.flush()
    seen = []
    while (found := ask(store, tokens, cuttable)).position:
        seen.append(found.position)
        victim = found.pieces[-1]
        path = file_of(tmp_path / "v1", victim)
        path.write_bytes(path.read_bytes()[:-1])
        assert read_piece(store, victim) is None
    assert seen == sorted(seen, reverse=True) and seen[0] == 18 and len(seen) >= 3
    store.close()
