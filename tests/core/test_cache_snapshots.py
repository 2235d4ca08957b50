import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunder_patches.cache.snapshots import points


def test_every_stride_each_boundary_and_the_end():
    assert points(0, 40, 2, 4, [5, 17]) == [5, 8, 16, 17, 24, 32, 40]


def test_only_what_lies_ahead():
    assert points(16, 40, 2, 4, [5, 16, 17, 41]) == [17, 24, 32, 40]
    assert points(40, 40, 2, 4, [40]) == []
    assert points(50, 40, 2, 4) == []


def test_without_stride_only_boundaries_and_the_end():
    assert points(0, 40, 0, 4, [5]) == [5, 40]


@given(
    st.integers(0, 200), st.integers(0, 200), st.integers(0, 5), st.integers(1, 9),
    st.lists(st.integers(-5, 220)),
)  # fmt: skip
def test_a_prompt_in_parts_has_the_points_of_the_whole(start, end, stride, block, boundaries):
    """Where a prefill happens to be cut changes nothing, but for the cut itself."""
    whole = points(start, end, stride, block, boundaries)
    assert whole == sorted(set(whole))
    assert all(start < p <= end for p in whole)
    for middle in range(start, end):
        parts = points(start, middle, stride, block, boundaries)
        parts += points(middle, end, stride, block, boundaries)
        assert set(whole) <= set(parts) <= {*whole, middle}


@pytest.mark.parametrize("wrong", [(0, 8, 1, 0), (0, 8, -1, 4)])
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValueError, match="expected block_tokens >= 1"):
        points(*wrong)
