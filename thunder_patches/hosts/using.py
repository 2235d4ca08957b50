"""Requests that go on from contexts.

The tokens of such a request begin with the handed ones. The state of an exact context is then found by the
usual look-up; only that of one in less than full precision is restored here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..cache.record import Record
from ..handoff.context import Beginning, Context
from ..handoff.names import owner_of
from ..handoff.refusal import Refused
from .coded import load, state_of
from .handoff import allow, shelf
from .joining import Message, Template
from .making import layout_of, pendings
from .quantised import AnySession
from .session import Hit, Session

ROOM = 256
"""Tokens of room that a restored cache keeps beyond the prompt."""


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

    def check_after(self, chat: bool) -> None:
        """Raises:
        Refused: 400, what is to follow the context is no list of messages, or no text.
        """
        after = self.after
        fits = isinstance(after, list) and all(isinstance(m, dict) for m in after)
        if not (fits if chat else isinstance(after, str)):
            raise Refused(400, "request", f"expected {'messages' if chat else 'a text as prompt'}")

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

    def tokenised(
        self,
        template: Template | None,
        rendered: list[int],
        encode: Any,
        shown: Sequence[Message] | None = None,
    ) -> list[int]:
        """The request's tokens; notes how it goes on from the context.

        Args:
            template: None for a text completion. rendered: the host's tokens of the whole.
            encode: text to ids without special tokens.
            shown: all the messages as the template gets them, where that isn't as they were sent.
        """
        context = self.context
        if context is None:
            return rendered
        handed = [int(t) for t in context.tokens]
        in_words = context.said.get("answer_is_text", True) and template is not None
        if rendered[: len(handed)] == handed or (in_words and context.payload is None):
            self.beginning = "conversation"
            return rendered
        self.beginning = "continuation"
        if template is None:
            return [*handed, *encode(self.after)]
        if in_words:
            # A host may have merged the messages; in the template's own words they may follow.
            return template.encode(
                template.render(self.messages(), True, context.said.get("tools"))
            )
        said, after = context.said, self.after
        before = said["messages"]
        if shown is not None and len(shown) == len(before) + 1 + len(after):
            before, after = shown[: len(before)], shown[len(before) + 1 :]
        rest = template.after_answer(before, after, said.get("tools"), handed)
        return [*handed, *rest]

    def state(self) -> list[Record]:
        """The state of a context that isn't exact; nothing for one that is.

        Raises:
            Refused: 404 or 409, it can't be used.
        """
        context = self.context
        if context is None or context.payload is None:
            return []
        return state_of(context, shelf().payload(context))

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raises:
        Refused: 422, these tokens don't go on from the state of a context that isn't exact.
        """
        context = self.context
        if context is None or context.payload is None:
            return
        handed = [int(t) for t in context.tokens]
        if list(tokens[: len(handed)]) != handed or len(tokens) == len(handed):
            raise Refused(
                422,
                "template",
                "the messages don't go on from the handed tokens, which a context that isn't exact needs",
            )

    def restored(
        self, session: AnySession, tokens: Sequence[int], records: Sequence[Record]
    ) -> Hit | None:
        """The prompt cache to go on from, for a context that isn't exact.

        Args:
            records: what `state` found.
        """
        if self.context is None or self.context.payload is None:
            return None
        assert isinstance(session, Session)
        capacity = -(-(len(tokens) + ROOM) // ROOM) * ROOM
        return load(self.context, session, records, capacity)

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
