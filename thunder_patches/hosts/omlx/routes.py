"""The routes under ``/thunder/``, on the host's own port and under its own API-key check."""

from __future__ import annotations

import json
import sys
from typing import Any

from ...observe.routes import JSON, OPEN, Answer, answer
from ...patching import report
from ...patching.guard import shield
from ..arguments import named


def asgi(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``DebugRequestLoggingMiddleware.__call__(scope, receive, send)``."""
    ours: dict[str, Any] | None = None
    with shield("routes"):
        given = named(wrapped, args, kwargs)
        if given["scope"]["type"] == "http" and given["scope"]["path"].startswith("/thunder/"):
            ours = given
    if ours is None:
        return wrapped(*args, **kwargs)
    return _serve(ours, wrapped, args, kwargs)


async def _serve(given: dict[str, Any], host: Any, args: Any, kwargs: Any) -> None:
    scope, send = given["scope"], given["send"]
    found = None if scope["path"] in OPEN else await refused_by_host(scope, given["receive"])
    if found is None:
        with shield("routes"):
            query = scope.get("query_string", b"").decode("latin-1")
            found = answer(scope["method"], scope["path"], query, report.status)
    if found is None:
        await host(*args, **kwargs)
        return
    await send_answer(send, found)


async def send_answer(send: Any, found: Answer) -> None:
    headers = [
        ("Content-Type", found.content_type),
        ("Content-Length", str(len(found.body))),
        *found.headers,
    ]
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": found.status, "headers": raw})
    await send({"type": "http.response.body", "body": found.body})


async def refused_by_host(scope: Any, receive: Any) -> Answer | None:
    """The host's own answer to a missing or wrong API key; None: go on."""
    server = sys.modules["omlx.server"]
    request = server.FastAPIRequest(scope, receive)
    try:
        await server.verify_api_key(request, await server.security(request))
    except server.HTTPException as refusal:
        body = json.dumps({"error": {"message": refusal.detail, "type": "authentication_error"}})
        return Answer(refusal.status_code, JSON, body.encode())
    return None
