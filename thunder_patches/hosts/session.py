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
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from packaging.version import Version

from ..cache.keys import chain, root_key, snapshot_key, token_bytes
from ..cache.losses import Lost
from ..cache.match import Plan, plan
from ..cache.record import Header, Record, TensorSpec
from ..cache.snapshots import points
from ..patching.compat import families
from ..tensors.cut import Cut, cut
from ..tensors.layers import Layout, describe, has_ring, is_cuttable, leaves
from ..tensors.restore import RestoreFailed, join_layout, restore
from .runtime import Runtime

log = logging.getLogger("thunder_patches")

Tokens = npt.NDArray[np.int64]
SCAN = 256
"""Tokens in a step of the scans (mlx-lm's ``ssm_attn``): a cut at a multiple leaves their sums alone."""
_ROOM = 256
"""Tokens of room that a restored cache keeps beyond the prompt, so that the answer need not grow it."""
_ATTEMPTS = 4


class NotEligible(Exception):
    """This model's state cannot be stored exactly; the message says why."""


@dataclass(frozen=True)
class Family:
    """How a model family's state behaves (``compat/families.toml``, measured).

    Args:
        cut_anywhere: prefill may be cut at any token to the bit; otherwise only between blocks.
        decode_is_prefill: a decoded token leaves the state that prefilling it would leave, to the bit.
            Not so where decoding sums in another order (rings, absorbed latent attention); there only
            prefilled state is gone on from.
    """

    cut_anywhere: bool = True
    decode_is_prefill: bool = True

    @classmethod
    def named(cls, name: str) -> Family:
        """The family of a model module's name.

        Raises:
            NotEligible: when the family is not in the table, or is there as not exact, or only so with
                a later mlx-lm.
        """
        known = families().get(name)
        if known is None:
            raise NotEligible(f"model family {name} has not been tested for exact reuse")
        if known.get("result") == "no":
            raise NotEligible(f"model family {name}: {known.get('reason')}")
        since, found = known.get("since", "0"), version("mlx-lm")
        if Version(found) < Version(since):
            raise NotEligible(f"model family {name} needs mlx-lm {since}, found {found}")
        return cls(known.get("cuts") != "block", known.get("decode") != "differs")


@dataclass(frozen=True)
class Hit:
    """A restored prefix. ``logits`` ``[vocabulary]`` is there when the whole prompt was known."""

    caches: list[Any]
    length: int
    source: str
    logits: mx.array | None = None
    reused: int | None = None
    """Tokens of ``length`` that came from the store, where some in between were computed."""
    codec: str | None = None
    """The lossy codec that it went through, for a handed context."""

    @property
    def approximate(self) -> bool:
        return self.reused is not None

    @property
    def full(self) -> bool:
        return self.logits is not None


