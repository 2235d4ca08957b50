"""One loaded model and its sequences: the way from a prompt's tokens to the store and back.

A `Session` belongs to a model, a `Sequence` to one request. Hosts differ in *when* they call; what is
matched, restored, cut and stored is the same and stands here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..cache.keys import chain, root_key, snapshot_key, token_bytes
from ..cache.match import Plan, plan
from ..cache.record import Header, Record, TensorSpec
from ..cache.snapshots import points
from ..tensors.cut import Cut, cut
from ..tensors.layers import Layout, describe, has_ring, is_cuttable, leaves
from ..tensors.restore import RestoreFailed, join_layout, restore
from .runtime import Runtime

log = logging.getLogger("thunder_patches")

Tokens = npt.NDArray[np.int64]
_ROOM = 256
"""Tokens of room that a restored cache keeps beyond the prompt, so that the answer need not grow it."""
_ATTEMPTS = 4


@dataclass(frozen=True)
class Hit:
    """A restored prefix. ``logits`` ``[vocabulary]`` is there when the whole prompt was known."""

    caches: list[Any]
    length: int
    source: str
    logits: mx.array | None = None

    @property
    def full(self) -> bool:
        return self.logits is not None


class Session:
    """A loaded model, as far as its KV state goes.

    Args:
        identity: content of the model (`tensors.identity.identify`).
        make_cache: the host's way to a new, empty prompt cache for this model.
        variant: what else decides the state's form, such as quantised KV settings.

    Raises:
        tensors.layers.UnsupportedCache: when a layer's cache is of an unknown class.
    """

    def __init__(
        self,
        runtime: Runtime,
        identity: str,
        make_cache: Callable[[], list[Any]],
        *,
        variant: str = "",
    ) -> None:
        fresh = make_cache()
        self.runtime = runtime
        self.identity = identity
        self.make_cache = make_cache
        self.kinds = describe(fresh) + variant
        self.cuttable = is_cuttable(fresh)
        self.ring = has_ring(fresh)
        self.block_tokens = runtime.settings.block_tokens
        self._roots: dict[str, bytes] = {}

    def root(self, salt: str) -> bytes:
        """Key of the empty prefix for one tenant."""
        if salt not in self._roots:
            self._roots[salt] = root_key(self.identity, self.kinds, salt, self.block_tokens)
        return self._roots[salt]

    def sequence(self, tokens: Iterable[int], salt: str = "") -> Sequence:
        """A new request's sequence, with its prompt."""
        return Sequence(self, np.asarray(tokens, dtype=np.int64), self.root(salt))


@dataclass
class Sequence:
    """One request's tokens, their keys, and how much of them is known to be stored."""

    session: Session
    tokens: Tokens
    root: bytes
    boundaries: tuple[int, ...] = ()
    stamp: int = field(default_factory=time.time_ns)
    keys: list[bytes] = field(init=False)
    checked: int = 0
    """Leading blocks that were found in, or put into, the store."""

    def __post_init__(self) -> None:
        self.keys = chain(self.root, self.tokens, self.session.block_tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Seq[int]) -> None:
        """Append the answer's tokens."""
        step = self.session.block_tokens
        self.tokens = np.concatenate([self.tokens, np.asarray(tokens, dtype=np.int64)])
        done = len(self.keys)
        parent = self.keys[-1] if self.keys else self.root
        self.keys += chain(parent, self.tokens[done * step :], step)

    def lookup(self, *, longer_than: int, full: bool) -> Hit | None:
        """Restore the longest stored prefix if it is longer than the host's own.

        Args:
            longer_than: tokens that the host has in memory already.
            full: whether the caller can do without the last token's forward pass.
        """
        store, session = self.session.runtime.store, self.session
        for _ in range(_ATTEMPTS):
            found = plan(
                store,
                self.keys,
                self.root,
                self.tokens,
                session.block_tokens,
                cuttable=session.cuttable,
                want_full=full,
                resume_from_end=not session.ring,
            )
            if not found.position or not (found.full or found.position > longer_than):
                return None
            store.touch([piece.key for piece in found.pieces], self.stamp)
            try:
                return self._restore(found)
            except RestoreFailed as error:
                log.info("thunder: a stored prefix could not be read, trying a shorter one: %s", error)
        return None

    def due(self, start: int, end: int) -> list[int]:
        """Where prefill from ``start`` must stop, up to ``end``, to take snapshots.

        With a ring the last one is due before the prompt's last token, which is a decode step.
        """
        if self.session.cuttable:
            return []
        stride = self.session.runtime.settings.snapshot_stride
        last = len(self) - 1 if self.session.ring else len(self)
        due = points(start, last, stride, self.session.block_tokens, self.boundaries)
        return [p for p in due if p <= end]

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
        """Store what of the first ``position`` tokens is not stored yet.

        Args:
            caches: the live prompt cache; evaluated or not.
            row: which sequence of a batched cache.
            snapshot: also store the state at ``position``, with ``logits`` ``[vocabulary]`` if given.
            decoded: the last tokens were decoded, not prefilled.
        """
        if decoded and self.session.ring:
            return
        session, store = self.session, self.session.runtime.store
        step = session.block_tokens
        blocks = (position - 1 if logits is not None and session.ring else position) // step
        missing = [
            i
            for i in range(self.checked, blocks)
            if not store.match([self.keys[i]], self.keys[i - 1] if i else self.root)
        ]
        parent = self.keys[blocks - 1] if blocks else self.root
        tail = token_bytes(self.tokens[blocks * step : position])
        key = snapshot_key(parent, tail)
        known = {ref.key: ref.end for ref in store.snapshots(parent)} if snapshot else {}
        snapshot = snapshot and (key not in known or (logits is not None and not known[key]))
        if missing or snapshot:
            spans = [(i * step, (i + 1) * step) for i in missing]
            found = leaves(caches, row)
            layout = Layout.of(found)
            text = layout.dumps()
            if snapshot:
                spans.append((blocks * step, position))
            cuts = cut(
                found, layout, spans, state=snapshot and not session.cuttable, logits=logits
            )
            for i, piece in zip(missing, cuts, strict=False):
                above = self.keys[i - 1] if i else self.root
                tokens = token_bytes(self.tokens[i * step : (i + 1) * step])
                store.put(
                    _record(self.keys[i], above, "block", i * step, tokens, text, piece),
                    stamp=self.stamp - 1000 * i,
                )
            if snapshot:
                text = join_layout(text, cuts[-1].meta)
                record = _record(key, parent, "snapshot", blocks * step, tail, text, cuts[-1])
                store.put(record, stamp=self.stamp - 1000 * blocks)
        self.checked = blocks

    def _restore(self, found: Plan) -> Hit:
        session = self.session
        fresh = session.make_cache()
        capacity = -(-(len(self) + _ROOM) // _ROOM) * _ROOM
        restored = restore(
            session.runtime.store,
            found.pieces,
            fresh,
            length=found.position,
            capacity=capacity,
            logits=found.full,
        )
        self.checked = len(found.blocks)
        origin = "ssd" if "ssd" in restored.sources else "ram"
        return Hit(restored.caches, found.position, origin, restored.logits)


def _record(
    key: bytes, parent: bytes, kind: Any, start: int, tokens: bytes, layout: str, piece: Cut
) -> Record:
    specs = tuple(TensorSpec(n, dtype, shape) for n, (dtype, shape, _) in piece.tensors.items())
    data = tuple(buffer for _, _, buffer in piece.tensors.values())
    header = Header(key, parent, kind, start, tokens, layout, specs, "logits" in piece.tensors)
    return Record(header, data)
