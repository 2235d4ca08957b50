"""Admission: what cannot fit is refused with the numbers, and nothing latches."""

from __future__ import annotations

import gc

import pytest

from thunder_patches.prefill.memory import MemoryGuard, PromptTooLarge

MIB = 1 << 20
KV = 1024.0


def test_a_prompt_that_cannot_fit_is_refused_with_the_numbers() -> None:
    guard = MemoryGuard(64 * MIB)
    with pytest.raises(PromptTooLarge, match=r"1,000,000 tokens needs about 0\.95 GiB"):
        guard.admit(1_000_000, 16, 0, KV, 0)
    # Nothing latches: the next small one passes.
    assert guard.admit(1000, 16, 0, KV, 0).bytes == 1016 * 1024


def test_requests_are_counted_together_and_released() -> None:
    guard = MemoryGuard(64 * MIB)
    first = guard.admit(40_000, 0, 0, KV, 0)
    with pytest.raises(PromptTooLarge, match="beside 1 running"):
        guard.admit(40_000, 0, 0, KV, 0)
    guard.release(first)
    second = guard.admit(40_000, 0, 0, KV, 0)
    del second
    gc.collect()
    assert guard.admit(40_000, 0, 0, KV, 0).bytes > 0


def test_what_is_allocated_is_no_longer_reserved() -> None:
    guard = MemoryGuard(64 * MIB)
    reservation = guard.admit(1000, 0, 0, KV, 0)
    guard.allocated(reservation, 400, KV)
    assert reservation.bytes == 600 * 1024
    guard.allocated(reservation, 10_000, KV)
    assert reservation.bytes == 0


def test_the_estimate_does_not_depend_on_the_answer_alone() -> None:
    guard = MemoryGuard(64 * MIB)
    with pytest.raises(PromptTooLarge):
        guard.admit(100_000, 1, 0, KV, 0)
