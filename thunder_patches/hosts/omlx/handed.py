"""What a request under oMLX has to do with contexts, from its body to the engine's thread."""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ...cache.record import Record
from ...handoff.refusal import Refused
from ..making import Making
from ..recents import Recent
from ..using import Use
from .forms import Form


@dataclass(frozen=True)
class Shown:
    """A chat as its template got it, and the text that came out."""

    messages: list[dict[str, Any]]
    tools: Any
    variables: dict[str, Any]
    text: str


@dataclass
class Handed:
    """A request that goes on from a context (``use``) or that makes one (``making``), or neither."""

    form: Form
    keep: bool = True
    """Whether anything of it may be stored."""
    recent: Recent | None = None
    """Where a context that is made of this request later will find it."""
    use: Use | None = None
    making: Making | None = None
    records: list[Record] = field(default_factory=list)
    """The state of a context that isn't exact, read and decoded."""
    shown: Shown | None = None
    ids: list[int] | None = None
    """The tokens to run in the place of those that the host makes of the prompt's text."""

    @property
    def chat(self) -> bool:
        """Whether it is a chat, not a text completion."""
        return self.form.chat

    @property
    def busy(self) -> bool:
        """Whether its tokens are other than those of any request."""
        return self.making is not None or (self.use is not None and self.use.context is not None)

    @property
    def unsaid(self) -> bool:
        """Whether what it goes on from could not be put before its messages."""
        return self.use is not None and self.form.own_words and self.shown is None

    def refuse(self, refusal: Refused) -> None:
        """Note why it cannot go on as it was meant to."""
        if self.use is not None:
            self.use.refusal, self.use.context = refusal, None
        elif self.making is not None:
            self.making.refusal = refusal


handed: ContextVar[Handed | None] = ContextVar("thunder_handed", default=None)
"""What this task's request has to do with contexts."""
by_id: weakref.WeakValueDictionary[str, Handed] = weakref.WeakValueDictionary()
"""The same by the engine's id of the request, for the engine's thread."""
