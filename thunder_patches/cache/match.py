"""The longest exact point at which a prompt can be resumed from the store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from thunder_patches.cache.keys import snapshot_key, token_bytes
from thunder_patches.cache.record import Header, Kind, Ref

# Headers read, at most, to find how far into a differing block or tail the prompt still agrees.
MAX_HEADERS = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """One record to restore, of which the first `use` tokens are the prompt's.

    `tokens` are all that the record holds, as the reader will compare them.
    """

    kind: Kind
    key: bytes
    parent: bytes
    start: int
    tokens: bytes
    use: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Restore `pieces`, in order, and resume at token `position`.

    `blocks` are the prompt's own blocks, `snapshot` the snapshot whose whole tail is the prompt's,
    `partial` a block or a snapshot that shares only its first tokens with the prompt. At most one
    of the last two is there. `full`: the snapshot is that of the whole prompt, with its logits.
    """

    position: int = 0
    blocks: tuple[Piece, ...] = ()
    snapshot: Piece | None = None
    partial: Piece | None = None
    full: bool = False

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self.blocks + tuple(p for p in (self.snapshot, self.partial) if p is not None)


class Lookup(Protocol):
    """What planning needs of a store; every call is safe at any time and changes nothing."""

    def match(self, keys: Sequence[bytes], root: bytes) -> int: ...
    def snapshots(self, parent: bytes) -> Sequence[Ref]: ...
    def children(self, parent: bytes) -> Sequence[bytes]: ...
    def header(self, key: bytes, parent: bytes, kind: Kind = "block") -> Header | None: ...


def plan(
    store: Lookup,
    keys: Sequence[bytes],
    root: bytes,
    tokens: npt.NDArray[np.int64],
    block_tokens: int,
    *,
    cuttable: bool,
    want_full: bool,
    resume_from_end: bool = True,
) -> Plan:
    """The longest prefix of `tokens` that `store` can restore exactly.

    keys: the chain of the prompt's full blocks after `root`. cuttable: every layer's rows can be
    cut at any token; otherwise only a snapshot can be resumed. want_full: the caller can go on from
    stored logits, so that the whole prompt may be restored; otherwise, and without stored logits,
    at least the last token is left to compute. resume_from_end: the last token of an end snapshot
    is as prefill would leave it, so that a longer prompt may go on after it. Reads no payload; a
    piece may still fail to load, which sets it aside, so that planning again gives the next best.
    """
    prompt = _Prompt(keys, root, token_bytes(tokens), len(tokens), block_tokens, want_full,
                     resume_from_end)  # fmt: skip
    matched = store.match(keys, root)
    if not cuttable:
        return _plan_snapshot(store, prompt, matched)
    return _plan_rows(store, prompt, matched)


@dataclass(frozen=True, slots=True)
class _Prompt:
    keys: Sequence[bytes]
    root: bytes
    data: bytes
    length: int
    block_tokens: int
    want_full: bool
    resume_from_end: bool

    def parent(self, depth: int) -> bytes:
        """Key that records after the first `depth` blocks hang off."""
        return self.keys[depth - 1] if depth else self.root

    def part(self, start: int, end: int) -> bytes:
        return self.data[start * 8 : end * 8]

    def blocks(self, depth: int, position: int) -> tuple[Piece, ...]:
        size = self.block_tokens
        return tuple(
            Piece(
                "block",
                self.keys[i],
                self.parent(i),
                i * size,
                self.part(i * size, i * size + size),
                min(size, position - i * size),
            )
            for i in range(depth)
            if position > i * size
        )


def _plan_snapshot(store: Lookup, prompt: _Prompt, matched: int) -> Plan:
    for depth in range(matched, -1, -1):
        base = depth * prompt.block_tokens
        ref = _longest_exact(prompt, depth, store.snapshots(prompt.parent(depth)), exact_end=True)
        if ref is not None:
            position = base + ref.tail_length
            piece = _snapshot_piece(prompt, base, ref)
            full = position == prompt.length
            return Plan(position, prompt.blocks(depth, position), piece, None, full)
    return Plan()


