"""Sequences under quantised KV (``--kv-bits``): exact where the host's own schedule is kept.

The host prefills in full precision until a chunk ends at or after ``--quantized-kv-start``, then converts
all capable layers at once. So there are two kinds of stored state: plain, the same as without
``--kv-bits``, and quantised. What a cold server holds at a token depends on where it converted; a prefix is
gone on from only where it would have held just that.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import mlx.core as mx

from ..cache.losses import Lost
from ..tensors.layers import holds
from .session import Hit, Sequence, Session, Tokens


class QuantisedSession:
    """A model under ``--kv-bits``, in the place of a `Session`.

    Args:
        plain, quantised: sessions of the model, apart in what decides the form of their state.
        start: ``--quantized-kv-start``; step: ``--prefill-step-size``, in tokens.
    """

    def __init__(self, plain: Session, quantised: Session, *, start: int, step: int) -> None:
        self.plain = plain
        self.quantised = quantised
        self.identity = plain.identity
        self.cuttable = plain.cuttable
        self.exact_decode = plain.exact_decode
        self.cut_anywhere = plain.cut_anywhere
        self.block_tokens = plain.block_tokens
        self.grain = plain.grain
        self.start = start
        self.step = step
        self.converts_at = -(-max(start, 1) // step) * step
        """Tokens held when a cold prefill of a long prompt converts."""

    def sequence(self, tokens: Seq[int], salt: str = "") -> QuantisedSequence:
        return QuantisedSequence(
            self, self.plain.sequence(tokens, salt), self.quantised.sequence(tokens, salt)
        )


class QuantisedSequence:
    """One request under ``--kv-bits``, in the place of a `Sequence`."""

    def __init__(self, session: QuantisedSession, plain: Sequence, quantised: Sequence) -> None:
        self.session = session
        self._plain = plain
        self._quantised = quantised

    def __len__(self) -> int:
        return len(self._plain)

    @property
    def tokens(self) -> Tokens:
        return self._plain.tokens

    @property
    def boundaries(self) -> tuple[int, ...]:
        return self._plain.boundaries

    @boundaries.setter
    def boundaries(self, value: tuple[int, ...]) -> None:
        self._plain.boundaries = self._quantised.boundaries = value

    @property
    def keep(self) -> int | None:
        return self._plain.keep

    @keep.setter
    def keep(self, value: int | None) -> None:
        self._plain.keep = self._quantised.keep = value

    @property
    def parts(self) -> tuple[Sequence, Sequence]:
        """The same tokens in either form of their state."""
        return self._plain, self._quantised

    def extend(self, tokens: Seq[int]) -> None:
        self._plain.extend(tokens)
        self._quantised.extend(tokens)

    def lookup(self, *, longer_than: int, full: bool, limit: int | None = None) -> Hit | None:
        """As `Sequence.lookup`, at positions where a cold server would hold the same state."""
        return self._quantised.lookup(
            longer_than=longer_than, full=full, limit=limit, fit=self._after_conversion
        ) or self._plain.lookup(
            longer_than=longer_than, full=full, limit=limit, fit=self._before_conversion
        )

    def fit(self, position: int, caches: Seq[Any]) -> int:
        """As `Sequence.fit`."""
        exact = (
            self._after_conversion if holds(caches, "QuantizedKVCache") else self._before_conversion
        )
        while (shorter := self._plain.fit(exact(position), caches)) != position:
            position = shorter
        return position

    def _after_conversion(self, position: int) -> int:
        return position if position >= self.session.converts_at else 0

    def _before_conversion(self, position: int) -> int:
        if len(self) < self.session.start:
            return position
        step = self.session.step
        return min(position - position % step, self.session.converts_at - step)

    def lost_at(self, position: int) -> Lost | None:
        return self._plain.lost_at(position)

    def due(self, start: int, end: int) -> list[int]:
        return self._plain.due(start, end)

    def store(
        self,
        caches: Seq[Any],
        position: int,
        *,
        row: int | None = None,
        snapshot: bool = False,
        logits: mx.array | None = None,
        decoded: bool = False,
    ) -> None:
        """As `Sequence.store`, in the place that the caches' present form belongs to."""
        sequence = self._quantised if holds(caches, "QuantizedKVCache") else self._plain
        sequence.store(caches, position, row=row, snapshot=snapshot, logits=logits, decoded=decoded)


AnySequence = Sequence | QuantisedSequence
AnySession = Session | QuantisedSession
