"""Requests that go on from a context: handler's thread, generation thread, lookup, answer."""

from __future__ import annotations

import copy
from typing import Any

from ...handoff.names import owner_of
from ...handoff.refusal import Refused
from ...observe.routes import as_json
from ...patching.guard import shield
from ...pilot.boundaries import unknown
from ..arguments import named, replaced
from ..asked import options_of, salt_of
from ..joining import Template
from ..making import Making, fed
from ..recents import Recent, recents
from ..using import Use, Wanted
from .host_cache import keep_out
from .load import loaded
from .messages import follower, renderer
from .requests import Prompt, current
from .routes import send


def load(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``ModelProvider._load``: nothing of ours may hold on to the model that goes."""
    with shield("contexts", "load"):
        recents.forget()
    return wrapped(*args, **kwargs)


def handle_completion(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``APIHandler.handle_completion(request, stop_words)``: put the context's messages before its own."""
    recent = None
    refusal: Refused | None = None
    with shield("contexts", "start") as guarded:
        instance.thunder_use = None
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
    options = options_of(handler.body, handler.headers)
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
    wanted = Wanted.of(options_of(handler.body, handler.headers))
    if wanted is None:
        return None
    chat = request.request_type == "chat"
    use = Use(wanted, request.messages if chat else request.prompt)
    use.check_after(chat)
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
    making: Making | None = None
    use: Use | None = None
    with shield("contexts", "tokenise"):
        given = named(wrapped, args, kwargs)
        request = given["request"]
        making = getattr(request, "thunder_making", None)
        use = getattr(request, "thunder_use", None)
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
                use.check_tokens(ids)
                rendered.given = use.restored(loaded.session, ids, use.state())
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
