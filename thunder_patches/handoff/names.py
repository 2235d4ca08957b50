"""What contexts are called: random ids, which also are the right to use them, and users' own names."""

from __future__ import annotations

import hashlib
import re
import secrets

from .refusal import Refused

_ID = re.compile(r"[0-9a-f]{48}")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def new_id() -> str:
    """An id that nobody can guess: 192 random bits."""
    return secrets.token_hex(24)


def checked_id(value: object) -> str:
    """The id, if it has the form of one.

    Raises:
        Refused: 404; a malformed id is one that was never given out.
    """
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise Refused(404, "unknown", "expected a handoff id of 48 hex digits")
    return value


def checked_name(value: object) -> str:
    """The name, if it may be one: safe as a file's name on every system, the same in any case.

    Raises:
        Refused: 400.
    """
    if not isinstance(value, str) or not _NAME.fullmatch(value) or value.endswith("."):
        raise Refused(
            400,
            "name",
            "expected a name of 1 to 64 lower-case letters, digits, '.', '_' and '-', beginning with a "
            f"letter or digit, found {str(value)[:80]!r}",
        )
    return value


def owner_of(salt: str) -> str:
    """Who owns what was made under a salt, without telling the salt: 32 hex digits."""
    return hashlib.sha256(b"thunder.owner.1\0" + salt.encode()).hexdigest()[:32]
