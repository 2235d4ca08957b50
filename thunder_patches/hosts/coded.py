"""A context's state in less than full precision: from the store's records to a file, and into a prompt cache.

Such a state is no prefix of anything in the store: it has no keys there, and nothing that was computed
after it is stored. So no look-up for an exact state can meet it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from ..cache.match import Piece
from ..cache.record import Header, Record
from ..cache.store import CacheStore, ReadJob
from ..codec.base import CodecError
from ..codec.calibration import Shelf as Calibrations
from ..codec.kvtc import Kvtc
from ..handoff.context import Context
from ..handoff.keeping import digest
from ..handoff.parcel import BadParcel, Packed, Parcel
from ..handoff.precision import decoded, encode, joined
from ..handoff.refusal import Refused
from ..handoff.transfer import read
from ..tensors.restore import restore
from .runtime import runtime
from .session import Hit, Session


def kvtc_of(model: str) -> Kvtc:
    """The codec "kvtc" for a model; without a calibration of it, it can only decode others'."""
    shelf = _calibrations()
    return Kvtc(shelf.get, shelf.of_model(model), runtime().settings.codec_quality)


@cache
def _calibrations() -> Calibrations:
    return Calibrations(Path(runtime().settings.cache_dir) / "calibrations")


def _records(pieces: Sequence[Piece]) -> list[Record]:
    return read(runtime().store, [(piece.kind, piece.key, piece.parent) for piece in pieces])


class Coder:
    """Codes records once each, so that most of the work can be done before the last ones are there."""

    def __init__(self, context_precision: str, model: str) -> None:
        """Raises:
        Refused: 409, no calibration for "kvtc".
        """
        self.precision = context_precision
        self._kvtc = kvtc_of(model) if context_precision == "kvtc" else None
        if self._kvtc is not None and not self._kvtc.calibrated:
            raise Refused(
                409,
                "calibration",
                "precision kvtc needs a calibration of this model: thunder calibrate",
            )
        self._done: dict[bytes, Packed] = {}

    @property
    def count(self) -> int:
        """Records coded so far."""
        return len(self._done)

    def code(self, pieces: Sequence[Piece]) -> list[Packed]:
        """The records of a chain, coded; those that are known from an earlier call are not read."""
        if self.precision == "mixed":
            # What matters in a context is known once all of it is there.
            tokens = b"".join(piece.tokens for piece in pieces)
            return [self._one(joined(_records(pieces), tokens))]
        for piece in pieces:
            if piece.key not in self._done:
                self._done[piece.key] = self._one(_records([piece])[0])
        return [self._done[piece.key] for piece in pieces]

    def _one(self, record: Record) -> Packed:
        coded = encode(record, cast(Any, self.precision), kvtc=self._kvtc)
        return Packed(record.header, tuple(coded))


def state_of(context: Context, file: Path) -> list[Record]:
    """A context's coded state, checked and decoded; on any thread.

    Raises:
        Refused: 404 it has gone, 409 it is damaged.
    """
    payload = context.payload
    assert payload is not None
    try:
        if (found := digest(file)) != payload.sha256:
            raise BadParcel(f"expected checksum {payload.sha256[:16]}, found {found[:16]}")
        kvtc = kvtc_of(context.model) if context.precision == "kvtc" else None
        return [decoded(p.header, p.tensors, kvtc) for p in Parcel(file).records()]
    except FileNotFoundError:
        raise Refused(404, "unknown", "the state of this context was released") from None
    except (BadParcel, CodecError, OSError) as error:
        raise Refused(
            409, "tampered", f"the state of this context cannot be used: {error}"
        ) from error


def load(context: Context, session: Session, records: Sequence[Record], capacity: int) -> Hit:
    """A prompt cache with a context's state, on the thread that goes on from it."""
    pieces = [_piece(i, record.header) for i, record in enumerate(records)]
    restored = restore(
        cast(CacheStore, _Held(records)),
        pieces,
        session.make_cache(),
        length=context.position,
        capacity=capacity,
    )
    return Hit(restored.caches, context.position, "ssd", codec=context.precision)


def _piece(i: int, header: Header) -> Piece:
    return Piece(header.kind, i.to_bytes(16), b"", header.start, header.tokens, header.n_tokens)


class _Held:
    """The part of a store that a restore asks for, with these records and no others."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records
        self.held: Callable[[Sequence[ReadJob]], Sequence[Record]] = lambda jobs: records

    def header(self, key: bytes, parent: bytes, kind: str) -> Header:
        return self._records[int.from_bytes(key)].header
