"""What an HTTP request says beyond the host's own fields: who asks, and what is asked of this package."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Protocol

from .pilot import Chat
from .runtime import runtime

PROGRESS_HEADER = "X-Thunder-Progress"


class Headers(Protocol):
    """HTTP headers, found whatever the case of their names."""

    def get(self, name: str, /) -> str | None: ...


@dataclass(eq=False)
class Asked:
    """One request."""

    salt: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    """The body's ``thunder`` object."""
    chat: Chat = field(default_factory=Chat)


def salted() -> bool:
    """Whether each API key has a cache of its own; a host's own cache has no such thing."""
    return runtime().settings.salt == "api-key"


def salt_of(headers: Headers) -> str:
    """The salt of a request's keys: the operator's, or one for each API key (`salted`)."""
    if not salted():
        return runtime().settings.salt
    key = (headers.get("Authorization") or "").removeprefix("Bearer ") or headers.get("x-api-key")
    return hashlib.sha256(key.encode()).hexdigest() if key else ""


def options_of(body: Any, headers: Headers) -> dict[str, Any]:
    """The JSON body's own ``thunder`` object, and what the headers say of it."""
    found = body.get("thunder") if isinstance(body, dict) else None
    options = dict(found) if isinstance(found, dict) else {}
    if headers.get(PROGRESS_HEADER) in ("1", "true"):
        options["progress"] = True
    return options
