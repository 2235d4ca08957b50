import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunder_patches.cache.keys import KEY_BYTES, chain, root_key, snapshot_key, token_bytes

ROOT = root_key("model", "layout", "salt", 4)
TOKENS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=24)


def keys(tokens, root=ROOT, size=4):
    return chain(root, np.array(tokens, np.int64), size)


def test_one_key_for_each_full_block():
    assert [len(keys(range(n))) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]
    assert all(len(key) == KEY_BYTES for key in keys(range(40)))


@given(TOKENS, TOKENS)
def test_two_prompts_share_exactly_the_keys_of_the_blocks_they_share(left, right):
    ours, theirs = keys(left), keys(right)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        assert (a == b) == (left[: 4 * i + 4] == right[: 4 * i + 4])


@given(TOKENS)
def test_a_chain_can_be_continued_from_any_of_its_keys(tokens):
    whole = keys(tokens)
    for done in range(1, len(whole)):
        assert keys(tokens[4 * done :], root=whole[done - 1]) == whole[done:]


@given(TOKENS, st.integers(0, 23))
def test_one_changed_token_changes_its_block_and_all_after_it(tokens, at):
    if at >= len(tokens) // 4 * 4:
        return
    changed = list(tokens)
    changed[at] ^= 1
    first = at // 4
    assert keys(changed)[:first] == keys(tokens)[:first]
    assert not set(keys(changed)[first:]) & set(keys(tokens)[first:])


@given(st.lists(st.text(max_size=4), min_size=3, max_size=3),
       st.lists(st.text(max_size=4), min_size=3, max_size=3),
       st.integers(1, 300), st.integers(1, 300))  # fmt: skip
def test_root_keys_differ_in_every_field(left, right, size, other):
    same = left == right and size == other
    assert (root_key(*left, size) == root_key(*right, other)) == same


def test_fields_are_framed():
    """The control: joined without frames, these two would be one."""
    assert "".join(("ab", "c", "")) == "".join(("a", "bc", ""))
    assert root_key("ab", "c", "", 4) != root_key("a", "bc", "", 4)


def test_kinds_of_keys_never_meet():
    tail = token_bytes([1, 2, 3, 4])
    assert snapshot_key(ROOT, tail) != keys([1, 2, 3, 4])[0]
    assert len({snapshot_key(ROOT, tail[: 8 * n]) for n in range(5)}) == 5


def test_block_size_is_part_of_the_root_and_of_each_key():
    assert root_key("m", "l", "", 4) != root_key("m", "l", "", 8)
    assert keys([1] * 8, size=4)[0] != keys([1] * 8, size=8)[0]


def test_keys_do_not_change_from_release_to_release():
    """They are file names: a change here is a new format version."""
    assert ROOT.hex() == "730e29c254b1ed8256e437c16d2ce648"
    assert keys([1, -2, 3, 4])[0].hex() == "7d8e29a95003d753afa8f8aef83f2f2f"
    assert snapshot_key(ROOT, b"").hex() == "3cd2b6b5a2da08a1b365ab5d7b143daa"


def test_keys_follow_the_bytes_of_the_tokens_not_their_array():
    tokens = np.arange(16, dtype=np.int64)
    assert keys(tokens[::2]) == keys([0, 2, 4, 6, 8, 10, 12, 14])
    assert keys(tokens.astype(">i8")) == keys(tokens)


def test_a_block_needs_a_token():
    with pytest.raises(ValueError, match="block_tokens must be at least 1, found 0"):
        keys([1], size=0)


def test_a_key_is_a_cut_sha256_of_framed_fields():
    def frame(field):
        return len(field).to_bytes(8, "little") + field

    fields = (b"thunder.block.1", ROOT, token_bytes([5, 6, 7, 8]))
    assert keys([5, 6, 7, 8])[0] == hashlib.sha256(b"".join(map(frame, fields))).digest()[:16]
