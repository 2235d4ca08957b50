"""What belongs to one HTTP request, carried from the handler's thread to the generation thread and back.

The handler thread notes who asks; ``ResponseGenerator.generate`` puts that on the request object;
``_tokenize``, on the generation thread, turns the prompt into a `Prompt`, the object that the host
itself carries along (``GenerationContext.prompt``) until the usage is written.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from typing import Any

from ...patching.guard import shield
from ...pilot.boundaries import Boundaries
from ..arguments import named
from ..quantised import AnySequence
from ..runtime import runtime
from ..session import Hit
from .messages import boundaries

_local = threading.local()


@dataclass
class Asked:
    """What the HTTP request says beyond the host's own fields."""

    salt: str = ""
    body: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What became of a prompt's lookup: the figures of ``usage``."""

    cached_tokens: int = 0
    skip: str = "none"
    source: str | None = None


class Prompt(list[int]):
    """A prompt's tokens, as the host made them, with what we know of the request."""

    asked: Asked
    request: Any = None
    boundaries: Boundaries | None = None
    outcome: Outcome | None = None
    sequence: AnySequence | None = None
    hit: Hit | None = None
    """Set where the host was given a cache from the store for this prompt."""


def current() -> Prompt | None:
    """The prompt that this (generation) thread tokenised last."""
    return getattr(_local, "prompt", None)


def answered() -> Prompt | None:
    """The prompt whose answer this (handler) thread is writing."""
    return getattr(_local, "answered", None)


def note_http(headers: Any, body: Any) -> None:
    """Remember who asks, on the handler's thread, before the host handles the request."""
    _local.asked = Asked(_salt(headers), body if isinstance(body, dict) else {})


def _salt(headers: Any) -> str:
    chosen = runtime().settings.salt
    if chosen != "api-key":
        return chosen
    key = headers.get("Authorization") or headers.get("x-api-key") or ""
    return hashlib.sha256(key.encode()).hexdigest() if key else ""


def generate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``ResponseGenerator.generate``: handler thread, once a request."""
    with shield("ssd_cache", "asked"):
        request = named(wrapped, args, kwargs)["request"]
        request.thunder = getattr(_local, "asked", None) or Asked()
        _local.answered = None
    result = wrapped(*args, **kwargs)
    with shield("ssd_cache", "answered"):
        prompt = result[0].prompt
        _local.answered = prompt if isinstance(prompt, Prompt) else None
    return result


def tokenize(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``ResponseGenerator._tokenize``: generation thread, just before the cache lookup."""
    result = wrapped(*args, **kwargs)
    with shield("ssd_cache", "tokenise"):
        _local.prompt = None
        prompt = Prompt(result[0])
        given = named(wrapped, args, kwargs)
        request = given["request"]
        prompt.asked = getattr(request, "thunder", None) or Asked()
        prompt.request = request
        _local.prompt = prompt
        with shield("context_pilot", "boundaries"):
            prompt.boundaries = boundaries(
                instance, given["tokenizer"], request, given["args"], prompt
            )
        segments = [prompt if s is result[0] else s for s in result[1]]
        return (prompt, segments, *result[2:])
    return result
