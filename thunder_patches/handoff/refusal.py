"""Why a context cannot be used or made: an HTTP status, a word for programs, a sentence for people."""

from __future__ import annotations


class Refused(Exception):
    """A request for a context that cannot be granted.

    Args:
        status: the HTTP status to answer with, 4xx.
        reason: one word of a fixed set, such as "unknown", "expired", "owner", "model".
        message: what was expected and what was found.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason

    def to_json(self) -> dict[str, str]:
        return {"error": str(self), "reason": self.reason}
