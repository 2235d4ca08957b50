"""A prompt that cannot fit in memory is refused before its answer begins."""

from __future__ import annotations

import sys
from typing import Any

from ...patching.guard import shield
from ...prefill.memory import PromptTooLarge
from ..arguments import named
from ..prefill import ANSWER_ROOM
from .engines import engine_named
from .requests import current


def validate_context_window(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``validate_context_window(num_prompt_tokens, model_id)``: every API form asks it first.

    Raises:
        HTTPException: 413, which the host writes in the form of the API that was called.
    """
    result = wrapped(*args, **kwargs)
    refusal: PromptTooLarge | None = None
    with shield("chunked_prefill", "admission"):
        given, http = named(wrapped, args, kwargs), current()
        engine = engine_named(given.get("model_id"))
        if http is not None and engine is not None and engine.prefill is not None:
            try:
                tokens = given["num_prompt_tokens"]
                http.reservation = engine.prefill.admit(tokens, ANSWER_ROOM)
            except PromptTooLarge as error:
                refusal = error
    if refusal is not None:
        raise sys.modules["omlx.server"].HTTPException(413, detail=str(refusal))
    return result
