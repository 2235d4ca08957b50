"""What the client sees of it: ``usage.context_pilot`` in oMLX's answers.

The host builds ``Usage(prompt_tokens_details=PromptTokensDetails(cached_tokens=...), ...)`` in one
expression; the tokens carry what became of the lookup (`scheduler.CachedTokens`).
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from ...patching.guard import is_on, shield
from ..counting import Outcome
from ..pilot import Chat

_last: list[Outcome] = []


def prompt_tokens_details(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``PromptTokensDetails(cached_tokens=...)`` in ``omlx.server``."""
    with shield("context_pilot", "details"):
        _last.clear()
        outcome = getattr(kwargs.get("cached_tokens"), "outcome", None)
        if outcome is not None:
            _last.append(outcome)
            kwargs = {**kwargs, "cached_tokens": int(kwargs["cached_tokens"])}
    return wrapped(*args, **kwargs)


def usage(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``Usage(...)`` in ``omlx.server``."""
    with shield("context_pilot", "usage"):
        if _last and is_on("context_pilot") and _opened():
            told = Chat().told(_last.pop(), int(kwargs.get("prompt_tokens") or 0))
            kwargs = {**kwargs, "context_pilot": told}
    return wrapped(*args, **kwargs)


@cache
def _opened() -> bool:
    """Let the host's ``Usage`` keep a field it does not know, and its containers write it."""
    models = sys.modules["omlx.api.openai_models"]
    models.Usage.model_config["extra"] = "allow"
    models.Usage.model_rebuild(force=True)
    for name in ("ChatCompletionResponse", "ChatCompletionChunk", "CompletionResponse"):
        if hasattr(models, name):
            getattr(models, name).model_rebuild(force=True)
    return True
