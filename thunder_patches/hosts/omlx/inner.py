"""Bodies of ASGI requests, and requests of our own to the host."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ...handoff.refusal import Refused
from .forms import CHAT, TEXT
from .handed import Handed, handed

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
T = TypeVar("T")

_THREADS = 256
"""Who waits for a context holds a thread; the host's own executor must never be full of them."""

_apart = ThreadPoolExecutor(_THREADS, thread_name_prefix="thunder-context")


async def apart(work: Callable[..., T], *args: Any) -> T:
    """Let a thread of ours do what blocks."""
    return await asyncio.get_running_loop().run_in_executor(_apart, work, *args)


async def serve(
    host: App, scope: Scope, body: bytes, receive: Receive, send: Send, what: Handed
) -> None:
    """Let the host serve a request with this body, which has to do with contexts."""
    token = handed.set(what)
    try:
        await host(_sized(scope, body), _again(body, receive), send)
    finally:
        handed.reset(token)


async def ask(host: App, scope: Scope, body: dict[str, Any], what: Handed) -> tuple[int, str]:
    """Status and text of the host's answer to a request of ours, asked as the client of ``scope``."""
    data, found, status = json.dumps(body | {"stream": False}).encode(), bytearray(), 500

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            found.extend(message.get("body", b""))

    async def forever() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    path = (TEXT if "prompt" in body else CHAT).path
    ours = scope | {"path": path, "raw_path": path.encode(), "method": "POST", "query_string": b""}
    await serve(host, ours, data, forever, send, what)
    return status, found.decode(errors="replace")


async def whole(receive: Receive) -> bytes:
    """A request's body."""
    return b"".join([part async for part in pieces(receive)])


async def pieces(receive: Receive) -> AsyncIterator[bytes]:
    """A request's body, as it comes."""
    while (message := await receive())["type"] == "http.request":
        yield message.get("body", b"")
        if not message.get("more_body"):
            return


def parsed(body: bytes) -> Any:
    """The JSON of a body; None for what the host will refuse by itself."""
    try:
        return json.loads(body)
    except ValueError:
        return None


async def object_of(receive: Receive) -> dict[str, Any]:
    """A request's body, which is to be a JSON object.

    Raises:
        Refused: 400.
    """
    body = parsed(await whole(receive))
    if not isinstance(body, dict):
        raise Refused(400, "request", "expected a JSON object")
    return body


def _again(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that brings this body first."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> dict[str, Any]:
        return waiting.pop() if waiting else await receive()

    return next_message


def _sized(scope: Scope, body: bytes) -> Scope:
    headers = [(k, v) for k, v in scope["headers"] if k not in (b"content-length", b"content-type")]
    headers += [
        (b"content-length", str(len(body)).encode()),
        (b"content-type", b"application/json"),
    ]
    return scope | {"headers": headers}
