"""The cases that `tests/e2e` has for mlx_lm.server, on oMLX: answers, logprobs, model calls counted."""

from __future__ import annotations

from tests.e2e.test_bad_files import test_a_spoiled_snapshot, test_c10_bad_files
from tests.e2e.test_branch import test_a_prompt_cut_short, test_c3_branch, test_c4_growing_chat
from tests.e2e.test_full_hit import test_c1_full_hit, test_c2_repeat
from tests.e2e.test_restart import test_c12_restart, test_c15_at_once

__all__ = [
    "test_a_prompt_cut_short",
    "test_a_spoiled_snapshot",
    "test_c1_full_hit",
    "test_c2_repeat",
    "test_c3_branch",
    "test_c4_growing_chat",
    "test_c10_bad_files",
    "test_c12_restart",
    "test_c15_at_once",
]
