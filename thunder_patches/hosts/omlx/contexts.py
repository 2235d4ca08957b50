"""Requests under oMLX that go on from a context: body, tokens, look-up, answer.

The context's messages (or its prompt) are put before the request's own before the host sees it, or, in a form
with other words, before the host renders it; so that the host's checks and its usage are those of the whole.
Its tokens are settled where the host validates the prompt's length: every form of request comes by there, and
a refusal can still have its own status.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable
from typing import Any
from uuid import uuid4

from starlette.datastructures import Headers

from ...handoff.names import owner_of
from ...handoff.refusal import Refused
from ...observe.routes import as_json
from ...patching.guard import shield
from ...pilot.boundaries import unknown
from ..arguments import named, replaced
from ..asked import salt_of
from ..joining import Template
from ..making import fed
from ..recents import Recent, recents
from ..session import Hit, Sequence
from ..using import Use, Wanted
from .answers import READERS
from .context_routes import route
from .engines import Engine, engine_named, tokenizer_named
from .forms import FORMS, Form
from .handed import Handed, Shown, by_id, handed
from .inner import App, Receive, Scope, Send, apart, parsed, serve, whole
from .requests import Http
from .routes import send_answer

USED = "x-thunder-context"
"""Header of a response: the JSON of how the context was used."""
_FAULT = Refused(500, "fault", "the context could not be used; see the server's log")


def asgi(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``DebugRequestLoggingMiddleware.__call__(scope, receive, send)``."""
    answer: Awaitable[None] | None = None
    with shield("contexts", "request"):
        given = named(wrapped, args, kwargs)
        scope, receive, send = given["scope"], given["receive"], given["send"]
        if scope["type"] == "http":
            parts = scope["path"].strip("/").split("/")
            if parts[0] == "thunder" and parts[1:2] in (["handoff"], ["caches"]):
                answer = route(wrapped, scope, receive, send, parts[1:])
            elif scope["method"] == "POST" and scope["path"] in FORMS:
                answer = _answer(wrapped, scope, receive, send)
    return answer if answer is not None else wrapped(*args, **kwargs)


# The body


async def _answer(host: App, scope: Scope, receive: Receive, send: Send) -> None:
    body = await whole(receive)
    form = FORMS[scope["path"]]
    what, told = Handed(form), None
    refusal: Refused | None = None
    with shield("contexts", "start") as guarded:
        said = parsed(body)
        if isinstance(said, dict) and isinstance(said.get(form.field), form.kinds):
            salt = salt_of(Headers(scope=scope))
            try:
                options = said.get("thunder")
                options = options if isinstance(options, dict) else {}
                what.keep = options.get("keep") is not False
                what.use = await _use(said, options, salt, what)
                body = json.dumps(said).encode() if what.use is not None else body
                what.recent = Recent(_said(said, form), said, owner_of(salt))
                told = _Told(send, what)
            except Refused as error:
                refusal = error
    if guarded.failed and b'"handoff"' in body:
        refusal = _FAULT
    try:
        if refusal is None:
            await serve(host, scope, body, receive, told.send if told else send, what)
        if told is not None and told.held_back:
            assert what.use is not None and what.recent is not None
            refusal = what.use.stopped
            if refusal is None:
                _put(what.use, said, form)
                what.recent.said, what.shown = _said(said, form), None
                again = json.dumps(said).encode()
                await serve(host, scope, again, receive, _Told(send, what).send, what)
    finally:
        if what.recent is not None:
            what.recent.done.set()
    if refusal is not None:
        await send_answer(send, as_json(refusal.to_json(), refusal.status))


def _said(body: dict[str, Any], form: Form) -> dict[str, Any]:
    if not form.chat:
        return {"prompt": body["prompt"]}
    if form.own_words:
        return {}  # it is known once the host has put it in a chat's words
    return {"messages": body["messages"], "tools": body.get("tools")}


async def _use(
    said: dict[str, Any], options: dict[str, Any], salt: str, what: Handed
) -> Use | None:
    """What a request goes on from, and its state; the request's body is changed in place.

    Raises:
        Refused: nothing may be used, and there is no text in its place.
    """
    wanted, form = Wanted.of(options), what.form
    if wanted is None:
        return None
    use = Use(wanted, [] if form.own_words else said[form.field])
    use.check_after(form.chat)
    try:
        use.context = await apart(wanted.find, salt)
        use.check_form(form.chat)
        what.records = await apart(use.state)
    except Refused as error:
        use.refuse(error)
    _put(use, said, form)
    return use


