"""oMLX's API forms, as far as contexts go into them.

A context is said in the words of chat completions. In a form with other words (Anthropic's messages,
responses) it joins the request's own messages where the host has brought them into a chat's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Form:
    """One form of request.

    Args:
        path: where it is posted to.
        field: where its body has what is asked; kinds: what that may be.
        chat: whether it is a chat, not a text completion.
        own_words: whether its body says a chat in other words than chat completions do.
    """

    path: str
    field: str
    kinds: tuple[type, ...]
    chat: bool = True
    own_words: bool = False

    def tools(self, given: Any) -> Any:
        """The tools of a chat completion in the words of this form."""
        if not self.own_words or not given:
            return given
        functions = [tool["function"] for tool in given if tool.get("function")]
        if self is MESSAGES:
            return [
                {"name": f["name"], "input_schema": f.get("parameters") or {"type": "object"}}
                | {k: f[k] for k in ("description",) if k in f}
                for f in functions
            ]
        return [{"type": "function", **f} for f in functions]

    def joined(self, messages: Iterable[Mapping[str, Any]]) -> list[Json]:
        """A whole chat as the host makes it of a request in this form that says all of it."""
        host = sys.modules["omlx.api.utils"]
        found: list[Json] = host._consolidate_system_messages([dict(m) for m in messages])
        return host._merge_consecutive_roles(found) if self is MESSAGES else found


CHAT = Form("/v1/chat/completions", "messages", (list,))
TEXT = Form("/v1/completions", "prompt", (str,), chat=False)
MESSAGES = Form("/v1/messages", "messages", (list,), own_words=True)
RESPONSES = Form("/v1/responses", "input", (str, list), own_words=True)
FORMS = {form.path: form for form in (CHAT, TEXT, MESSAGES, RESPONSES)}
