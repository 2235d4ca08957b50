"""Where the messages of a chat end in the prompt's tokens, from the model's own chat template."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ...pilot.boundaries import Boundaries, Follower


def boundaries(
    generator: Any, tokenizer: Any, request: Any, args: Any, tokens: Any
) -> Boundaries | None:
    """The message boundaries of a chat request; None for a plain completion.

    Args:
        generator: ``ResponseGenerator``; request, args: as given to its ``_tokenize``, afterwards (the host
            brings the messages' content into the template's form in place).
        tokens: the prompt ``[N]`` that ``_tokenize`` returned.
    """
    if request.request_type != "chat" or not tokenizer.has_chat_template:
        return None
    render = renderer(generator, tokenizer, args)
    return follower(tokenizer).boundaries(render, request.messages, request.tools, tokens)


def renderer(generator: Any, tokenizer: Any, args: Any) -> Callable[[Any, bool, Any], str]:
    """``render(messages, add_generation_prompt, tools) -> text`` with this request's variables."""
    variables = dict(generator.model_provider.cli_args.chat_template_args)
    variables.update(args.chat_template_kwargs or {})

    def render(messages: Any, add_generation_prompt: bool, tools: Any) -> str:
        return tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            tokenize=False,
            **variables,
        )

    return render


@lru_cache(maxsize=2)
def follower(tokenizer: Any) -> Follower:
    """The one that knows this tokenizer's template."""
    return Follower(lambda text: tokenizer.encode(text, add_special_tokens=False))
