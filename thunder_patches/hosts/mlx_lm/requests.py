"""What belongs to one HTTP request, carried from the handler's thread to the generation thread and back.

The handler thread notes who asks; ``ResponseGenerator.generate`` puts that on the request object;
``_tokenize``, on the generation thread, turns the prompt into a `Prompt`, the object that the host
itself carries along (``GenerationContext.prompt``) until the usage is written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ...patching.guard import is_on, shield
from ...prefill.memory import PromptTooLarge, Reservation
from ..arguments import named, replaced
from ..asked import options_of
from ..asked import salt_of as _salt
from ..counting import Outcome
from ..pilot import Chat, prepare
from ..quantised import AnySequence
from ..seeing import note, place_of
from ..session import Hit
from .load import loaded
from .messages import boundaries
from .signs import Signs

_local = threading.local()


@dataclass
class Asked:
    """What the HTTP request says beyond the host's own fields."""

    salt: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    """The body's ``thunder`` object."""
    chat: Chat = field(default_factory=Chat)

    def __reduce__(self) -> tuple[type[Asked], tuple[str, dict[str, Any]]]:
        """Only the first rank of a distributed server answers the client and tells of the chat."""
        return Asked, (self.salt, self.options)


class Prompt(list[int]):
    """A prompt's tokens, as the host made them, with what we know of the request."""

    asked: Asked
    request: Any = None
    outcome: Outcome | None = None
    sequence: AnySequence | None = None
    hit: Hit | None = None
    """Set where the host was given a cache from the store for this prompt."""
    given: Hit | None = None
    """What a context hands over in less than full precision, until the look-up takes it: from then on the
    caches are the host's alone. Nothing that is computed after it is kept."""
    reservation: Reservation | None = None

    def __init__(self, tokens: Iterable[int]) -> None:
        super().__init__(tokens)
        self.answer: list[Mapping[str, Any]] = []
        """Its pieces, as far as the client has them."""


def current() -> Prompt | None:
    """The prompt that this (generation) thread tokenised last."""
    return getattr(_local, "prompt", None)


def answered() -> Prompt | None:
    """The prompt whose answer this (handler) thread is writing."""
    return getattr(_local, "answered", None)


def note_http(handler: Any) -> None:
    """Remember who asks, on the handler's thread, before the host handles the request."""
    _local.handler = handler
    _local.answered = None
    _local.refused = False


def refused() -> bool:
    """Whether this (handler) thread's request was refused for its size; asked once."""
    was = getattr(_local, "refused", False)
    _local.refused = False
    return was


def generate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``ResponseGenerator.generate(request, generation_args, progress_callback)``: handler thread."""
    handler, signs = getattr(_local, "handler", None), None
    with shield("ssd_cache", "asked"):
        given = named(wrapped, args, kwargs)
        asked = Asked()
        if handler is not None:
            headers, body = handler.headers, getattr(handler, "body", None)
            asked = Asked(_salt(headers), options_of(body, headers))
        request = given["request"]
        if instance._is_distributed:
            _leave_here(request)
        if not instance._is_distributed or loaded.ranks is not None:
            request.thunder = asked
        if request.request_type == "chat":
            asked.chat, request.messages, request.tools = prepare(
                request.messages,
                request.tools,
                asked.options,
                given["generation_args"].chat_template_kwargs,
            )
        if handler is not None and handler.stream and is_on("progress"):
            signs = Signs(handler, given.get("progress_callback"), asked.options)
            args, kwargs = replaced(wrapped, args, kwargs, progress_callback=signs.saw)
    try:
        context, response = wrapped(*args, **kwargs)
    except PromptTooLarge:
        _local.refused = True
        raise
    with shield("ssd_cache", "answered"):
        if isinstance(context.prompt, Prompt):
            _local.answered = context.prompt
            if signs is not None:
                response = signs.around(response, context)
            response = _seen(response, context.prompt, handler)
    return context, response


def _seen(response: Iterator[Any], prompt: Prompt, handler: Any) -> Iterator[Any]:
    """The answer, noted among the last requests when its first token comes."""
    first = next(response, None)
    with shield("routes", "first token"):
        if prompt.outcome is not None and handler is not None:
            chat = prompt.asked.chat
            place = place_of(prompt.sequence, len(prompt), chat)
            note(prompt.outcome, handler.thunder_started, chat, place)
    if first is not None:
        yield first
        yield from response


def _leave_here(request: Any) -> None:
    """Drop what must not travel to the other ranks with the request."""
    for name in [name for name in vars(request) if name.startswith("thunder_")]:
        delattr(request, name)


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
            prompt.asked.chat.boundaries = boundaries(
                instance, given["tokenizer"], request, given["args"], prompt
            )
        segments = [prompt if s is result[0] else s for s in result[1]]
        result = (prompt, segments, *result[2:])
    if loaded.prefill is not None:
        _admit(instance, named(wrapped, args, kwargs)["args"], result[0])
    return result


def _admit(generator: Any, args: Any, prompt: Any) -> None:
    """Refuse a prompt that cannot fit, after the host's own cached prompts have made room.

    Raises:
        PromptTooLarge: the host hands it to the client.
    """
    prefill = loaded.prefill
    assert prefill is not None
    try:
        reservation = prefill.admit(len(prompt), args.max_tokens)
    except PromptTooLarge:
        generator.prompt_cache.trim_to(n_sequences=0)
        mx.clear_cache()
        reservation = prefill.admit(len(prompt), args.max_tokens)
    if isinstance(prompt, Prompt):
        prompt.reservation = reservation