def _put(use: Use, said: dict[str, Any], form: Form) -> None:
    """Put the context, or the text in its place, before what the request itself says."""
    if not form.own_words:
        said[form.field] = use.messages() if form.chat else use.prompt()
    if form.chat and said.get("tools") is None and use.context is not None:
        said["tools"] = form.tools(use.context.said.get("tools"))


# The tokens


def apply_chat_template(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``BatchedEngine._apply_chat_template(messages, tools, chat_template_kwargs, ...) -> text``.

    The host comes here two or three times for one request, to count and to answer.

    Raises:
        HTTPException: a context could not be put before the messages.
    """
    what = handed.get()
    if what is None:
        return wrapped(*args, **kwargs)
    with shield("contexts", "join") as guarded:
        if what.use is not None and what.form.own_words:
            what.use.after = named(wrapped, args, kwargs)["messages"]
            messages = what.form.joined(what.use.messages())
            args, kwargs = replaced(wrapped, args, kwargs, messages=messages)
    if guarded.failed:
        raise _refused(what, _FAULT)
    text = wrapped(*args, **kwargs)
    with shield("contexts", "template"):
        if what.shown is None and (what.busy or what.form.own_words):
            given = named(wrapped, args, kwargs)
            variables = dict(given.get("chat_template_kwargs") or {})
            if (thinking := getattr(instance, "_enable_thinking", None)) is not None:
                variables.setdefault("enable_thinking", thinking)
            what.shown = Shown(given["messages"], given.get("tools"), variables, text)
            if what.recent is not None and what.form.own_words:
                recent, shown = what.recent, what.shown
                recent.said = {"messages": shown.messages, "tools": shown.tools}
                recent.body = {
                    "model": recent.body.get("model"),
                    "chat_template_kwargs": variables,
                }
    return text


def validate_context_window(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``validate_context_window(num_prompt_tokens, model_id)``: before an answer begins.

    Raises:
        HTTPException: the request can't go on from its context; `_answer` tells the client why.
    """
    result = wrapped(*args, **kwargs)
    what = handed.get()
    if what is None or not (what.busy or what.unsaid):
        return result
    refusal: Refused | None = None
    with shield("contexts", "tokens") as guarded:
        try:
            _settle(what, str(named(wrapped, args, kwargs).get("model_id")))
        except Refused as error:
            refusal = error
    if guarded.failed:
        refusal = _FAULT
    if refusal is not None:
        raise _refused(what, refusal)
    return result


def _refused(what: Handed, refusal: Refused) -> Exception:
    """What ends the request in the host, for `_answer` to tell the client why."""
    what.refuse(refusal)
    error: Exception = sys.modules["omlx.server"].HTTPException(refusal.status, detail=str(refusal))
    return error


def _settle(what: Handed, model: str) -> None:
    """Decide on the request's tokens.

    Raises:
        Refused: the loaded model can't go on from the context, or the messages don't follow it.
    """
    engine, tokenizer, shown = engine_named(model), tokenizer_named(model), what.shown
    use, making = what.use, what.making
    session = engine.session if engine is not None else None
    if use is not None:
        use.check(session, model)
    if session is None or tokenizer is None:
        raise Refused(409, "model", f"{model} is not cached by this server")
    if what.chat and shown is None:
        raise Refused(409, "model", f"{model} does not take prompts of text alone")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    template = _template(engine, tokenizer, shown) if shown is not None else None
    messages = shown.messages if shown is not None else None
    if use is not None:
        text = shown.text if shown is not None else use.prompt()
        rendered = list(tokenizer.encode(text))
        ids = use.tokenised(template, rendered, encode, messages)
        use.check_tokens(ids)
    else:
        assert making is not None
        text = shown.text if shown is not None else making.said["prompt"]
        rendered = list(tokenizer.encode(text))
        ids = fed(session, making.tokenised(template, rendered, messages))
    what.ids = ids if ids != rendered else None


def _template(engine: Engine | None, tokenizer: Any, shown: Shown) -> Template:
    assert engine is not None

    def render(messages: Any, add_generation_prompt: bool, tools: Any) -> str:
        # The host has brought the tools into a form of its own.
        extra = shown.variables | ({"tools": shown.tools} if shown.tools else {})
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, **extra
        )
        return text

    stops = getattr(tokenizer, "eos_token_ids", None) or {tokenizer.eos_token_id}
    return Template(
        render=render,
        encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        follower=engine.follower,
        stops=frozenset(stops),
        think_end=getattr(tokenizer, "think_end", None) or "",
    )


