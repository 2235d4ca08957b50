"""Contexts under oMLX: requests that go on from one, and the routes that make, show and release them.

All of it happens before the host sees a request: its messages are put after the context's own, so that
what the host answers is one long conversation, and the look-up finds what is stored of it. A context is
made by sending a request of one token through the host itself. Contexts here are exact.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers

from ...handoff.keeping import release
from ...handoff.names import new_id, owner_of
from ...handoff.refusal import Refused
from ...observe.routes import Answer, as_json
from ...patching.guard import shield
from ..arguments import named
from ..asked import salt_of
from ..handoff import Order, allow, shelf
from ..making import Making, build
from ..recents import Recent, recents
from ..runtime import runtime
from ..using import Use, Wanted
from .engines import Engine, engine_named
from .requests import Http
from .routes import refused_by_host, send_answer

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CHAT = "/v1/chat/completions"
USED = "x-thunder-context"
"""Header of a response: the JSON of how the context was used."""
_FIELDS = ("model", "tools", "chat_template_kwargs")
_makings: dict[str, Making] = {}


def asgi(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``DebugRequestLoggingMiddleware.__call__(scope, receive, send)``."""
    serve: Awaitable[None] | None = None
    with shield("contexts", "request"):
        given = named(wrapped, args, kwargs)
        scope, receive, send = given["scope"], given["receive"], given["send"]
        if scope["type"] == "http":
            parts = scope["path"].strip("/").split("/")
            if parts[0] == "thunder" and parts[1:2] in (["handoff"], ["caches"]):
                serve = _route(wrapped, scope, receive, send, parts[1:])
            elif scope["method"] == "POST" and scope["path"] == CHAT:
                serve = _chat(wrapped, scope, receive, send)
    return serve if serve is not None else wrapped(*args, **kwargs)


# A request on its way


async def _chat(host: App, scope: Scope, receive: Receive, send: Send) -> None:
    body = await _whole(receive)
    use: Use | None = None
    refusal: Refused | None = None
    told: _Told | None = None
    with shield("contexts", "start") as guarded:
        said = _parsed(body)
        if isinstance(said, dict) and isinstance(said.get("messages"), list):
            salt = salt_of(Headers(scope=scope))
            try:
                use = await _use(host, scope, said, salt)
                if use is not None:
                    body = json.dumps(said).encode()
                told = _Told(send, said, salt, use)
            except Refused as error:
                refusal = error
    if guarded.failed and b'"handoff"' in body:
        refusal = Refused(500, "fault", "the context could not be used; see the server's log")
    if refusal is not None:
        await send_answer(send, as_json(refusal.to_json(), refusal.status))
        return
    try:
        await host(_sized(scope, body), _again(body, receive), told.send if told else send)
    finally:
        if told is not None:
            told.recent.done.set()


async def _use(host: App, scope: Scope, said: dict[str, Any], salt: str) -> Use | None:
    """What a request goes on from; its messages are then put after the context's, in place.

    Raises:
        Refused: nothing may be used, and there is no text in its place.
    """
    options = said.get("thunder")
    wanted = Wanted.of(options if isinstance(options, dict) else {})
    if wanted is None:
        return None
    use = Use(wanted, said["messages"])
    use.check_after(chat=True)
    try:
        use.context = await asyncio.to_thread(wanted.find, salt)
        use.check_form(chat=True)
        if use.context.payload is not None:
            raise Refused(409, "precision", "contexts under oMLX are exact")
        engine = await _engine(host, scope, said.get("model"))
        use.check(engine.session if engine is not None else None, str(said.get("model")))
    except Refused as error:
        use.refuse(error)
    if use.context is not None:
        use.beginning = "conversation"
        if said.get("tools") is None and use.context.said.get("tools"):
            said["tools"] = use.context.said["tools"]
    said["messages"] = use.messages()
    return use


