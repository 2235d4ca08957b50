"""Contexts made from requests, and requests that go on from contexts, whatever the host.

A context's state is what the store keeps of its tokens, as for any prompt. So an exact one needs nothing
new where it is used: the request's tokens begin with the handed ones, and the usual look-up finds them.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..cache.keys import chain
from ..cache.match import Plan, plan
from ..handoff.context import PRECISIONS, Beginning, Context, encode_ids
from ..handoff.keeping import keep_coded, keep_exact
from ..handoff.names import checked_name, new_id, owner_of
from ..handoff.refusal import Refused
from ..handoff.shelf import Shelf
from ..patching.guard import is_on
from .coded import Coder, load
from .joining import Message, Template
from .quantised import AnySequence, AnySession, QuantisedSequence, QuantisedSession
from .runtime import runtime
from .session import Hit, Session
from .session import Sequence as Plain

HANDOFF_SECONDS = 3600.0
LONGEST_SECONDS = 90 * 86400.0
FLUSH_SECONDS = 30.0
ANSWER_SECONDS = 600.0
AHEAD_SECONDS = 0.1
ROOM = 256
"""Tokens of room that a restored cache keeps beyond the prompt."""
_RECENT = 256
_RECENT_TOKENS = 8_000_000


def shelf() -> Shelf:
    """Where this process, and all others on its cache folder, keep contexts."""
    found = runtime().contexts
    assert found is not None
    return found


def told() -> dict[str, int]:
    """The ``contexts`` part of the status: how many there are, and what they keep."""
    return shelf().counts() | {"bytes": shelf().held()}


# What a request says


@dataclass(frozen=True)
class Wanted:
    """What a request asks to go on from: a handoff or a named cache; the text to use if it can't be."""

    kind: str
    name: Any
    fallback_text: str | None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Wanted | None:
        """From the request's ``thunder`` object; None where it asks for no context.

        Raises:
            Refused: 400.
        """
        asked = [kind for kind in ("handoff", "cache") if options.get(kind) is not None]
        if not asked:
            return None
        text = options.get("fallback_text")
        if len(asked) > 1 or not (text is None or isinstance(text, str)):
            raise Refused(
                400,
                "request",
                "expected 'handoff' or 'cache', and a string as 'fallback_text' where there is one",
            )
        return cls(asked[0], options[asked[0]], text)

    def find(self, salt: str) -> Context:
        """The context.

        Raises:
            Refused: see `Shelf.get` and `Shelf.named`; 409 where the feature is off.
        """
        feature = "handoff" if self.kind == "handoff" else "named_caches"
        allow(feature)
        owner = owner_of(salt)
        if (coming := pendings.get(self.name, owner)) is not None:
            coming.wait()
        return (
            shelf().get(self.name, owner)
            if feature == "handoff"
            else shelf().named(self.name, owner)
        )


def allow(feature: str) -> None:
    """Refuse where a feature, or the store that it works with, is off.

    Raises:
        Refused: 409.
    """
    for name in (feature, "ssd_cache"):
        if not is_on(name):
            raise Refused(409, "off", f"{name} is off in this server (THUNDER_{name.upper()})")


@dataclass(frozen=True)
class Order:
    """What ``POST /thunder/handoff`` or ``/thunder/caches/NAME`` asks for.

    Args:
        request: id of an earlier response; else ``messages`` with ``tools``, or ``prompt``.
        answer: whether that response's own tokens are part of the context.
        thinking: whether they are as they were ("keep"), or without what was thought ("cut").
        ttl: seconds until it expires; None for no end.
    """

    request: str | None
    precision: str
    answer: bool
    thinking: str
    ttl: float | None
    holder: str
    wait: bool = True
    """Whether the answer to the order is the finished descriptor, or just the id that it will have."""
    name: str | None = None

    @classmethod
    def of(cls, body: Any, name: str | None = None) -> Order:
        """Raises:
        Refused: 400, what was expected and found.
        """
        if not isinstance(body, dict):
            raise Refused(400, "request", "expected a JSON object")
        sources = [s for s in ("request", "messages", "prompt") if body.get(s) is not None]
        if len(sources) != 1:
            raise Refused(
                400, "request", f"expected one of request, messages and prompt, found {sources}"
            )
        known = {"precision": PRECISIONS, "thinking": ("keep", "cut")}
        for option, values in known.items():
            if body.get(option, values[0]) not in values:
                raise Refused(
                    400, "request", f"{option}: expected one of {values}, found {body[option]!r}"
                )
        precision = body.get("precision", "exact")
        if name is not None and precision != "exact":
            raise Refused(400, "request", f"a named cache is exact; found precision {precision!r}")
        return cls(
            request=_string(body, "request"),
            precision=precision,
            answer=body.get("answer") is not False,
            thinking=body.get("thinking", "keep"),
            ttl=_ttl(body.get("ttl"), None if name is not None else HANDOFF_SECONDS),
            holder=cls.holder_of(body),
            wait=body.get("wait") is not False or name is not None,
            name=None if name is None else checked_name(name),
        )

    @staticmethod
    def holder_of(body: dict[str, Any]) -> str:
        return checked_name(body.get("holder", "maker"))


