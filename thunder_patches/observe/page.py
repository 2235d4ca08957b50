"""The page at ``/thunder/``: one file, nothing from elsewhere, no data of the server's in it.

It asks for ``/thunder/status`` itself. Its policy lets only this very script and style run, whatever
names or texts the status brings.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources


@cache
def page() -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """The page as UTF-8, and the headers that go with it."""
    text = (resources.files(__package__) / "page.html").read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash_of("script", text),
        "style-src": _hash_of("style", text),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = (
        ("Content-Security-Policy", "; ".join(f"{k} {v}" for k, v in policy.items())),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "no-referrer"),
        ("Cache-Control", "no-store"),
    )
    return text.encode(), headers


def _hash_of(tag: str, text: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"expected one <{tag}> in the page, found {len(found)}")
    digest = hashlib.sha256(found[0].encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
