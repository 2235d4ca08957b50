"""How many tokens to prefill at once, so that memory beyond the KV itself stays flat.

Attention over a long context needs scratch that grows with chunk times context where the backend keeps
the scores, and hardly at all where it does not. Which it is isn't guessed: each chunk's own peak is
measured, and the next chunk is sized from what was seen.

Where chunks end matters to reuse only for state that cannot be cut: that is resumed where a snapshot was
taken, at message boundaries and every few blocks (`hosts.session.Sequence.due`). Inside a long message
no text boundary is looked for (`pilot.chunking`): edits begin anywhere, so that what is computed again
is set by the distance between snapshots. Counted over edits of long texts, even ones that begin at
paragraphs (`tests/bench/snapshot_places.py`): snapshots moved to text boundaries save 1 % of it, one more
snapshot at the best boundary of each stretch 19 %, as many at even distances 50 %.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

REFERENCE = 14_592
"""Context whose scratch, at the host's own chunk size, is the cap for all longer ones, in tokens.

A prompt of 16K tokens reaches it with its last whole chunk but one, which ends a few tokens (a chat's
opening that was stored already) beyond 14,336."""
SMALLEST = 64
"""Tokens in the smallest chunk."""
GRAIN = 32
"""Chunks that are cut are multiples of this many tokens."""


@dataclass
class ChunkPlan:
    """Sizes the chunks of one model's prefills from the scratch that earlier chunks took.

    Args:
        step: the host's chunk size, in tokens; never exceeded.
        free_share: the share of free memory that one chunk's scratch may take.
    """

    step: int
    free_share: float = 0.5
    _seen: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    """The last chunk of each size and context, in powers of two: none is forgotten for another."""
    _rates: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))

    def saw(self, tokens: int, context: int, scratch: int) -> None:
        """Learn from a chunk.

        Args:
            tokens: in the chunk; context: tokens held after it; scratch: bytes at its peak beyond what was
                held before and is held after.
        """
        if tokens >= SMALLEST and scratch > 0:
            place = tokens.bit_length(), context.bit_length()
            self._seen[place] = tokens, context, scratch
            self._rates = self._fit()

    def predicted(self, tokens: int, context: int) -> float:
        """Scratch in bytes of a chunk of ``tokens`` that ends at ``context``; 0 before anything was seen."""
        return float(_terms(tokens, context) @ self._rates)

    def size(self, context: int, free: int) -> int:
        """Tokens of the next chunk.

        Args:
            context: tokens held already.
            free: bytes that may still be allocated.
        """
        if not self._seen:
            return self.step
        cap = min(self.predicted(self.step, REFERENCE), free * self.free_share)
        chunk, score, move = map(float, self._rates)

        def largest(move: float) -> int:
            size = self.step
            while size > SMALLEST and (
                size * (chunk + score * (context + size)) + move * (context + size) > cap
            ):
                size -= GRAIN
            return max(size, min(SMALLEST, self.step))

        # What a cache's move takes is the same for every chunk: it is made room for by half at most.
        return max(largest(move), largest(0) // 2)

    def _fit(self) -> npt.NDArray[np.float64]:
        """Bytes for each of `_terms`: the least squares of relative errors, none below 0, raised until no
        chunk that was seen took more.

        Where the chunks seen can't tell the terms apart, the shortest solution makes most of the term with
        the largest numbers, chunk times context: the cautious reading.
        """
        terms = np.array([_terms(tokens, context) for tokens, context, _ in self._seen.values()])
        scratch = np.array([scratch for _, _, scratch in self._seen.values()], dtype=float)
        rates, used = np.zeros(3), np.arange(3)
        while len(used):
            relative = terms[:, used] / scratch[:, None]
            found = np.linalg.lstsq(relative, np.ones(len(scratch)), rcond=1e-6)[0]
            if (found >= 0).all():
                rates[used] = found
                break
            used = used[found >= 0]
        expected = terms @ rates
        return (
            rates * max(1.0, float((scratch / expected).max())) if (expected > 0).all() else rates
        )


def _terms(tokens: int, context: int) -> npt.NDArray[np.float64]:
    """What scratch can grow with: the chunk (activations), chunk times context (scores), the context alone
    (a cache that moves to a larger buffer)."""
    return np.array([tokens, tokens * context, context], dtype=float)
