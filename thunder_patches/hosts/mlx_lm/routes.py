"""``APIHandler.do_GET``, ``do_POST``: the routes under ``/thunder/``."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ...observe.routes import Answer, answer
from ...patching import report
from ...patching.guard import shield
from ..arguments import replaced
from ..runtime import runtime
from .requests import note_http, refused


def do_get(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    found: Answer | None = None
    with shield("routes"):
        path, _, query = instance.path.partition("?")
        found = answer("GET", path, query, report.status)
    if found is not None:
        return send(instance, found)
    return wrapped(*args, **kwargs)


def do_post(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    running: AbstractContextManager[None] = nullcontext()
    with shield("ssd_cache", "routes"):
        note_http(instance)
        instance.thunder_started = time.perf_counter()
        running = runtime().activity.running()
    with running:
        return wrapped(*args, **kwargs)


def send(handler: Any, found: Answer) -> None:
    """Answer with the host's own cross-origin headers."""
    handler.send_response_only(found.status)  # a page that polls is no news for the log
    handler.send_header("Content-Type", found.content_type)
    handler.send_header("Content-Length", str(len(found.body)))
    for name, value in found.headers:
        handler.send_header(name, value)
    handler._set_cors_headers()
    handler.end_headers()
    handler.wfile.write(found.body)


def set_completion_headers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``APIHandler._set_completion_headers(status_code)``: 413 for a prompt that cannot fit."""
    with shield("chunked_prefill", "status"):
        if refused():
            args, kwargs = replaced(wrapped, args, kwargs, status_code=413)
    return wrapped(*args, **kwargs)