def _plan_rows(store: Lookup, prompt: _Prompt, matched: int) -> Plan:
    base = matched * prompt.block_tokens
    parent = prompt.parent(matched)
    refs = store.snapshots(parent)
    exact = _longest_exact(prompt, matched, refs, exact_end=False)
    whole = exact is not None and base + exact.tail_length == prompt.length
    if exact is not None and whole and exact.end and prompt.want_full:
        blocks = prompt.blocks(matched, base)
        return Plan(prompt.length, blocks, _snapshot_piece(prompt, base, exact), None, True)
    reach = exact.tail_length if exact is not None else 0
    if exact is not None and exact.end and not prompt.resume_from_end:
        reach -= 1  # its last row was decoded
    limit = prompt.length - 1
    partial = None
    if base + reach < limit:
        partial = _longest_partial(store, prompt, base, parent, refs, reach)
    if partial is not None:
        position = min(base + partial.use, limit)
        return Plan(position, prompt.blocks(matched, base), None, _used(partial, position - base))
    position = max(min(base + reach, limit), 0)
    piece: Piece | None = None
    if exact is not None and position > base:
        piece = _used(_snapshot_piece(prompt, base, exact), position - base)
    return Plan(position, prompt.blocks(matched, position), piece)


def _longest_exact(
    prompt: _Prompt, depth: int, refs: Iterable[Ref], *, exact_end: bool
) -> Ref | None:
    """The snapshot with the longest tail that is the prompt's: its key says so, no file is read.

    exact_end: the snapshot can't be cut, so one of the whole prompt needs its logits.
    """
    base = depth * prompt.block_tokens
    parent = prompt.parent(depth)
    room = prompt.length - base
    fitting = [ref for ref in refs if ref.tail_length <= room]
    fitting.sort(key=lambda ref: (ref.tail_length, ref.end), reverse=True)
    wanted: dict[int, bytes] = {}
    for ref in fitting:
        length = ref.tail_length
        if exact_end and length == room and not (ref.end and prompt.want_full):
            continue
        if exact_end and ref.end and length < room and not prompt.resume_from_end:
            continue
        if length not in wanted:
            wanted[length] = snapshot_key(parent, prompt.part(base, base + length))
        if ref.key == wanted[length]:
            return ref
    return None


def _longest_partial(
    store: Lookup,
    prompt: _Prompt,
    base: int,
    parent: bytes,
    refs: Iterable[Ref],
    reach: int,
) -> Piece | None:
    """The block or snapshot after `parent` that shares more than `reach` of the next tokens."""
    rest = np.frombuffer(prompt.data, dtype="<i8", offset=base * 8)
    candidates: list[tuple[bytes, Kind]] = [(key, "block") for key in store.children(parent)]
    candidates = candidates[:MAX_HEADERS]
    longer = [ref for ref in refs if ref.tail_length > reach]
    candidates += [(ref.key, "snapshot") for ref in longer[:MAX_HEADERS]]
    best = None
    for key, kind in candidates:
        header = store.header(key, parent, kind)
        if header is None or header.start != base:
            continue
        held = np.frombuffer(header.tokens, dtype="<i8")
        if header.end and not prompt.resume_from_end:
            held = held[:-1]
        common = _common(rest, held)
        if common > reach:
            reach = common
            best = Piece(kind, key, parent, base, header.tokens, common)
    return best


def _common(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> int:
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    return int(differs.argmax()) if differs.any() else size


def _snapshot_piece(prompt: _Prompt, base: int, ref: Ref) -> Piece:
    tokens = prompt.part(base, base + ref.tail_length)
    return Piece("snapshot", ref.key, prompt.parent(base // prompt.block_tokens), base, tokens,
                 ref.tail_length)  # fmt: skip


def _used(piece: Piece, use: int) -> Piece:
    return Piece(piece.kind, piece.key, piece.parent, piece.start, piece.tokens, use)