def _string(body: dict[str, Any], field: str) -> str | None:
    value = body.get(field)
    if value is not None and not isinstance(value, str):
        raise Refused(400, "request", f"{field}: expected a string, found {value!r}"[:200])
    return value


def _ttl(value: Any, default: float | None) -> float | None:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(400, "request", f"ttl: expected seconds, found {value!r}")
    if not 0 < value <= LONGEST_SECONDS:
        raise Refused(
            400, "request", f"ttl: expected more than 0 and at most {LONGEST_SECONDS:.0f} seconds, "
            f"found {value}"
        )  # fmt: skip
    return float(value)


# Requests that ran here


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
        found = _parts(self.sequence)[0]
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


# Making


class Pending:
    """A handoff that is still being made, and was promised under an id."""

    def __init__(self, order: Order, owner: str) -> None:
        self.id = new_id()
        self.order = order
        self.owner = owner
        self.coder: Coder | None = None
        self.refusal: Refused | None = None
        self.done = threading.Event()

    def make(self, recent: Recent | None, finish: Callable[[Pending], None]) -> None:
        """Code what is there already, until `finish` can do the rest; on a thread of its own."""
        try:
            if recent is not None and self.order.precision in ("int8", "kvtc"):
                self._ahead(recent)
            finish(self)
        except Refused as error:
            self.refusal = error
        finally:
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
            while len(self._known) > _RECENT:
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

    def tokenised(self, template: Template | None, rendered: Sequence[int]) -> list[int]:
        """The tokens of the context, on the thread that has the tokenizer.

        Args:
            template: None for a text completion. rendered: the host's own tokens of what was said.

        Raises:
            Refused: 422, the template cannot be followed.
        """
        ids = self._tokens(template, rendered)
        if len(ids) < 2:
            raise Refused(
                422, "request", f"expected a context of 2 tokens or more, found {len(ids)}"
            )
        self.ids = ids
        return ids

    def _tokens(self, template: Template | None, rendered: Sequence[int]) -> list[int]:
        if template is None:
            return [*self.prompt, *self.answer] if self.answer else list(rendered)
        messages, tools = self.said["messages"], self.said.get("tools")
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
    found = max((_plan(part, ids) for part in _parts(sequence)), key=lambda p: p.position)
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


def _parts(sequence: AnySequence) -> tuple[Plain, ...]:
    return sequence.parts if isinstance(sequence, QuantisedSequence) else (sequence,)


def layout_of(session: AnySession) -> str:
    """The kinds of a model's caches, as a context notes them."""
    return session.quantised.kinds if isinstance(session, QuantisedSession) else session.kinds


# Using


