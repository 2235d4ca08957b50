"""A context: some tokens, the records that hold the model's state after them, and who may use them."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from thunder_patches.cache.keys import KEY_BYTES, TOKEN_DTYPE
from thunder_patches.cache.record import Kind

FORM = 1
PRECISIONS = ("exact", "int8", "mixed", "kvtc")


class BadContext(ValueError):
    """A descriptor that is damaged or was tampered with; the message says how."""


@dataclass(frozen=True)
class Pinned:
    """A record of the store that the context needs. ``size``: bytes of its file."""

    kind: Kind
    key: str
    parent: str
    size: int


@dataclass(frozen=True)
class Payload:
    """The file beside the descriptor, with the state in less than full precision."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Context:
    """What a descriptor's file holds.

    Args:
        id: how it is called; random for a handoff, the user's own for a named cache.
        named: whether it is a named cache.
        owner: `names.owner_of` the salt that it was made under.
        model: identity of the model's content; model_name: what the server called it.
        layout: the kinds of the layers' caches, and what else decides the state's form.
        block_tokens: tokens in a block of the store that the records belong to.
        precision: one of `PRECISIONS`.
        ids: the context's tokens, base64 of little-endian int64.
        position: tokens whose state is stored; the others are computed again when it is used.
        said: the request that it came from: "messages" and "tools" of a chat, or "prompt" of a text
            completion, and the "answer" to it, if that is part of it.
        pins: what of the store it needs.
        payload: where the state is, for a precision that isn't exact.
        created, expires: seconds since the epoch; it may have no end.
        holders: who still needs it; without any it goes.
    """

    id: str
    named: bool
    owner: str
    model: str
    model_name: str
    layout: str
    block_tokens: int
    precision: str
    ids: str
    position: int
    said: Mapping[str, Any]
    pins: tuple[Pinned, ...]
    created: float
    expires: float | None
    holders: tuple[str, ...] = ()
    payload: Payload | None = None
    form: int = field(default=FORM)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(base64.b64decode(self.ids), TOKEN_DTYPE)

    @property
    def size(self) -> int:
        """Bytes of the files that hold its state, as they were written."""
        return self.payload.size if self.payload is not None else sum(p.size for p in self.pins)

    def expired(self, now: float) -> bool:
        return self.expires is not None and now >= self.expires

    def keys(self) -> frozenset[bytes]:
        """Keys of the records that must stay."""
        return frozenset(bytes.fromhex(pin.key) for pin in self.pins)

    def held_by(self, *holders: str) -> Context:
        return replace(self, holders=tuple(dict.fromkeys(holders)))

    def checksum(self) -> str:
        """Digest of what the context *is*: model, layout, precision, tokens and state."""
        what = [self.model, self.layout, self.block_tokens, self.precision, self.ids, self.position]
        what += [[pin.key for pin in self.pins], self.payload.sha256 if self.payload else None]
        return hashlib.sha256(_written(what)).hexdigest()

    def described(self) -> dict[str, Any]:
        """The descriptor as its owner sees it; neither tokens nor text."""
        count = len(self.tokens)
        return {
            ("name" if self.named else "id"): self.id,
            "model": self.model_name,
            "model_identity": self.model,
            "layout": self.layout,
            "precision": self.precision,
            "tokens": count,
            "next_position": count,
            "stored_tokens": self.position,
            "size": self.size,
            "checksum": self.checksum(),
            "created": self.created,
            "expires": self.expires,
            "holders": list(self.holders),
        }

    def dumps(self) -> bytes:
        """The descriptor's file, with a checksum over all of it."""
        value = asdict(self)
        return _written(value | {"checksum": hashlib.sha256(_written(value)).hexdigest()})

    @classmethod
    def loads(cls, data: bytes) -> Context:
        """Inverse of `dumps`.

        Raises:
            BadContext: when the data is anything else.
        """
        try:
            value = json.loads(data)
            found = value.pop("checksum")
            expected = hashlib.sha256(_written(value)).hexdigest()
            if found != expected:
                raise BadContext(f"expected checksum {expected[:16]}, found {str(found)[:16]}")
            if value.get("form") != FORM:
                raise BadContext(f"expected a descriptor of form {FORM}, found {value.get('form')}")
            known = {f.name for f in fields(cls)}
            if value.keys() != known:
                raise BadContext(f"unexpected fields {sorted(value.keys() ^ known)[:4]}")
            value["pins"] = tuple(Pinned(**pin) for pin in value["pins"])
            value["payload"] = Payload(**value["payload"]) if value["payload"] else None
            value["holders"] = tuple(value["holders"])
            context = cls(**value)
            context._check()
        except BadContext:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise BadContext(f"not a descriptor: {error!r}"[:200]) from error
        return context

    def _check(self) -> None:
        """What the checksum can't promise: whoever made it meant a context."""
        if self.precision not in PRECISIONS:
            raise BadContext(f"expected a precision of {PRECISIONS}, found {self.precision!r}")
        count = len(self.tokens)
        if not 0 <= self.position <= count or self.block_tokens < 1:
            raise BadContext(f"position {self.position} of {count} tokens")
        if any(len(bytes.fromhex(pin.key)) != KEY_BYTES for pin in self.pins):
            raise BadContext("a pinned key of a wrong length")
        if self.expires is not None and not math.isfinite(self.expires):
            raise BadContext(f"expires {self.expires}")


Beginning = Literal["conversation", "continuation"]
"""How a request goes on from a context: as one conversation through the chat template, or token by token."""


def encode_ids(tokens: npt.ArrayLike) -> str:
    """Tokens as a `Context` keeps them."""
    return base64.b64encode(np.ascontiguousarray(tokens, TOKEN_DTYPE).tobytes()).decode()


def _written(value: Any) -> bytes:
    """JSON in the keys' own order, which reading keeps: a chat template renders tools as they came."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()
