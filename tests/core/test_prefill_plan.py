"""Chunk sizes follow what earlier chunks were seen to take."""

from __future__ import annotations

from thunder_patches.prefill.plan import REFERENCE, SMALLEST, ChunkPlan

FREE = 1 << 40


def test_the_host_decides_until_something_was_seen() -> None:
    assert ChunkPlan(2048).size(100_000, FREE) == 2048


def test_scratch_that_does_not_grow_with_the_context_leaves_chunks_alone() -> None:
    plan = ChunkPlan(2048)
    for context in (2048, 8192, 16_384, 65_536):
        plan.saw(2048, context, 2048 * 1000)
    assert plan.size(130_000, FREE) == 2048


def test_scratch_that_grows_with_the_context_is_held_at_the_reference() -> None:
    plan = ChunkPlan(2048)
    for context in (2048, 8192, 16_384):
        plan.saw(2048, context, 2048 * context * 8)
    cap = 2048 * REFERENCE * 8
    for context in (30_000, 60_000, 125_000):
        size = plan.size(context, FREE)
        assert SMALLEST <= size < 2048
        assert size * (context + size) * 8 <= cap * 1.01
    # Control: the host's own chunk would be far above the cap.
    assert 5 * cap < 2048 * 125_000 * 8


def test_little_free_memory_makes_chunks_smaller_but_never_nothing() -> None:
    plan = ChunkPlan(2048)
    plan.saw(2048, 4096, 2048 * 4096 * 8)
    assert plan.size(4096, 16 << 20) < plan.size(4096, FREE)
    assert plan.size(4096, 0) == SMALLEST


def test_a_host_step_below_the_smallest_is_kept() -> None:
    plan = ChunkPlan(16)
    plan.saw(64, 4096, 1 << 30)
    assert plan.size(4096, 0) == 16


def test_small_pieces_leave_the_cap_where_it_was() -> None:
    """Scores, activations and a cache that moves: what is learned from any piece holds for all."""
    plan = ChunkPlan(2048)

    def scratch(tokens: int, context: int) -> int:
        return 5 * tokens * context + 5000 * tokens + 500 * context

    for context in range(2048, REFERENCE + 1, 2048):
        plan.saw(2048, context, scratch(2048, context))
    cap = scratch(2048, REFERENCE)
    context = REFERENCE
    while context < 100_000:
        for size in (plan.size(context, FREE), 96):
            context += size
            plan.saw(size, context, scratch(size, context))
            assert scratch(size, context) <= cap * 1.05
    assert plan.size(context, FREE) > 100


def test_what_no_chunk_size_can_change_halves_it_at_most() -> None:
    """A backend that keeps no scores, and a cache that grows by moving to a larger buffer."""
    plan = ChunkPlan(2048)
    for tokens in (2048, 512):
        for context in (2048, 8192, 16_384, 65_536, 131_072):
            plan.saw(tokens, context, tokens * 1000 + context * 1000)
    assert plan.size(2048, FREE) == 2048
    assert plan.size(131_072, FREE) == 1024
