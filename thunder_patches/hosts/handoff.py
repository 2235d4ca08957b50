"""Where a host's contexts are kept, and what is asked for when one is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..handoff.context import PRECISIONS, Context
from ..handoff.names import checked_name
from ..handoff.refusal import Refused
from ..handoff.shelf import Shelf
from ..handoff.transfer import export
from ..observe.routes import Answer
from ..patching.guard import is_on
from .runtime import runtime

FILE = "application/octet-stream"
"""What the routes call a context's file."""
HANDOFF_SECONDS = 3600.0
LONGEST_SECONDS = 90 * 86400.0


def shelf() -> Shelf:
    """Where this process, and all others on its cache folder, keep contexts."""
    found = runtime().contexts
    assert found is not None
    return found


def told() -> dict[str, int]:
    """The ``contexts`` part of the status: how many there are, and what they keep."""
    return shelf().counts() | {"bytes": shelf().held()}


def allow(feature: str) -> None:
    """Refuse where a feature, or the store that it works with, is off.

    Raises:
        Refused: 409.
    """
    for name in (feature, "ssd_cache"):
        if not is_on(name):
            raise Refused(409, "off", f"{name} is off in this server (THUNDER_{name.upper()})")


def as_file(context: Context) -> Answer:
    """The answer that is a context's file; see `handoff.parcel`."""
    temporary = shelf().temporary()
    try:
        export(runtime().store, context, temporary)
        named = f'attachment; filename="{context.id}.safetensors"'
        return Answer(200, FILE, temporary.read_bytes(), (("Content-Disposition", named),))
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class Order:
    """What ``POST /thunder/handoff`` or ``/thunder/caches/NAME`` asks for.

    Args:
        request: id of an earlier response; else ``messages`` with ``tools``, or ``prompt``.
        answer: whether that response's own tokens are part of the context.
        thinking: whether they are as they were ("keep"), or without what was thought ("cut").
        ttl: seconds until it expires; None for no end.
    """

    request: str | None
    precision: str
    answer: bool
    thinking: str
    ttl: float | None
    holder: str
    wait: bool = True
    """Whether the answer to the order is the finished descriptor, or just the id that it will have."""
    name: str | None = None

    @classmethod
    def of(cls, body: Any, name: str | None = None) -> Order:
        """Raises:
        Refused: 400, what was expected and found.
        """
        if not isinstance(body, dict):
            raise Refused(400, "request", "expected a JSON object")
        sources = [s for s in ("request", "messages", "prompt") if body.get(s) is not None]
        if len(sources) != 1:
            raise Refused(
                400, "request", f"expected one of request, messages and prompt, found {sources}"
            )
        known = {"precision": PRECISIONS, "thinking": ("keep", "cut")}
        for option, values in known.items():
            if body.get(option, values[0]) not in values:
                raise Refused(
                    400, "request", f"{option}: expected one of {values}, found {body[option]!r}"
                )
        precision = body.get("precision", "exact")
        if name is not None and precision != "exact":
            raise Refused(400, "request", f"a named cache is exact; found precision {precision!r}")
        _string(body, "prompt")
        return cls(
            request=_string(body, "request"),
            precision=precision,
            answer=body.get("answer") is not False,
            thinking=body.get("thinking", "keep"),
            ttl=_ttl(body.get("ttl"), None if name is not None else HANDOFF_SECONDS),
            holder=cls.holder_of(body),
            wait=body.get("wait") is not False or name is not None,
            name=None if name is None else checked_name(name),
        )

    @staticmethod
    def holder_of(body: dict[str, Any]) -> str:
        return checked_name(body.get("holder", "maker"))


def _string(body: dict[str, Any], field: str) -> str | None:
    value = body.get(field)
    if value is not None and not isinstance(value, str):
        raise Refused(400, "request", f"{field}: expected a string, found {value!r}"[:200])
    return value


def _ttl(value: Any, default: float | None) -> float | None:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(400, "request", f"ttl: expected seconds, found {value!r}")
    if not 0 < value <= LONGEST_SECONDS:
        raise Refused(
            400, "request", f"ttl: expected more than 0 and at most {LONGEST_SECONDS:.0f} seconds, "
            f"found {value}"
        )  # fmt: skip
    return float(value)