async def _engine(host: App, scope: Scope, model: Any) -> Engine | None:
    """The engine of a model, which is loaded first if it isn't."""
    if (engine := engine_named(model)) is None:
        hello = {"model": model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        await _inner(host, scope, hello)
        engine = engine_named(model)
    return engine


class _Told:
    """The response on its way to the client: what it was goes among the recent ones."""

    def __init__(self, send: Send, said: dict[str, Any], salt: str, use: Use | None) -> None:
        self._send = send
        self._use = use
        self._lines = b""
        self._id, self._text, self._thought = "", "", False
        chat = {"messages": said["messages"], "tools": said.get("tools")}
        self.recent = Recent(chat, said, owner_of(salt))

    async def send(self, message: dict[str, Any]) -> None:
        with shield("contexts", "told"):
            if message["type"] == "http.response.start" and self._use is not None:
                header = (USED.encode(), json.dumps(self._use.told()).encode("latin-1"))
                message = message | {"headers": [*message.get("headers", ()), header]}
            elif message["type"] == "http.response.body":
                self._hear(message)
        await self._send(message)

    def _hear(self, message: dict[str, Any]) -> None:
        self._lines += message.get("body", b"")
        if self._lines.startswith(b"{") and message.get("more_body"):
            return
        *lines, self._lines = self._lines.split(b"\n")
        for line in [*lines, *([] if message.get("more_body") else [self._lines])]:
            text = line.removeprefix(b"data: ").strip()
            if text.startswith(b"{"):
                self._note(json.loads(text))

    def _note(self, event: dict[str, Any]) -> None:
        if not self._id and event.get("id"):
            self._id = str(event["id"])
            recents.add(self._id, self.recent)
        for choice in event.get("choices") or ():
            part = choice.get("message") or choice.get("delta") or {}
            self._text += part.get("content") or ""
            self._thought |= bool(part.get("reasoning_content") or part.get("reasoning"))
            if choice.get("finish_reason"):
                self.recent.text, self.recent.thought = self._text, self._thought


# Routes


async def _route(host: App, scope: Scope, receive: Receive, send: Send, parts: list[str]) -> None:
    answer = await refused_by_host(scope, receive)
    with shield("contexts", "routes"):
        if answer is None:
            try:
                found = await _answer(host, scope, receive, parts[0], "/".join(parts[1:]) or None)
                answer = found if isinstance(found, Answer) else as_json(found)
            except Refused as error:
                answer = as_json(error.to_json(), error.status)
    fault = {"error": "see the server's log", "reason": "fault"}
    await send_answer(send, answer or as_json(fault, 500))


async def _answer(host: App, scope: Scope, receive: Receive, kind: str, name: str | None) -> Any:
    allow("handoff" if kind == "handoff" else "named_caches")
    salt = salt_of(Headers(scope=scope))
    owner = owner_of(salt)
    known = shelf().get if kind == "handoff" else shelf().named
    query = scope.get("query_string", b"").decode("latin-1")
    match scope["method"], kind, name:
        case "POST", "handoff", None:
            return await _make(host, scope, await _object(receive), salt, None)
        case "POST", "caches", str():
            return await _make(host, scope, await _object(receive), salt, name)
        case "POST", "handoff", str():
            holder = Order.holder_of(await _object(receive))
            return shelf().hold(known(name, owner), holder).described()
        case "GET", "caches", None:
            return {"caches": [context.described() for context in shelf().names(owner)]}
        case "GET", _, str():
            return known(name, owner).described()
        case "DELETE", _, str():
            context = known(name, owner)
            holder_ = dict(p.partition("=")[::2] for p in query.split("&")).get("holder")
            gone = release(runtime().store, shelf(), context, holder_)
            return context.described() | {"released": gone}
    raise Refused(405, "method", f"{scope['method']} is not for this path")


async def _make(host: App, scope: Scope, body: dict[str, Any], salt: str, name: str | None) -> Any:
    order = Order.of(body, name)
    if order.precision != "exact" or body.get("prompt") is not None or not order.wait:
        raise Refused(409, "precision", "under oMLX a context is exact, of a chat, and waited for")
    source = body
    said = {"messages": body.get("messages"), "tools": body.get("tools")}
    if order.request is not None:
        recent = recents.get(order.request, owner_of(salt))
        source, said = recent.body, await asyncio.to_thread(_said, order, recent)
    making, secret = Making(order, said, model_name=str(source.get("model"))), new_id()
    _makings[secret] = making
    try:
        fields = {k: source[k] for k in _FIELDS if source.get(k) is not None}
        request = fields | {k: v for k, v in said.items() if v}
        request |= {"max_tokens": 1, "temperature": 0, "thunder": {"making": secret}}
        status, text = await _inner(host, scope, request)
    finally:
        del _makings[secret]
    if making.refusal is not None:
        raise making.refusal
    if status != 200:
        raise Refused(status, "host", f"the server did not run the context: {text[:500]}")
    context = await asyncio.to_thread(build, making, salt)
    return context.described()


def _said(order: Order, recent: Recent) -> dict[str, Any]:
    """The chat of an earlier request, with its answer as a message."""
    if not order.answer:
        return recent.said
    if not recent.done.wait(60) or recent.text is None:
        raise Refused(409, "answer", f"request {order.request} was not answered in full")
    if recent.thought and order.thinking == "keep":
        raise Refused(422, "thinking", "oMLX keeps thinking apart: expected 'thinking': 'cut'")
    answer = {"role": "assistant", "content": recent.text}
    return recent.said | {"messages": [*recent.said["messages"], answer]}


def follow(http: Http, engine: Engine, sequence: Any, tokens: Any) -> None:
    """On the engine's thread, before the look-up: what a context in the making is to hold."""
    making = _makings.get(http.options.get("making", ""))
    if making is None:
        return
    ends = http.chat.boundaries.ends if http.chat.boundaries is not None else (None,)
    end = ends[-1] if ends else None
    if end is None:
        making.refusal = Refused(422, "template", "where these messages end is unknown")
        return
    making.ids, making.sequence = [int(t) for t in tokens[:end]], sequence
    if not engine.session or not engine.session.cuttable:
        sequence.boundaries, sequence.keep = (end,), end


# The host, asked by us


async def _inner(host: App, scope: Scope, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text of the host's answer to a chat request of ours."""
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

    ours = _sized(scope, data) | {"path": CHAT, "raw_path": CHAT.encode(), "method": "POST"}
    ours["query_string"] = b""
    await host(ours, _again(data, forever), send)
    return status, found.decode(errors="replace")


async def _whole(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return bytes(body)
        body.extend(message.get("body", b""))
        if not message.get("more_body"):
            return bytes(body)


def _parsed(body: bytes) -> Any:
    """The JSON of a body; None for what the host will refuse by itself."""
    try:
        return json.loads(body)
    except ValueError:
        return None


async def _object(receive: Receive) -> dict[str, Any]:
    body = _parsed(await _whole(receive))
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
