"""``APIHandler.do_GET``, ``do_POST``: the routes under ``/thunder/``."""

from __future__ import annotations

import json
from typing import Any

from ...patching import report
from ...patching.guard import shield
from ..arguments import replaced
from .requests import note_http, refused


def do_get(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if instance.path.split("?")[0] == "/thunder/status":
        return send_json(instance, 200, report.status())
    return wrapped(*args, **kwargs)


def do_post(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    with shield("ssd_cache", "routes"):
        note_http(instance)
    return wrapped(*args, **kwargs)


def send_json(handler: Any, code: int, value: Any) -> None:
    """Answer with JSON, with the host's own headers."""
    body = json.dumps(value).encode()
    handler._set_completion_headers(code)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def set_completion_headers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``APIHandler._set_completion_headers(status_code)``: 413 for a prompt that cannot fit."""
    with shield("chunked_prefill", "status"):
        if refused():
            args, kwargs = replaced(wrapped, args, kwargs, status_code=413)
    return wrapped(*args, **kwargs)
