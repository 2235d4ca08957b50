"""One HTTP request, from its headers to its usage.

A context variable carries it through the host's own tasks, which copy their context; the engine's
thread, which has none, finds it by the request id that the engine was given.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers

from ...patching.guard import is_on, shield
from ...prefill.memory import Reservation
from ...prefill.progress import Progress
from ..arguments import named, replaced
from ..asked import Asked, options_of, salt_of
from ..counting import Outcome
from ..steps import Prefilling
from .answers import READERS
from .signs import Send, Signs

Receive = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(eq=False)
class Http(Asked):
    """What belongs to one HTTP request."""

    headers: Headers = field(default_factory=lambda: Headers({}))
    path: str = ""
    started: float = field(default_factory=time.perf_counter)
    outcomes: list[Outcome] = field(default_factory=list)
    """One for each prompt of the request; completions may have several."""
    prompt: Prepared | None = None
    progress: Progress | None = None
    prefilling: Prefilling | None = None
    """What is being prefilled; its position is the progress."""
    reservation: Reservation | None = None

    def outcome(self, cached: int) -> Outcome:
        """What became of the prompts together; of those that were the host's alone, its figure."""
        if not self.outcomes:
            return Outcome(cached, "none", "host" if cached else None)
        if len(self.outcomes) == 1:
            return self.outcomes[0]
        skips = {outcome.skip for outcome in self.outcomes}
        skip = skips.pop() if len(skips) == 1 else "none"
        sources = [outcome.source for outcome in self.outcomes if outcome.source]
        return Outcome(cached, skip, sources[-1] if sources else None)

    def listening(self, receive: Receive) -> Receive:
        """In the place of ``receive``: the body's own ``thunder`` object is noted on the way."""
        body = bytearray()

        async def heard() -> dict[str, Any]:
            message = await receive()
            with shield("ssd_cache", "body"):
                if message["type"] == "http.request":
                    body.extend(message.get("body", b""))
                    if not message.get("more_body"):
                        self._read(bytes(body))
                        body.clear()
            return message

        return heard

    def telling(self, send: Send) -> Send:
        """In the place of ``send``: an answer that the client has in full is remembered."""
        read = READERS.get(self.path)
        if read is None or not is_on("context_pilot"):
            return send
        body = bytearray()

        async def told(message: dict[str, Any]) -> None:
            # Before it is sent: the next turn may come at once.
            with shield("context_pilot", "answer"):
                if message["type"] == "http.response.body":
                    body.extend(message.get("body", b""))
                    if not message.get("more_body"):
                        self.chat.answered(partial(read, bytes(body)))
            await send(message)

        return told

    def _read(self, body: bytes) -> None:
        told = json.loads(body) if b'"thunder"' in body else None
        self.options = options_of(told, self.headers)


@dataclass
class Prepared:
    """A chat's messages and tools, as the host made them and as its template gets them."""

    given: tuple[Any, Any]
    messages: Any
    tools: Any
    variables: dict[str, Any]
    """The template's further variables."""


_current: ContextVar[Http | None] = ContextVar("thunder_http", default=None)
_by_id: weakref.WeakValueDictionary[str, Http] = weakref.WeakValueDictionary()


def current() -> Http | None:
    """The HTTP request that this task belongs to."""
    return _current.get()


def asked_for(request_id: str) -> Http:
    """The HTTP request that an engine's request belongs to; one without wishes if there is none."""
    return _by_id.get(request_id) or Http()


def asgi(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``DebugRequestLoggingMiddleware.__call__(scope, receive, send)``: where every request comes by."""
    http: Http | None = None
    signs: Signs | None = None
    with shield("ssd_cache", "request"):
        given = named(wrapped, args, kwargs)
        scope = given["scope"]
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = Headers(scope=scope)
            http = Http(salt=salt_of(headers), headers=headers, path=scope["path"])
            signs = Signs(http, given["send"])
            receive = http.listening(given["receive"])
            send = http.telling(signs.send)
            args, kwargs = replaced(wrapped, args, kwargs, receive=receive, send=send)
    if http is None or signs is None:
        return wrapped(*args, **kwargs)
    return _within(http, signs, wrapped(*args, **kwargs))


async def _within(http: Http, signs: Signs, answer: Awaitable[None]) -> None:
    _current.set(http)
    try:
        await answer
    finally:
        signs.stop()


def add_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``EngineCore.add_request(prompt, sampling_params, request_id, ...)``: in the request's context."""
    with shield("ssd_cache", "asked"):
        http = current()
        if http is not None:
            request_id = named(wrapped, args, kwargs).get("request_id") or str(uuid4())
            args, kwargs = replaced(wrapped, args, kwargs, request_id=request_id)
            _by_id[request_id] = http
    return wrapped(*args, **kwargs)
