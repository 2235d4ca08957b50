"""How many tokens to prefill at once, so that memory beyond the KV itself stays flat.

Attention over a long context needs scratch that grows with chunk times context where the backend keeps
the scores, and hardly at all where it does not. Which it is isn't guessed: each chunk's own peak is
measured, and the next chunk is sized from what was seen.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

REFERENCE = 16_384
"""Context whose scratch, at the host's own chunk size, is the cap for all longer ones, in tokens."""
SMALLEST = 64
"""Tokens in the smallest chunk."""
_GRAIN = 32
_SEEN = 8


@dataclass
class ChunkPlan:
    """Sizes the chunks of one model's prefills from the scratch that earlier chunks took.

    Args:
        step: the host's chunk size, in tokens; never exceeded.
        free_share: the share of free memory that one chunk's scratch may take.
    """

    step: int
    free_share: float = 0.5
    _seen: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_SEEN))

    def saw(self, tokens: int, context: int, scratch: int) -> None:
        """Learn from a chunk.

        Args:
            tokens: in the chunk; context: tokens held after it; scratch: bytes at its peak beyond what was
                held before and is held after.
        """
        if tokens >= SMALLEST and scratch > 0:
            self._seen.append((tokens, context, scratch))

    def predicted(self, tokens: int, context: int) -> float:
        """Scratch in bytes of a chunk of ``tokens`` that ends at ``context``; 0 before anything was seen.

        The upper envelope of two readings of each chunk seen: scratch that grows with the chunk alone, and
        scratch that grows with chunk times context.
        """
        if not self._seen:
            return 0.0
        fixed, growing = self._fit()
        return tokens * (fixed + growing * context)

    def size(self, context: int, free: int) -> int:
        """Tokens of the next chunk.

        Args:
            context: tokens held already.
            free: bytes that may still be allocated.
        """
        if not self._seen:
            return self.step
        fixed, growing = self._fit()
        cap = min(self.step * (fixed + growing * REFERENCE), free * self.free_share)
        size = self.step
        while size > SMALLEST and size * (fixed + growing * (context + size)) > cap:
            size -= max(_GRAIN, size // 8 // _GRAIN * _GRAIN)
        return max(size, min(SMALLEST, self.step))

    def _fit(self) -> tuple[float, float]:
        """Bytes a token of the chunk, and bytes a token of the chunk and token of context."""
        rates = [(scratch / tokens, context) for tokens, context, scratch in self._seen]
        count = len(rates)
        mean_rate = sum(rate for rate, _ in rates) / count
        mean_context = sum(context for _, context in rates) / count
        spread = sum((context - mean_context) ** 2 for _, context in rates)
        if spread < (REFERENCE / 16) ** 2:
            # Contexts too close together to tell: the cautious reading is that all of it grows.
            return 0.0, max(rate / context for rate, context in rates)
        growing = sum((r - mean_rate) * (c - mean_context) for r, c in rates) / spread
        growing = max(growing, 0.0)
        fixed = max(max(rate - growing * context for rate, context in rates), 0.0)
        return fixed, growing
