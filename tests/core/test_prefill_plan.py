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
