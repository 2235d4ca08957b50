"""Requests that go on from a context, and the routes that make, show and release contexts.

A context is made by running a request of one token through the server itself, on the handler's own
thread: it is queued, batched, prefilled and stored as every other one is.
"""

from __future__ import annotations

import copy
import io
import json
import threading
from typing import Any

from ...handoff.context import Context
from ...handoff.keeping import release
from ...handoff.names import owner_of
from ...handoff.refusal import Refused
from ...handoff.transfer import export, take_in
from ...observe.routes import Answer, as_json
from ...patching.guard import shield
from ...pilot.boundaries import unknown
from ..arguments import named, replaced
from ..handoff import (
    Making,
    Order,
    Pending,
    Recent,
    Use,
    Wanted,
    allow,
    build,
    fed,
    pendings,
    recents,
    shelf,
)
from ..joining import Template
from ..runtime import runtime
from .host_cache import keep_out
from .load import loaded
from .messages import follower, renderer
from .requests import Prompt, current
from .requests import _options as options_of
from .requests import _salt as salt_of
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
FILE = "application/octet-stream"


# A request on its way: handler's thread, generation thread, lookup, answer


def handle_completion(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``APIHandler.handle_completion(request, stop_words)``: put the context's messages before its own."""
    instance.thunder_use = None
    if instance.response_generator._is_distributed and not _asks(instance):
        return wrapped(*args, **kwargs)
    recent = None
    refusal: Refused | None = None
    with shield("contexts", "start") as guarded:
        request = named(wrapped, args, kwargs)["request"]
        request.thunder_making = getattr(instance, "thunder_making", None)
        try:
            if request.thunder_making is None:
                recent = _noted(instance, request)
                instance.thunder_use = request.thunder_use = _use(instance, request)
        except Refused as error:
            refusal = error
    if guarded.failed and _asks(instance):
        refusal = Refused(500, "fault", "the context could not be used; see the server's log")
    try:
        if refusal is not None:
            return send(instance, as_json(refusal.to_json(), refusal.status))
        return wrapped(*args, **kwargs)
    finally:
        if recent is not None:
            recent.done.set()


def _asks(handler: Any) -> bool:
    options = options_of(handler)
    return options.get("handoff") is not None or options.get("cache") is not None


def _noted(handler: Any, request: Any) -> Recent:
    """Remember the request, for a context that may be made of it."""
    if request.request_type == "chat":
        said = {"messages": copy.deepcopy(request.messages), "tools": request.tools}
    else:
        said = {"prompt": request.prompt}
    recent = Recent(said, handler.body, owner_of(salt_of(handler.headers)))
    request.thunder_recent = recent
    recents.add(handler.request_id, recent)
    return recent


def _use(handler: Any, request: Any) -> Use | None:
    """What the request goes on from.

    Raises:
        Refused: nothing may be used, and there is no text in its place.
    """
    wanted = Wanted.of(options_of(handler))
    if wanted is None:
        return None
    chat = request.request_type == "chat"
    use = Use(wanted, request.messages if chat else request.prompt)
    try:
        if handler.response_generator._is_distributed:
            raise Refused(409, "distributed", "contexts are not supported over several ranks")
        use.context = wanted.find(salt_of(handler.headers))
        use.check_form(chat)
    except Refused as error:
        use.refuse(error)
    _put(use, request)
    request.thunder_recent.said = _said(request)
    return use


def _put(use: Use, request: Any) -> None:
    if request.request_type == "chat":
        request.messages = use.messages()
        if request.tools is None and use.context is not None:
            request.tools = use.context.said.get("tools")
    else:
        request.prompt = use.prompt()


def _said(request: Any) -> dict[str, Any]:
    if request.request_type == "chat":
        return {"messages": copy.deepcopy(request.messages), "tools": request.tools}
    return {"prompt": request.prompt}


def tokenize(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``ResponseGenerator._tokenize``: generation thread; the context's own tokens come first.

    Raises:
        Refused: the loaded model can't go on from it; the host hands that to the client.
    """
    given = named(wrapped, args, kwargs)
    request = given["request"]
    making: Making | None = getattr(request, "thunder_making", None)
    use: Use | None = getattr(request, "thunder_use", None)
    if making is None and use is None:
        return wrapped(*args, **kwargs)
    if use is not None:
        try:
            use.check(loaded.session, model_name())
        except Refused as error:
            use.refuse(error)
            _put(use, request)
    result = wrapped(*args, **kwargs)
    template = _template(instance, given) if request.request_type == "chat" else None
    rendered, encode = result[0], given["tokenizer"].encode
    try:
        if use is not None:
            ids = use.tokenised(
                template, list(rendered), lambda t: encode(t, add_special_tokens=False)
            )
            if loaded.session is not None and isinstance(rendered, Prompt):
                rendered.given = use.restored(loaded.session, ids)
        else:
            assert making is not None
            if loaded.session is None:
                raise Refused(409, "model", f"{model_name()} is not cached: {loaded.reason}")
            making.model_name = model_name()
            ids = fed(loaded.session, making.tokenised(template, list(rendered)))
    except Refused as error:
        (use or making).refusal = error  # type: ignore[union-attr]
        raise
    if ids == list(rendered):
        return result
    rendered[:] = ids
    if isinstance(rendered, Prompt):
        chat = rendered.asked.chat
        chat.boundaries = unknown("goes on token by token", len(chat.messages), len(ids))
    return (rendered, [rendered], ["assistant"], *result[3:])


def model_name() -> str:
    """What the server calls the loaded model and its adapter."""
    if loaded.key is None:
        return "no model"
    path, adapter, draft = loaded.key
    extras = [
        f"{kind} {value}" for kind, value in (("adapter", adapter), ("draft", draft)) if value
    ]
    return " with ".join([str(path), *extras])


def _template(generator: Any, given: dict[str, Any]) -> Template:
    tokenizer = given["tokenizer"]
    if not tokenizer.has_chat_template:
        raise Refused(422, "template", "this model has no chat template")
    return Template(
        render=renderer(generator, tokenizer, given["args"]),
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        follower=follower(tokenizer),
        stops=frozenset(tokenizer.eos_token_ids),
        think_end=(getattr(tokenizer, "think_end", None) or "") if tokenizer.has_thinking else "",
    )


def fetch_nearest_cache(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``fetch_nearest_cache(model, tokens)``: what is stored of this prompt, and what is noted."""
    result = wrapped(*args, **kwargs)
    with shield("contexts", "lookup"):
        prompt = current()
        if prompt is not None and prompt.request is not None:
            _follow(prompt)
    return result


def _follow(prompt: Prompt) -> None:
    request, sequence = prompt.request, prompt.sequence
    making: Making | None = getattr(request, "thunder_making", None)
    recent: Recent | None = getattr(request, "thunder_recent", None)
    if making is not None:
        making.sequence = sequence
        if sequence is not None:
            sequence.boundaries = (len(making.ids),)
            sequence.keep = len(making.ids)
    if recent is not None:
        recent.sequence, recent.prompt_tokens = sequence, len(prompt)
        if prompt.asked.options.get("keep") is False:
            keep_out(list(prompt))
            if sequence is not None:
                sequence.keep = 0


def set_completion_headers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``APIHandler._set_completion_headers(status_code)``: the status of a refusal, not the host's 404."""
    with shield("contexts", "status"):
        asked = getattr(instance, "thunder_making", None) or getattr(instance, "thunder_use", None)
        refusal: Refused | None = asked.stopped if asked is not None else None
        if refusal and named(wrapped, args, kwargs).get("status_code", 200) >= 400:
            args, kwargs = replaced(wrapped, args, kwargs, status_code=refusal.status)
    return wrapped(*args, **kwargs)


def generate_response(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``APIHandler.generate_response(...) -> dict``: a whole answer, or a stream's last chunk, tells of it."""
    response = wrapped(*args, **kwargs)
    with shield("contexts", "told"):
        use: Use | None = getattr(instance, "thunder_use", None)
        if use is not None and response["choices"][0]["finish_reason"] is not None:
            response["thunder"] = use.told()
    return response


# Routes


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
            return _file(shelf().named(name, owner))
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


def _file(context: Context) -> Answer:
    """A named cache as a file; see `handoff.parcel`."""
    temporary = shelf().temporary()
    try:
        export(runtime().store, context, temporary)
        named_ = f'attachment; filename="{context.id}.safetensors"'
        return Answer(200, FILE, temporary.read_bytes(), (("Content-Disposition", named_),))
    finally:
        temporary.unlink(missing_ok=True)


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
    work = threading.Thread(target=_later, args=(pending, recent, finish), daemon=True)
    work.start()
    return as_json(pending.described(), 202)


def _later(pending: Pending, recent: Recent | None, finish: Any) -> None:
    with shield("contexts", "pending") as guarded:
        pending.make(recent, finish)
    if guarded.failed:
        pending.refusal = Refused(
            500, "fault", "the handoff could not be made; see the server's log"
        )


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
    inner.do_POST()
    head, _, text = inner.wfile.getvalue().partition(b"\r\n\r\n")
    if making.refusal is not None:
        raise making.refusal
    status = int(head.split(b" ", 2)[1])
    if status != 200:
        message = text.decode(errors="replace")[:500]
        raise Refused(status, "host", f"the server did not run the context: {message}")
