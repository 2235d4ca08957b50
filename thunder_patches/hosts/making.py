"""Contexts made from requests.

A context's state is what the store keeps of its tokens, as for any prompt: the server runs a request of
one token for it. An exact context then needs nothing but to have these records kept.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..cache.keys import chain
from ..cache.match import Plan, plan
from ..handoff.context import Context, encode_ids
from ..handoff.keeping import keep_coded, keep_exact
from ..handoff.names import new_id, owner_of
from ..handoff.refusal import Refused
from ..patching.guard import shield
from .coded import Coder
from .handoff import Order, shelf
from .joining import Message, Template
from .quantised import AnySequence, AnySession, QuantisedSession
from .recents import Recent, parts
from .runtime import runtime
from .session import Sequence as Plain

FLUSH_SECONDS = 30.0
ANSWER_SECONDS = 600.0
AHEAD_SECONDS = 0.1
KNOWN = 256
"""Promised handoffs that are remembered."""


class Pending:
    """A handoff that is still being made, and was promised under an id."""

    def __init__(self, order: Order, owner: str) -> None:
        self.id = new_id()
        self.order = order
        self.owner = owner
        self.coder: Coder | None = None
        self.refusal: Refused | None = None
        self.done = threading.Event()

    def begin(self, recent: Recent | None, finish: Callable[[Pending], Any]) -> None:
        """Make it on a thread of its own: code what is there already until `finish` can do the rest."""
        threading.Thread(target=self._begun, args=(recent, finish), daemon=True).start()

    def _begun(self, recent: Recent | None, finish: Callable[[Pending], Any]) -> None:
        with shield("contexts", "pending") as guarded:
            try:
                if recent is not None and self.order.precision in ("int8", "kvtc"):
                    self._ahead(recent)
                finish(self)
            except Refused as error:
                self.refusal = error
        if guarded.failed:
            self.refusal = Refused(
                500, "fault", "the handoff could not be made; see the server's log"
            )
        if self.refusal is None:
            pendings.drop(self)
        self.done.set()

    def _ahead(self, recent: Recent) -> None:
        """Code the prompt's blocks while its answer is generated."""
        while not recent.done.wait(AHEAD_SECONDS):
            sequence = recent.sequence
            if not isinstance(sequence, Plain):
                continue
            if self.coder is None:
                self.coder = Coder(self.order.precision, sequence.session.identity)
            prompt = recent.tokens()[: recent.prompt_tokens]
            self.coder.code(_plan(sequence, prompt).blocks)

    def wait(self) -> None:
        """Raises:
        Refused: it could not be made, or takes too long.
        """
        if not self.done.wait(ANSWER_SECONDS):
            raise Refused(409, "pending", "this handoff is still being made")
        if self.refusal is not None:
            raise self.refusal

    def described(self) -> dict[str, Any]:
        if self.refusal is not None:
            raise self.refusal
        coded = self.coder.count if self.coder is not None else 0
        return {"id": self.id, "state": "pending", "coded_blocks": coded}