def add_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``EngineCore.add_request(prompt, sampling_params, request_id, ...)``: the settled tokens go there."""
    with shield("contexts", "add"):
        what = handed.get()
        if what is not None:
            request_id = named(wrapped, args, kwargs).get("request_id") or str(uuid4())
            by_id[request_id] = what
            given = {"request_id": request_id}
            if what.ids is not None:
                given["prompt"] = what.ids
            args, kwargs = replaced(wrapped, args, kwargs, **given)
    return wrapped(*args, **kwargs)


# The look-up, on the engine's thread


def follow(request_id: str, http: Http, sequence: Sequence, tokens: list[int]) -> None:
    """Note what becomes of a request's tokens, and how far they may be stored."""
    what = by_id.get(request_id)
    if what is None:
        return
    if what.ids is not None:
        http.chat.boundaries = unknown(
            "goes on token by token", len(http.chat.messages), len(tokens)
        )
    if what.making is not None:
        end = len(what.making.ids)
        what.making.sequence = sequence
        sequence.boundaries, sequence.keep = (end,), end
    if what.recent is not None:
        what.recent.sequence, what.recent.prompt_tokens = sequence, len(tokens)
    if not what.keep:
        sequence.keep = 0


def restored(request_id: str, sequence: Sequence, tokens: list[int]) -> Hit | None:
    """The prompt cache that a context hands over in less than full precision.

    Nothing that is computed after it is stored.
    """
    what = by_id.get(request_id)
    if what is None or what.use is None or what.use.context is None or not what.records:
        return None
    sequence.keep = 0
    records, what.records = what.records, []
    return what.use.restored(sequence.session, tokens, records)


# The answer


class _Told:
    """The response on its way to the client: what it was goes among the recent ones."""

    def __init__(self, send: Send, what: Handed) -> None:
        assert what.recent is not None
        self._send = send
        self._use = what.use
        self._context = what.use.context if what.use is not None else None
        self._lines = b""
        self._id, self._text, self._thought = "", "", False
        self._recent = what.recent
        self._read = READERS[what.form.path] if what.form.own_words else None
        self._whole = bytearray()

    @property
    def held_back(self) -> bool:
        """Whether the host refused it because of its context: the client got nothing."""
        return self._context is not None and self._use is not None and self._use.context is None

    async def send(self, message: dict[str, Any]) -> None:
        """In the place of ASGI's ``send``."""
        if self.held_back:
            return
        with shield("contexts", "told"):
            if message["type"] == "http.response.start" and self._use is not None:
                header = (USED.encode(), json.dumps(self._use.told()).encode("latin-1"))
                message = message | {"headers": [*message.get("headers", ()), header]}
            elif message["type"] == "http.response.body":
                self._hear(message)
        await self._send(message)

    def _hear(self, message: dict[str, Any]) -> None:
        if self._read is not None:
            self._whole += message.get("body", b"")
            if not message.get("more_body"):
                for answer in self._read(bytes(self._whole)):
                    self._recent.text = answer["content"]
                    self._recent.thought = bool(answer["reasoning_content"])
        self._lines += message.get("body", b"")
        if self._lines.lstrip().startswith(b"{") and message.get("more_body"):
            return
        *lines, self._lines = self._lines.split(b"\n")
        for line in [*lines, *([] if message.get("more_body") else [self._lines])]:
            text = line.removeprefix(b"data: ").strip()
            if text.startswith(b"{"):
                self._note(json.loads(text))

    def _note(self, event: dict[str, Any]) -> None:
        if not self._id:
            known = (event, event.get("message"), event.get("response"))
            self._id = next((str(e["id"]) for e in known if isinstance(e, dict) and "id" in e), "")
            if self._id:
                recents.add(self._id, self._recent)
        for choice in event.get("choices") or ():
            part = choice.get("message") or choice.get("delta") or {}
            self._text += part.get("content") or choice.get("text") or ""
            self._thought |= bool(part.get("reasoning_content") or part.get("reasoning"))
            if choice.get("finish_reason"):
                self._recent.text, self._recent.thought = self._text, self._thought