@dataclass
class Use:
    """A request that goes on from a context, or from the text in its place.

    Args:
        after: the messages of the request itself, or its prompt.
    """

    wanted: Wanted
    after: Any
    context: Context | None = None
    beginning: Beginning | None = None
    refusal: Refused | None = None
    """Why the context is not used. With a text in its place the request goes on all the same."""

    @property
    def stopped(self) -> Refused | None:
        """Why the request cannot go on at all."""
        return self.refusal if self.wanted.fallback_text is None else None

    def refuse(self, refusal: Refused) -> None:
        """Go on with the text in the context's place, if there is one.

        Raises:
            Refused: there is none.
        """
        self.refusal, self.context = refusal, None
        if self.stopped is not None:
            raise refusal

    def check_form(self, chat: bool) -> None:
        """Raises:
        Refused: 422, a chat can't go on from a completion's context, nor the other way round.
        """
        assert self.context is not None
        if chat != ("messages" in self.context.said):
            made, found = ("completion", "chat") if chat else ("chat", "completion")
            raise Refused(
                422, "form", f"expected a {made}, as the context was one, found a {found}"
            )

    def check(self, session: AnySession | None, name: str) -> None:
        """Whether the loaded model can go on from the context.

        Raises:
            Refused: 409, what was expected and found.
        """
        context = self.context
        if context is None:
            return
        what = f"{self.wanted.kind} {context.id[:8] if not context.named else context.id}"
        if session is None:
            raise Refused(409, "model", f"{what}: {name} is not cached by this server")
        if session.identity != context.model:
            raise Refused(
                409,
                "model",
                f"{what}: expected model {context.model_name} ({context.model[:12]}), "
                f"found {name} ({session.identity[:12]})",
            )
        for field_, expected, found in (
            ("layout", context.layout, layout_of(session)),
            ("block_tokens", context.block_tokens, session.block_tokens),
        ):
            if expected != found:
                raise Refused(409, "layout", f"{what}: expected {field_} {expected}, found {found}")

    def messages(self) -> list[Message]:
        """The chat's messages from its very beginning."""
        text = self.wanted.fallback_text
        if self.context is None:
            system = next(
                (i for i, m in enumerate(self.after) if m.get("role") != "system"), len(self.after)
            )
            instead = {"role": "user", "content": text}
            return [*self.after[:system], instead, *self.after[system:]]
        said = self.context.said
        answer = said.get("answer")
        mine = [] if answer is None else [{"role": "assistant", "content": answer}]
        return [*said["messages"], *mine, *self.after]

    def prompt(self) -> str:
        """The text completion's prompt from its very beginning."""
        if self.context is None:
            return f"{self.wanted.fallback_text}{self.after}"
        return f"{self.context.said['prompt']}{self.context.said.get('answer') or ''}{self.after}"

    def tokenised(self, template: Template | None, rendered: list[int], encode: Any) -> list[int]:
        """The request's tokens; notes how it goes on from the context.

        Args:
            template: None for a text completion. rendered: the host's tokens of the whole.
            encode: text to ids without special tokens.
        """
        context = self.context
        if context is None:
            return rendered
        handed = [int(t) for t in context.tokens]
        exact_text = context.said.get("answer_is_text", True) and template is not None
        if exact_text or rendered[: len(handed)] == handed:
            self.beginning = "conversation"
            return rendered
        self.beginning = "continuation"
        if template is None:
            return [*handed, *encode(self.after)]
        said = context.said
        rest = template.after_answer(said["messages"], self.after, said.get("tools"), handed)
        return [*handed, *rest]

    def restored(self, session: AnySession, tokens: Sequence[int]) -> Hit | None:
        """The prompt cache to go on from, for a context that isn't exact.

        Raises:
            Refused: 422 the tokens don't go on from it, 404 or 409 its state can't be used.
        """
        context = self.context
        if context is None or context.payload is None:
            return None
        handed = [int(t) for t in context.tokens]
        if list(tokens[: len(handed)]) != handed or len(tokens) == len(handed):
            raise Refused(
                422,
                "template",
                "the messages don't go on from the handed tokens, which a context that isn't exact needs",
            )
        assert isinstance(session, Session)
        capacity = -(-(len(tokens) + ROOM) // ROOM) * ROOM
        return load(context, session, shelf().payload(context), capacity)

    def told(self) -> dict[str, Any]:
        """The response's ``thunder`` object."""
        if self.context is None:
            assert self.refusal is not None
            told: dict[str, Any] = {"used": False, "fallback": "text"} | self.refusal.to_json()
        else:
            told = {
                "used": True,
                "form": self.beginning,
                "precision": self.context.precision,
                "tokens": len(self.context.tokens),
            }
        return {
            self.wanted.kind: {
                ("id" if self.wanted.kind == "handoff" else "name"): self.wanted.name
            }
            | told
        }
