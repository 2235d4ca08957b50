"""How a request's messages follow a context: in the words of the model's chat template.

A chat that goes on from a context is the *one long conversation* where the template renders the handed
messages to just the handed tokens. Where it does not (it leaves out earlier thinking, say), the handed
tokens stay as they are and only what comes after them is rendered: a *continuation*.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..handoff.refusal import Refused
from ..pilot.boundaries import Follower

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool, Any], str]
"""``render(messages, add_generation_prompt, tools) -> text``."""

_ROLES = ("user", "assistant")
_OVERLAP = 16


@dataclass(frozen=True)
class Template:
    """A model's chat template, as the host applies it, and its tokenizer.

    Args:
        encode: text to ids without adding special tokens, reading those in the text as such.
        decode: ids to text, special tokens included.
        think_end: the text that closes thinking, or "".
    """

    render: Render
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    follower: Follower
    stops: frozenset[int] = frozenset()
    """Ids that end an answer."""
    think_end: str = ""

    def upto(self, messages: Sequence[Message], tools: Any) -> list[int]:
        """The tokens of these messages, whatever follows them.

        Raises:
            Refused: 422, the template cannot be followed.
        """
        reason = "no message may follow"
        for role in _ROLES:
            probe = [*messages, {"role": role, "content": "x"}]
            try:
                tokens = self.encode(self.render(probe, False, tools))
            except Exception as error:  # a template may raise anything
                reason = str(error)
                continue
            found = self.follower.boundaries(self.render, probe, tools, tokens)
            if (end := found.ends[len(messages) - 1]) is not None:
                return tokens[:end]
            reason = found.reason
        raise Refused(
            422, "template", f"where these messages end in the chat template is unknown: {reason}"
        )

    def after_answer(
        self, before: Sequence[Message], after: Sequence[Message], tools: Any, handed: Sequence[int]
    ) -> list[int]:
        """The tokens that follow an answer whose own tokens, the last of ``handed``, are kept.

        Raises:
            Refused: 422, the template drops the answer.
        """
        mark = f"Qz{secrets.token_hex(8)}zQ"
        answer = {"role": "assistant", "content": mark}
        text = self.render([*before, answer, *after], True, tools)
        if mark not in text:
            raise Refused(422, "template", "the chat template leaves the handed answer out")
        rest = self.encode(text.rpartition(mark)[2])
        # The end-of-turn token, where the answer ended with it, is there already.
        for size in range(min(_OVERLAP, len(rest), len(handed)), 0, -1):
            if list(handed[-size:]) == rest[:size]:
                return rest[size:]
        return rest

    def answer(self, ids: list[int]) -> str:
        """The text of an answer, without what ended it."""
        return self.decode(ids[:-1] if ids and ids[-1] in self.stops else ids)

    def without_thinking(self, answer: str) -> str:
        if self.think_end and self.think_end in answer:
            return answer.rpartition(self.think_end)[2].lstrip("\n")
        return answer
