"""What the client sees of it: ``usage``, in whole answers and in the last chunk of a stream."""

from __future__ import annotations

from typing import Any

from ...patching.guard import is_on, shield
from .requests import answered


def generate_response(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``APIHandler.generate_response(...) -> dict``; only whole answers hold a usage."""
    response = wrapped(*args, **kwargs)
    with shield("context_pilot", "answer"):
        _remember(response["choices"][0])
    return _tell(response)


def _remember(choice: dict[str, Any]) -> None:
    prompt = answered()
    if prompt is None or not is_on("context_pilot") or not prompt.asked.chat.messages:
        return
    prompt.answer.append(choice.get("message") or choice.get("delta") or {})
    if choice.get("finish_reason"):
        prompt.asked.chat.answered(lambda: prompt.answer)


def completion_usage_response(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``APIHandler.completion_usage_response(...) -> dict``, the usage chunk of a stream."""
    return _tell(wrapped(*args, **kwargs))


def _tell(response: dict[str, Any]) -> dict[str, Any]:
    with shield("ssd_cache", "usage"):
        prompt = answered()
        if "usage" in response and prompt is not None and prompt.outcome is not None:
            outcome, usage = prompt.outcome, response["usage"]
            usage["prompt_tokens_details"] = {"cached_tokens": outcome.cached_tokens}
            if is_on("context_pilot"):
                usage["context_pilot"] = prompt.asked.chat.told(outcome, len(prompt))
    return response
