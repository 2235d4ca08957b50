"""``ResponseGenerator._next_request``: the generation thread asks for work, and has none."""

from __future__ import annotations

from functools import cache
from typing import Any

from ...patching.guard import is_on, shield
from ..learning import Learner
from ..runtime import runtime
from ..session import Session
from .load import loaded


def next_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``_next_request(timeout=None) -> request or None``; asked ten times a second when idle."""
    found = wrapped(*args, **kwargs)
    if found is None and is_on("learning"):
        with shield("learning", "step"):
            # Ranks would have to take each step together; quantised rows are never coded again.
            if type(loaded.session) is Session and not instance._is_distributed:
                _learner().step(loaded.session, loaded.model)
    return found


@cache
def _learner() -> Learner:
    return Learner(runtime())
