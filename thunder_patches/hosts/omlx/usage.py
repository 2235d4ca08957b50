"""What the client sees of it: ``usage.context_pilot`` in each form of oMLX's answers.

The host builds its usages on the request's own tasks, so `requests.current` knows what became of it.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from typing import Any

from ...patching.guard import is_on, shield
from ..arguments import named, replaced
from .engines import engine_named
from .requests import current


def usage(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``Usage(...)``: chat completions and completions, whole and streamed."""
    with shield("context_pilot", "usage"):
        cached = getattr(kwargs.get("prompt_tokens_details"), "cached_tokens", None)
        told = _told(kwargs.get("prompt_tokens"), cached)
        if told is not None and _opened("omlx.api.openai_models", "Usage", *_OPENAI):
            kwargs = {**kwargs, "context_pilot": told}
    return wrapped(*args, **kwargs)


def message(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``convert_internal_to_anthropic_response(...)``: a whole answer of ``/v1/messages``."""
    told = None
    with shield("context_pilot", "usage"):
        told, args, kwargs = _anthropic(wrapped, args, kwargs, "prompt_tokens")
        if told is not None:
            _opened("omlx.api.anthropic_models", "AnthropicUsage", "MessagesResponse")
    response = wrapped(*args, **kwargs)
    with shield("context_pilot", "usage"):
        if told is not None:
            response.usage.context_pilot = told
    return response


def message_start(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``create_message_start_event(...)``: the shape of its usage is that of the end."""
    with shield("context_pilot", "usage"):
        given = named(wrapped, args, kwargs)
        engine = engine_named(given["model"])
        if engine is not None and engine.session is not None and _SPLIT in given:
            args, kwargs = replaced(wrapped, args, kwargs, **{_SPLIT: True})
    return wrapped(*args, **kwargs)


def message_delta(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``create_message_delta_event(...) -> str``: the end of a streamed answer of ``/v1/messages``."""
    told = None
    with shield("context_pilot", "usage"):
        told, args, kwargs = _anthropic(wrapped, args, kwargs, "input_tokens")
    event = wrapped(*args, **kwargs)
    with shield("context_pilot", "usage"):
        if told is not None:
            head, _, data = event.partition("data: ")
            value = json.loads(data)
            value["usage"]["context_pilot"] = told
            event = f"{head}data: {json.dumps(value, ensure_ascii=False)}\n\n"
    return event


def response_usage(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``build_response_usage(...)``: a whole answer of ``/v1/responses``."""
    told = None
    with shield("context_pilot", "usage"):
        given = named(wrapped, args, kwargs)
        told = _told(given["input_tokens"], given.get("cached_tokens"))
        if told is not None:
            _opened("omlx.api.responses_models", "ResponseUsage", "ResponseObject")
    result = wrapped(*args, **kwargs)
    with shield("context_pilot", "usage"):
        if told is not None:
            result.context_pilot = told
    return result


def response_event(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``format_sse_event(event_type, data) -> str``: the last event of ``/v1/responses`` has a usage."""
    with shield("context_pilot", "usage"):
        event, data = args if len(args) == 2 else named(wrapped, args, kwargs).values()
        if event == "response.completed" and (found := data["response"].get("usage")):
            cached = found["input_tokens_details"]["cached_tokens"]
            told = _told(found["input_tokens"], cached)
            if told is not None:
                found["context_pilot"] = told
    return wrapped(*args, **kwargs)


def _told(total: int | None, cached: int | None) -> dict[str, Any] | None:
    """``usage.context_pilot`` of this task's request."""
    http = current()
    if http is None or not is_on("context_pilot"):
        return None
    return http.chat.told(http.outcome(cached or 0), total or 0)


def _anthropic(wrapped: Any, args: Any, kwargs: Any, total: str) -> tuple[Any, Any, Any]:
    """What is told, and the call with the prompt's tokens split into those read and those computed.

    Some versions split them where the host's own cache is in use, which it no longer is; others where
    the client asks for it, and go on to do so.
    """
    given, http = named(wrapped, args, kwargs), current()
    told = _told(given.get(total), given.get("cached_tokens"))
    if http is not None and http.outcomes and _SPLIT in given:
        args, kwargs = replaced(wrapped, args, kwargs, **{_SPLIT: True})
    return told, args, kwargs


_SPLIT = "prefix_cache_enabled"
_OPENAI = ("ChatCompletionResponse", "ChatCompletionChunk", "CompletionResponse")


@cache
def _opened(module: str, usage: str, *containers: str) -> bool:
    """Let the host's usage keep a field that it does not know, and its containers write it."""
    models = sys.modules[module]
    getattr(models, usage).model_config["extra"] = "allow"
    for name in (usage, *containers):
        if hasattr(models, name):
            getattr(models, name).model_rebuild(force=True)
    return True