class Session:
    """A loaded model, as far as its KV state goes.

    Args:
        identity: content of the model (`tensors.identity.identify`).
        make_cache: the host's way to a new, empty prompt cache for this model.
        variant: what else decides the state's form, such as quantised KV settings.
        can_skip: whether the first token can come from stored logits alone.
        host_grain: tokens between two places where the host itself would keep the state of layers that
            can't be cut; snapshots are taken at least as often, unless they are turned off.

    Raises:
        tensors.layers.UnsupportedCache: when a layer's cache is of an unknown class.
        NotEligible: when blocks of this size can't be cut exactly.
    """

    def __init__(
        self,
        runtime: Runtime,
        identity: str,
        family: Family,
        make_cache: Callable[[], list[Any]],
        *,
        variant: str = "",
        can_skip: bool = True,
        host_grain: int | None = None,
    ) -> None:
        fresh = make_cache()
        self.runtime = runtime
        self.identity = identity
        self.can_skip = can_skip
        self.make_cache = make_cache
        self.kinds = describe(fresh) + variant + runtime.variant()
        if runtime.codec is not None:
            runtime.codec.use_model(identity)
        self.cuttable = is_cuttable(fresh)
        self.exact_decode = family.decode_is_prefill and not has_ring(fresh)
        self.cut_anywhere = family.cut_anywhere
        self.stride = runtime.settings.snapshot_stride
        """Blocks between two snapshots of layers that can't be cut; 0 for none."""
        if host_grain is not None:
            self.stride = min(self.stride, max(1, host_grain // runtime.settings.block_tokens))
        self.grain = runtime.settings.block_tokens * (1 if self.cuttable else self.stride)
        """Tokens between two places where state can be resumed, message boundaries left aside."""
        self.block_tokens = runtime.settings.block_tokens
        if not family.cut_anywhere and self.block_tokens % SCAN:
            raise NotEligible(
                f"this model family scans prompts in steps of {SCAN} tokens: expected block_tokens to be "
                f"a multiple, found {self.block_tokens}"
            )
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
    keep: int | None = None
    """Tokens beyond which nothing of it is stored; None stores all."""

    def __post_init__(self) -> None:
        self.keys = chain(self.root, self.tokens, self.session.block_tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def capacity(self) -> int:
        """Tokens to make room for when this prompt's cache is restored."""
        return -(-(len(self) + _ROOM) // _ROOM) * _ROOM

    def extend(self, tokens: Seq[int]) -> None:
        """Append the answer's tokens."""
        step = self.session.block_tokens
        self.tokens = np.concatenate([self.tokens, np.asarray(tokens, dtype=np.int64)])
        done = len(self.keys)
        parent = self.keys[-1] if self.keys else self.root
        self.keys += chain(parent, self.tokens[done * step :], step)

    def lost_at(self, position: int) -> Lost | None:
        """What became of the block that holds the token at ``position``, if the store lost it."""
        block = position // self.session.block_tokens
        return self.session.runtime.store.lost(self.keys[block]) if block < len(self.keys) else None

    def lookup(
        self,
        *,
        longer_than: int,
        full: bool,
        limit: int | None = None,
        fit: Callable[[int], int] = lambda position: position,
    ) -> Hit | None:
        """Restore the longest stored prefix if it is longer than the host's own.

        Args:
            longer_than: tokens that the host has in memory already.
            full: whether the caller can do without the last token's forward pass.
            limit: tokens to restore at most.
            fit: the largest position, not beyond a given one, at which a prefix may be gone on from.
        """
        store, session = self.session.runtime.store, self.session
        # From there one prompt token would be run alone before the last one: a decode step.
        barred = -1 if session.exact_decode else len(self) - 2

        def reach(position: int) -> int:
            position = fit(position if limit is None else min(position, limit))
            return self._outside_images(position - 1 if position == barred else position)

        for _ in range(_ATTEMPTS):
            found = self._plan(len(self), full and session.can_skip)
            if not found.full:
                found = self._fitted(found, reach)
                if found.position <= longer_than:
                    return None
            store.touch([piece.key for piece in found.pieces], self.stamp)
            try:
                return self._restore(found)
            except RestoreFailed as error:
                log.info(
                    "thunder: a stored prefix could not be read, trying a shorter one: %s", error
                )
        return None

    def _plan(self, length: int, full: bool) -> Plan:
        session = self.session
        return plan(
            session.runtime.store,
            self.keys[: length // session.block_tokens],
            self.root,
            self.tokens[:length],
            session.block_tokens,
            cuttable=session.cuttable,
            want_full=full,
            resume_from_end=session.exact_decode and session.cut_anywhere,
        )

    def _fitted(self, found: Plan, reach: Callable[[int], int]) -> Plan:
        while (position := reach(found.position)) != found.position:
            found = self._plan(position + 1, False)
        return found

    def fit(self, position: int, caches: Seq[Any]) -> int:
        """The largest position, not beyond this one, at which the host's own caches are exact."""
        return self._outside_images(position)

    def _outside_images(self, position: int) -> int:
        """The largest position, not beyond this one, that is not within an image.

        All tokens of an image have one negative id; the host embeds an image from its first token or
        not at all.
        """
        if position < len(self) and self.tokens[position] < 0:
            while position and self.tokens[position - 1] < 0:
                position -= 1
        return position

    def due(self, start: int, end: int) -> list[int]:
        """Where prefill from ``start`` must stop, up to ``end``, to take snapshots.

        Where a decoded token's state is not that of a prefilled one, the last is due before the
        prompt's last token, which the host runs as a decode step. No piece has a single token: that
        would be a decode step too.
        """
        session = self.session
        if session.cuttable:
            return []
        step, boundaries = session.block_tokens, self.boundaries
        last = len(self) if session.exact_decode else len(self) - 1
        if not session.cut_anywhere:
            boundaries = tuple(b - b % step for b in boundaries)
            last -= last % step
        due: list[int] = []
        for p in points(start, last, session.stride, step, boundaries):
            if p > end or p - (due[-1] if due else start) <= 1 or end - p == 1:
                continue
            if self._outside_images(p) == p:
                due.append(p)
        return due

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
        if decoded and not (self.session.exact_decode and self.session.cut_anywhere):
            return
        if self.keep is not None and position > self.keep:
            return
        session, store = self.session, self.session.runtime.store
        step = session.block_tokens
        end = position - (logits is not None and not session.exact_decode)
        blocks = end // step
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
            cuts = cut(found, layout, spans, state=snapshot and not session.cuttable, logits=logits)
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
        restored = restore(
            session.runtime.store,
            found.pieces,
            fresh,
            length=found.position,
            capacity=self.capacity,
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
