"""The requests that ran in this process lately, as far as a context can be made from them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from ..handoff.refusal import Refused
from .quantised import AnySequence, QuantisedSequence
from .session import Sequence

_RECENT = 256
_RECENT_TOKENS = 8_000_000


@dataclass
class Recent:
    """A request of this process, as far as a context can be made from it.

    Args:
        said: "messages" and "tools", or "prompt", as the client sent them.
        body: the whole request; it names the model and the template's variables.
    """

    said: dict[str, Any]
    body: dict[str, Any]
    owner: str
    sequence: AnySequence | None = None
    prompt_tokens: int = 0
    text: str | None = None
    """The answer's text, where the host tells no more of it; ``thought``: it came after thinking."""
    thought: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def tokens(self) -> list[int]:
        """The prompt's tokens and, once it is done, the answer's."""
        if self.sequence is None:
            return []
        found = parts(self.sequence)[0]
        return [int(t) for t in found.tokens]


class Recents:
    """The latest requests by the id that their responses carry."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Recent] = OrderedDict()

    def add(self, id: str, recent: Recent) -> None:
        with self._lock:
            self._known[id] = recent
            held = sum(r.prompt_tokens for r in self._known.values())
            while len(self._known) > _RECENT or (held > _RECENT_TOKENS and len(self._known) > 1):
                held -= self._known.popitem(last=False)[1].prompt_tokens

    def get(self, id: str, owner: str) -> Recent:
        """Raises:
        Refused: 404 for one that is unknown, or of another owner.
        """
        with self._lock:
            recent = self._known.get(id)
        if recent is None or recent.owner != owner:
            raise Refused(
                404, "unknown", f"request {id[:60]} is not among this server's last {_RECENT}"
            )
        return recent

    def forget(self) -> None:
        """Another model is loaded: what ran before leads to nothing any more."""
        with self._lock:
            self._known.clear()


recents = Recents()


def parts(sequence: AnySequence) -> tuple[Sequence, ...]:
    """The sequences that one request's state may be stored under."""
    return sequence.parts if isinstance(sequence, QuantisedSequence) else (sequence,)
