"""The routes that make, show and release contexts under oMLX.

A context is made by sending a request of one token through the host itself: it is queued, batched, prefilled
and stored as every other one is.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import Any

from starlette.datastructures import Headers

from ...handoff.context import Context
from ...handoff.keeping import release
from ...handoff.names import owner_of
from ...handoff.refusal import Refused
from ...handoff.transfer import take_in
from ...observe.routes import Answer, as_json
from ...patching.guard import shield
from ..asked import salt_of
from ..handoff import FILE, Order, allow, as_file, shelf
from ..making import ANSWER_SECONDS, Making, Pending, build, pendings
from ..recents import Recent, recents
from ..runtime import runtime
from .forms import CHAT, TEXT
from .handed import Handed
from .inner import App, Receive, Scope, Send, apart, ask, object_of, pieces
from .routes import refused_by_host, send_answer

_FIELDS = ("model", "tools", "chat_template_kwargs", "reasoning_effort")


async def route(host: App, scope: Scope, receive: Receive, send: Send, parts: list[str]) -> None:
    """Answer ``/thunder/handoff`` or ``/thunder/caches``; ``parts``: the path after ``/thunder``."""
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
    headers = Headers(scope=scope)
    salt = salt_of(headers)
    owner = owner_of(salt)
    known = shelf().get if kind == "handoff" else shelf().named
    coming = pendings.get(name, owner) if kind == "handoff" else None
    query = scope.get("query_string", b"").decode("latin-1")
    match scope["method"], kind, name:
        case "POST", "handoff", None:
            return await _make(host, scope, await object_of(receive), salt, None)
        case "GET", "caches", str() if query == "file":
            return await apart(as_file, known(name, owner))
        case "POST", "caches", str() if headers.get("content-type") == FILE:
            return await _take_in(receive, salt, name)
        case "POST", "caches", str():
            return await _make(host, scope, await object_of(receive), salt, name)
        case "POST", "handoff", str():
            holder = Order.holder_of(await object_of(receive))
            return shelf().hold(known(name, owner), holder).described()
        case "GET", "caches", None:
            return {"caches": [context.described() for context in shelf().names(owner)]}
        case "GET", _, str():
            return coming.described() if coming is not None else known(name, owner).described()
        case "DELETE", _, str():
            if coming is not None:
                raise Refused(409, "pending", "this handoff is still being made")
            context = known(name, owner)
            holder_ = dict(p.partition("=")[::2] for p in query.split("&")).get("holder")
            gone = release(runtime().store, shelf(), context, holder_)
            return context.described() | {"released": gone}
    raise Refused(405, "method", f"{scope['method']} is not for this path")


async def _take_in(receive: Receive, salt: str, name: str) -> dict[str, Any]:
    """Keep what an exported file holds.

    Raises:
        Refused: 413 for more than the cache may hold; see `take_in`.
    """
    most, size = runtime().store.stats()["ssd"]["budget_bytes"], 0
    temporary = shelf().temporary()
    try:
        with temporary.open("xb") as out:
            async for part in pieces(receive):
                size += len(part)
                if size > most:
                    raise Refused(413, "request", f"expected at most {most} bytes, found more")
                await apart(out.write, part)
        taken = await apart(
            partial(take_in, runtime().store, shelf(), temporary, salt=salt, name=name)
        )
        return taken.described()
    finally:
        temporary.unlink(missing_ok=True)


async def _make(host: App, scope: Scope, body: dict[str, Any], salt: str, name: str | None) -> Any:
    order, owner = Order.of(body, name), owner_of(salt)
    recent = recents.get(order.request, owner) if order.request is not None else None

    async def run(making: Making) -> None:
        source = recent.body if recent is not None else body
        if source.get("model") is None:  # the command tells none
            source = source | {"model": sys.modules["omlx.server"]._server_state.default_model}
        making.model_name = str(source.get("model"))
        fields = {k: source[k] for k in _FIELDS if source.get(k) is not None}
        said = {k: v for k, v in making.said.items() if k in ("messages", "prompt", "tools") and v}
        request = fields | said | {"max_tokens": 1, "temperature": 0}
        status, text = await ask(
            host, scope, request, Handed(TEXT if "prompt" in request else CHAT, making=making)
        )
        if making.refusal is not None:
            raise making.refusal
        if status != 200 or not making.ids:
            status = status if status != 200 else 500
            raise Refused(status, "host", f"the server did not run the context: {text[:500]}")

    if order.wait:
        making = await apart(_begun, order, recent, body, None)
        await run(making)
        return (await apart(build, making, salt)).described()
    loop = asyncio.get_running_loop()

    def finish(pending: Pending) -> Context:
        making = _begun(order, recent, body, pending)
        asyncio.run_coroutine_threadsafe(run(making), loop).result()
        return build(making, salt)

    pending = pendings.add(order, owner)
    pending.begin(recent, finish)
    return as_json(pending.described(), 202)


def _begun(
    order: Order, recent: Recent | None, body: dict[str, Any], pending: Pending | None
) -> Making:
    """What is to be made; of an earlier request once its answer is there.

    Raises:
        Refused: 409 or 422, its answer can't be part of it.
    """
    if recent is not None:
        making = _after(order, recent)
    else:
        said = {k: body[k] for k in ("messages", "prompt", "tools") if body.get(k) is not None}
        making = Making(order, said)
    if pending is not None:
        making.id, making.coder = pending.id, pending.coder
    return making


def _after(order: Order, recent: Recent) -> Making:
    """As `Making.after`, but in the host's own words where the answer's tokens aren't wanted or known.

    They are unknown where the host ended the answer by itself, at a stop string.
    """
    if not recent.said:
        raise Refused(409, "model", f"request {order.request} was not of text alone")
    if not order.answer:
        return Making(order, recent.said)
    if not recent.done.wait(ANSWER_SECONDS):
        raise Refused(409, "running", f"request {order.request} has no answer yet")
    known, chat = len(recent.tokens()) > recent.prompt_tokens, "messages" in recent.said
    if known and not (chat and order.thinking == "cut"):
        return Making.after(order, recent)
    if recent.text is None:
        raise Refused(409, "answer", f"request {order.request} was not answered in full")
    if not chat:
        return Making(order, {"prompt": recent.said["prompt"] + recent.text})
    if recent.thought and order.thinking == "keep":
        raise Refused(
            422, "thinking", "this answer's tokens are unknown: expected 'thinking': 'cut'"
        )
    answer = {"role": "assistant", "content": recent.text}
    return Making(order, recent.said | {"messages": [*recent.said["messages"], answer]})
