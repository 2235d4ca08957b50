"""The routes under ``/thunder/``, for whatever serves HTTP: a path in, an answer out.

A host's adapter calls `answer` for each request and sends what comes back with the host's own
headers, so that the host's access rules (its API key, its allowed origins) hold here too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qs

from .metrics import dashboard, metrics
from .page import page

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
Query = Mapping[str, list[str]]


class Status(Protocol):
    """Makes the process's status: ``patching.report.status``."""

    def __call__(self, *, details: bool = False) -> dict[str, Any]: ...


class Answer(NamedTuple):
    """What to send. ``headers`` come beside ``Content-Type`` and ``Content-Length``."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


def answer(method: str, path: str, query: str, status: Status) -> Answer | None:
    """The answer to a request, or None for a path that is not ours: the host's own answer holds.

    Args:
        path: without the query, such as ``/thunder/status``. query: what stands after ``?``, or "".
    """
    route = _ROUTES.get(path)
    if route is None:
        return None
    if method not in ("GET", "HEAD"):
        told = Answer(405, TEXT, b"expected GET\n", (("Allow", "GET, HEAD"),))
    else:
        told = route(parse_qs(query), status)
    return told._replace(body=b"") if method == "HEAD" else told


def as_json(value: Any, status: int = 200) -> Answer:
    """``value`` as a JSON answer, never kept by a browser or proxy."""
    body = json.dumps(value, default=str).encode()
    return Answer(status, JSON, body, (("Cache-Control", "no-store"),))


def _status(query: Query, status: Status) -> Answer:
    return as_json(status(details=True))


def _metrics(query: Query, status: Status) -> Answer:
    try:
        content_type, body = metrics(status())
    except ModuleNotFoundError as missing:
        text = f"{missing.name} is missing; run: pip install 'thunder-patches[metrics]'\n"
        return Answer(501, TEXT, text.encode())
    return Answer(200, content_type, body, (("Cache-Control", "no-store"),))


def _dashboard(query: Query, status: Status) -> Answer:
    return Answer(200, JSON, dashboard().encode())


def _page(query: Query, status: Status) -> Answer:
    body, headers = page()
    return Answer(200, "text/html; charset=utf-8", body, headers)


def _to_page(query: Query, status: Status) -> Answer:
    return Answer(308, TEXT, b"see /thunder/\n", (("Location", "/thunder/"),))


_ROUTES: dict[str, Callable[[Query, Status], Answer]] = {
    "/thunder": _to_page,
    "/thunder/": _page,
    "/thunder/status": _status,
    "/thunder/metrics": _metrics,
    "/thunder/grafana.json": _dashboard,
}

OPEN = frozenset({"/thunder", "/thunder/", "/thunder/grafana.json"})
"""Paths that hold nothing of the server's: a host that asks for a key may answer these without one,
so that a browser can show the page, which then asks for the key."""
