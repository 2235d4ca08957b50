"""The ``usage.context_pilot`` field of a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from thunder_patches.pilot.boundaries import Boundaries
from thunder_patches.pilot.explain import Miss
from thunder_patches.pilot.fingerprints import system_prompt_hash


def report(
    messages: Sequence[Mapping[str, Any]],
    boundaries: Boundaries,
    *,
    skip: Literal["full", "approximate", "none"],
    cached_tokens: int,
    source: Literal["ram", "ssd", "host"] | None,
    miss: Miss | None = None,
    stabilized: Sequence[str] = (),
    ushape: str = "",
) -> dict[str, Any]:
    """What was reused of one request.

    Args:
        messages: as the client sent them; empty for a plain completion.
        boundaries: of the prompt that was run.
        skip: "full" where no token was computed, "approximate" where differing blocks were
            recomputed in the middle, else "none".
        cached_tokens: tokens really skipped, 0 to N.
        source: where their state came from; None if there are none.
        miss: from ``explain``; left out of the result where None.
        stabilized: what the stabiliser did, from ``Stabilized.did``.
        ushape: what the reinforcement did, from ``Reinforced.did``.

    ``message_aligned`` is null where the boundaries are unknown: the template was not followed.
    """
    known = any(end is not None for end in boundaries.ends)
    result: dict[str, Any] = {
        "skip": skip,
        "cached_tokens": cached_tokens,
        "source": source if cached_tokens else None,
        "message_aligned": None,
        "aligned_message_count": None,
        "total_message_count": len(messages),
        "system_prompt_hash": system_prompt_hash(messages),
    }
    if known:
        whole = cached_tokens == boundaries.total
        result["message_aligned"] = whole or boundaries.is_boundary(cached_tokens)
        result["aligned_message_count"] = boundaries.whole_messages(cached_tokens)
    if messages and not boundaries.aligned:
        result["boundaries"] = boundaries.reason
    if miss is not None:
        result["miss"] = miss.to_json()
    if stabilized:
        result["stabilized"] = list(stabilized)
    if ushape:
        result["ushape"] = ushape
    return result
