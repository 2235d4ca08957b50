"""The routes that make, show and release contexts.

A context is made by running a request of one token through the server itself, on the handler's own
thread: it is queued, batched, prefilled and stored as every other one is.
"""

from __future__ import annotations

import copy
import io
import json
from typing import Any

from ...handoff.context import Context
from ...handoff.keeping import release
from ...handoff.names import owner_of
from ...handoff.refusal import Refused
from ...handoff.transfer import take_in
from ...observe.routes import Answer, as_json
from ...patching.guard import shield
from ..asked import salt_of
from ..handoff import FILE, Order, allow, as_file, shelf
from ..making import Making, Pending, build, pendings
from ..recents import recents
from ..runtime import runtime
from .routes import send

_MODEL_FIELDS = (
    "model",
    "adapters",
    "draft_model",
    "chat_template_kwargs",
    "tools",
    "role_mapping",
)
_MOST_BODY = 256 << 20


def do_post(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return _routed("POST", wrapped, instance, args, kwargs)


def do_get(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return _routed("GET", wrapped, instance, args, kwargs)


def do_delete(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``APIHandler.do_DELETE``, which the host does not have."""
    return _routed("DELETE", wrapped, instance, args, kwargs)


def _routed(method: str, wrapped: Any, handler: Any, args: Any, kwargs: Any) -> Any:
    path, _, query = handler.path.partition("?")
    parts = path.strip("/").split("/")
    if parts[0] != "thunder" or len(parts) > 3 or parts[1:2] not in (["handoff"], ["caches"]):
        if wrapped is None:
            return handler.send_error(501, f"Unsupported method ({method!r})")
        return wrapped(*args, **kwargs)
    answer: Answer | None = None
    with shield("contexts", "routes"):
        try:
            name = parts[2] if len(parts) == 3 else None
            found = _answer(handler, method, parts[1], name, query)
            answer = found if isinstance(found, Answer) else as_json(found)
        except Refused as error:
            answer = as_json(error.to_json(), error.status)
    return send(
        handler, answer or as_json({"error": "see the server's log", "reason": "fault"}, 500)
    )


def _answer(handler: Any, method: str, kind: str, name: str | None, query: str) -> Any:
    allow("handoff" if kind == "handoff" else "named_caches")
    owner = owner_of(salt_of(handler.headers))
    known = shelf().get if kind == "handoff" else shelf().named
    match method, kind, name:
        case "POST", "handoff", None:
            return _make(handler, _body(handler), None)
        case "GET", "caches", str() if query == "file":
            return as_file(shelf().named(name, owner))
        case "POST", "caches", str() if handler.headers.get("Content-Type") == FILE:
            return _take_in(handler, name)
        case "POST", "caches", str():
            return _make(handler, _body(handler), name)
        case "POST", "handoff", str():
            held = shelf().hold(known(name, owner), Order.holder_of(_body(handler)))
            return held.described()
        case "GET", "caches", None:
            return {"caches": [context.described() for context in shelf().names(owner)]}
        case "GET", "handoff", str() if pendings.get(name, owner) is not None:
            coming = pendings.get(name, owner)
            return coming.described() if coming is not None else known(name, owner).described()
        case "DELETE", "handoff", str() if pendings.get(name, owner) is not None:
            raise Refused(409, "pending", "this handoff is still being made")
        case "GET", _, str():
            return known(name, owner).described()
        case "DELETE", _, str():
            context = known(name, owner)
            holder = dict(p.partition("=")[::2] for p in query.split("&")).get("holder")
            return context.described() | {
                "released": release(runtime().store, shelf(), context, holder)
            }
    raise Refused(405, "method", f"{method} is not for this path")


def _take_in(handler: Any, name: str) -> Any:
    length = _length(handler, runtime().store.stats()["ssd"]["budget_bytes"])
    temporary = shelf().temporary()
    try:
        with temporary.open("xb") as out:
            while length and (data := handler.rfile.read(min(length, 1 << 20))):
                length -= out.write(data)
        taken = take_in(
            runtime().store, shelf(), temporary, salt=salt_of(handler.headers), name=name
        )
        return taken.described()
    finally:
        temporary.unlink(missing_ok=True)


def _length(handler: Any, most: int) -> int:
    length = handler.headers.get("Content-Length") or ""
    if not length.isdigit():
        raise Refused(411, "request", "expected a Content-Length")
    if int(length) > most:
        raise Refused(413, "request", f"expected at most {most} bytes, found {length}")
    return int(length)


def _body(handler: Any) -> dict[str, Any]:
    length = _length(handler, _MOST_BODY)
    try:
        body = json.loads(handler.rfile.read(length))
    except ValueError as error:
        raise Refused(400, "request", f"expected JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "request", "expected a JSON object")
    return body


def _make(handler: Any, body: dict[str, Any], name: str | None) -> Any:
    order = Order.of(body, name)
    if handler.response_generator._is_distributed:
        raise Refused(409, "distributed", "contexts are not supported over several ranks")
    salt = salt_of(handler.headers)
    owner = owner_of(salt)
    recent = recents.get(order.request, owner) if order.request is not None else None

    def finish(pending: Pending | None) -> Context:
        if recent is not None:
            making, source = Making.after(order, recent), recent.body
        else:
            said = {k: body[k] for k in ("messages", "prompt", "tools") if body.get(k) is not None}
            making, source = Making(order, said), body
        if pending is not None:
            making.id, making.coder = pending.id, pending.coder
        fields = {k: source[k] for k in _MODEL_FIELDS if source.get(k) is not None}
        said = {k: v for k, v in making.said.items() if k in ("messages", "prompt", "tools") and v}
        _run(handler, making, fields | said | {"max_tokens": 1, "temperature": 0})
        return build(making, salt)

    if order.wait:
        return finish(None).described()
    pending = pendings.add(order, owner)
    pending.begin(recent, finish)
    return as_json(pending.described(), 202)


def _run(handler: Any, making: Making, body: dict[str, Any]) -> None:
    """Let the server run the context as a request of one token; the answer is not sent to anyone.

    Raises:
        Refused: the server did not take it.
    """
    inner = copy.copy(handler)
    inner.thunder_making = making
    inner.path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    data = json.dumps(body).encode()
    inner.headers = copy.copy(handler.headers)
    del inner.headers["Content-Length"]
    inner.headers["Content-Length"] = str(len(data))
    inner.rfile, inner.wfile = io.BytesIO(data), io.BytesIO()
    try:
        inner.do_POST()
    except Exception as error:  # the host's own; what it can't run is no context
        raise Refused(500, "host", f"the server failed on the context: {error}"[:500]) from error
    head, _, text = inner.wfile.getvalue().partition(b"\r\n\r\n")
    if making.refusal is not None:
        raise making.refusal
    status = int(head.split(b" ", 2)[1])
    if status != 200:
        message = text.decode(errors="replace")[:500]
        raise Refused(status, "host", f"the server did not run the context: {message}")
