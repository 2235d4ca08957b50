"""A chat's messages on their way to the prompt, and where they end in its tokens."""

from __future__ import annotations

from typing import Any

from ...patching.guard import shield
from ...pilot.boundaries import Boundaries, Follower
from ..arguments import named, replaced
from ..pilot import prepare
from .requests import Http, Prepared, current


def apply_chat_template(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``BatchedEngine._apply_chat_template(messages, tools, chat_template_kwargs, is_partial)``.

    The host comes here two or three times for one request, to count and to answer: each time the
    messages are brought into the same form.
    """
    with shield("context_pilot", "messages"):
        http = current()
        if http is not None:
            given = named(wrapped, args, kwargs)
            variables = dict(given.get("chat_template_kwargs") or {})
            if (thinking := getattr(instance, "_enable_thinking", None)) is not None:
                variables.setdefault("enable_thinking", thinking)
            prompt = _prepared(http, given["messages"], given.get("tools"), variables)
            args, kwargs = replaced(
                wrapped, args, kwargs, messages=prompt.messages, tools=prompt.tools
            )
    return wrapped(*args, **kwargs)


def _prepared(http: Http, messages: Any, tools: Any, variables: dict[str, Any]) -> Prepared:
    prompt = http.prompt
    if prompt is None or (prompt.given, prompt.variables) != ((messages, tools), variables):
        http.chat, stable, stable_tools = prepare(messages, tools, http.options, variables)
        prompt = http.prompt = Prepared((messages, tools), stable, stable_tools, variables)
    return prompt


def boundaries(follower: Follower, tokenizer: Any, prompt: Prepared, tokens: Any) -> Boundaries:
    """The message boundaries of a chat's prompt, on the engine's thread.

    Args:
        tokenizer: the scheduler's own, which no other thread uses. tokens: the prompt ``[N]``.
    """

    def render(messages: Any, add_generation_prompt: bool, tools: Any) -> str:
        extra = prompt.variables | ({"tools": tools} if tools else {})
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **extra
        )
        return text

    return follower.boundaries(render, prompt.messages, prompt.tools, tokens)
