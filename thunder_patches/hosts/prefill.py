"""Chunk sizes and admission for the model that is loaded: `prefill` applied to a host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from ..patching.guard import is_on, shield
from ..prefill.memory import MemoryGuard, Reservation
from ..prefill.plan import GRAIN, SMALLEST, ChunkPlan
from ..tensors.estimate import kv_bytes_per_token
from .runtime import runtime

ANSWER_ROOM = 256
"""Tokens of the answer that must fit for a prompt to be admitted, at most."""


@cache
def memory_guard() -> MemoryGuard:
    """The process's guard: requests of all models are counted together."""
    limit = runtime().settings.memory_limit_gb
    return MemoryGuard(None if limit is None else int(limit * (1 << 30)))


class Prefill:
    """How one loaded model's prompts are prefilled.

    Args:
        step: the host's chunk size in tokens.
        block_tokens: cuts fall on multiples of this where ``cut_anywhere`` is false.
    """

    def __init__(
        self, model: Any, fresh: Sequence[Any], step: int, block_tokens: int, cut_anywhere: bool
    ) -> None:
        self.plan = ChunkPlan(step)
        self.kv_bytes = kv_bytes_per_token(model, fresh)
        self._grain = 1 if cut_anywhere else block_tokens

    def admit(self, tokens: int, answer: int) -> Reservation | None:
        """Reserve memory for a prompt, or None where its size is not known.

        Raises:
            PromptTooLarge: it cannot fit.
        """
        if self.kv_bytes is None or not is_on("chunked_prefill"):
            return None
        scratch = self.plan.predicted(SMALLEST, tokens)
        return memory_guard().admit(tokens, min(answer, ANSWER_ROOM), 0, self.kv_bytes, scratch)

    def held(self, reservation: Reservation | None, tokens: int) -> None:
        """KV state of ``tokens`` more of a prompt's tokens is there now, and no longer to come."""
        if reservation is not None and self.kv_bytes is not None:
            memory_guard().allocated(reservation, tokens, self.kv_bytes)

    def size(self, context: int, left: int) -> int:
        """Tokens of the next piece of a chunk.

        Args:
            context: tokens held already; left: tokens of the host's chunk that are still to do.
        """
        if not is_on("chunked_prefill"):
            return left
        size = self.plan.size(context, memory_guard().free())
        if size < left:  # as many pieces, but alike: a small last one would be all overhead
            pieces = -(-left // size)
            size = -(-left // pieces // GRAIN) * GRAIN
        if self._grain > 1:
            size = max((context + size) // self._grain * self._grain - context, self._grain)
        size = min(size, left)
        # A piece of one token would take the decode path.
        return size - 1 if left - size == 1 and size > 2 else size

    def measured(self, context: int, tokens: int) -> Measure:
        return Measure(self.plan, context, tokens)


class Measure:
    """``with prefill.measured(...)``: the plan learns from what one piece's computation took."""

    def __init__(self, plan: ChunkPlan, context: int, tokens: int) -> None:
        self._plan = plan
        self._context = context
        self._tokens = tokens
        self._before = 0

    def __enter__(self) -> None:
        self._before = mx.get_active_memory()
        mx.reset_peak_memory()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            return
        with shield("chunked_prefill", "measure"):
            held = max(self._before, mx.get_active_memory())
            scratch = mx.get_peak_memory() - held
            self._plan.saw(self._tokens, self._context + self._tokens, scratch)