class Pendings:
    """The handoffs of this process that are not ready yet, or could not be made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Pending] = OrderedDict()

    def add(self, order: Order, owner: str) -> Pending:
        pending = Pending(order, owner)
        with self._lock:
            self._known[pending.id] = pending
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)
        return pending

    def get(self, id: object, owner: str) -> Pending | None:
        with self._lock:
            found = self._known.get(id) if isinstance(id, str) else None
        return found if found is not None and found.owner == owner else None

    def drop(self, pending: Pending) -> None:
        with self._lock:
            self._known.pop(pending.id, None)


pendings = Pendings()


@dataclass
class Making:
    """A context in the making: a request that the server runs for it, so that its state is stored.

    Args:
        said: as of `Recent`. answer: the tokens of the answer that belong to it, or None.
        prompt: those of the prompt, where there is an answer.
    """

    order: Order
    said: dict[str, Any]
    answer: list[int] | None = None
    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    sequence: AnySequence | None = None
    model_name: str = ""
    id: str | None = None
    """The id that was promised for it."""
    refusal: Refused | None = None
    coder: Coder | None = None
    """With what was coded while the answer was still being generated."""

    @property
    def stopped(self) -> Refused | None:
        return self.refusal

    @classmethod
    def after(cls, order: Order, recent: Recent) -> Making:
        """A context of a request that ran here; waits for its answer.

        Raises:
            Refused: 409, there is no whole answer.
        """
        if not order.answer:
            return cls(order, recent.said)
        if not recent.done.wait(ANSWER_SECONDS):
            raise Refused(409, "running", f"request {order.request} has no answer yet")
        tokens, end = recent.tokens(), recent.prompt_tokens
        if len(tokens) <= end:
            raise Refused(409, "answer", f"request {order.request} was not answered in full")
        return cls(order, recent.said, tokens[end:], tokens[:end])

    def tokenised(
        self,
        template: Template | None,
        rendered: Sequence[int],
        shown: Sequence[Message] | None = None,
    ) -> list[int]:
        """The tokens of the context, on the thread that has the tokenizer.

        Args:
            template: None for a text completion. rendered: the host's own tokens of what was said.
            shown: the messages as the template gets them, where that isn't as they were sent.

        Raises:
            Refused: 422, the template cannot be followed.
        """
        ids = self._tokens(template, rendered, shown)
        if len(ids) < 2:
            raise Refused(
                422, "request", f"expected a context of 2 tokens or more, found {len(ids)}"
            )
        self.ids = ids
        return ids

    def _tokens(
        self,
        template: Template | None,
        rendered: Sequence[int],
        shown: Sequence[Message] | None,
    ) -> list[int]:
        if template is None:
            return [*self.prompt, *self.answer] if self.answer else list(rendered)
        messages, tools = shown or self.said["messages"], self.said.get("tools")
        if not self.answer:
            return template.upto(messages, tools)
        text = template.answer(self.answer)
        if self.order.thinking == "cut":
            text = template.without_thinking(text)
            self.said = self.said | {"answer": text, "answer_is_text": True}
            answer = {"role": "assistant", "content": text}
            return template.upto([*messages, answer], tools)
        self.said = self.said | {"answer": text, "answer_is_text": False}
        return [*self.prompt, *self.answer]


def fed(session: AnySession, ids: list[int]) -> list[int]:
    """What to run so that the state after ``ids`` is stored as prefill leaves it.

    Where a decoded token leaves another state, the last one must not be the prompt's last: the host
    runs that as a decode step.
    """
    return ids if session.exact_decode else [*ids, ids[-1]]


def build(making: Making, salt: str) -> Context:
    """Describe and keep the context whose state the server has just stored.

    Raises:
        Refused: 409 for a model that isn't cached, 507 where there is no room.
    """
    order, sequence = making.order, making.sequence
    if sequence is None:
        raise Refused(409, "model", "this model's state is not cached by this server")
    store, session, ids = runtime().store, sequence.session, making.ids
    store.flush(FLUSH_SECONDS)
    found = max((_plan(part, ids) for part in parts(sequence)), key=lambda p: p.position)
    now = time.time()
    context = Context(
        id=order.name or making.id or new_id(),
        named=order.name is not None,
        owner=owner_of(salt),
        model=session.identity,
        model_name=making.model_name,
        layout=layout_of(session),
        block_tokens=session.block_tokens,
        precision=order.precision,
        ids=encode_ids(ids),
        position=found.position,
        said=making.said,
        pins=(),
        created=now,
        expires=None if order.ttl is None else now + order.ttl,
        holders=() if order.name is not None else (order.holder,),
    )
    if order.precision == "exact":
        wanted = [(p.kind, p.key, p.parent) for p in found.pieces]
        return keep_exact(store, shelf(), context, wanted)
    if isinstance(session, QuantisedSession):
        raise Refused(
            409, "layout", "with --kv-bits the state is quantised already: hand it over exact"
        )
    coder = making.coder or Coder(order.precision, session.identity)
    return keep_coded(store, shelf(), context, coder.code(found.pieces))


def _plan(sequence: Plain, ids: list[int]) -> Plan:
    """What the store has of these tokens, if another token follows them."""
    session = sequence.session
    tokens = np.asarray([*ids, 0], np.int64)
    return plan(
        session.runtime.store,
        chain(sequence.root, tokens, session.block_tokens),
        sequence.root,
        tokens,
        session.block_tokens,
        cuttable=session.cuttable,
        want_full=False,
        resume_from_end=session.exact_decode and session.cut_anywhere,
    )


def layout_of(session: AnySession) -> str:
    """The kinds of a model's caches, as a context notes them."""
    return session.quantised.kinds if isinstance(session, QuantisedSession) else session.kinds
