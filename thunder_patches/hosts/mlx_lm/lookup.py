"""``LRUPromptCache.fetch_nearest_cache``: the host's lookup, made longer from the store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx

from ...patching.guard import is_on, shield
from ..approximate import FAMILIES, approximate
from ..arguments import named
from ..counting import Outcome, count
from ..pilot import looked_up
from ..quantised import AnySequence
from ..session import Hit, Sequence
from .adopt import adopt
from .host_cache import keep_out, trimmed
from .load import loaded, session_for
from .requests import Prompt, current

Found = tuple[Any, list[int]]
"""What the host's lookup returns: a prompt cache or None, and the tokens that it does not hold."""


def fetch_nearest_cache(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Found:
    """Wraps ``fetch_nearest_cache(model, tokens) -> (cache, rest)``."""
    own: Found = wrapped(*args, **kwargs)
    prompt = current()

    def find(limit: int | None) -> Found:
        with shield("ssd_cache", "lookup"):
            given = named(wrapped, args, kwargs)
            if prompt is not None and len(prompt) == len(given["tokens"]):
                return _longest(given["model"], given["tokens"], prompt, own, limit)
        return own

    if loaded.ranks is None:
        found = find(None)
    else:
        found = loaded.ranks.agree(find, lambda found: _reach(prompt, found))
    with shield("ssd_cache", "count"):
        if prompt is not None and prompt.outcome is not None:
            count(prompt.outcome, len(prompt))
            _explain(prompt, prompt)
    return found


def _reach(prompt: Prompt | None, found: Found) -> int:
    """Twice the tokens held, and one more if the first step can be skipped."""
    full = prompt is not None and prompt.hit is not None and prompt.hit.full
    return 2 * ((len(prompt) if prompt is not None else 0) - len(found[1])) + full


def _explain(prompt: Prompt, tokens: list[int]) -> None:
    with shield("context_pilot", "explain"):
        if is_on("context_pilot") and loaded.session is not None and prompt.outcome is not None:
            looked_up(
                prompt.asked.chat,
                tokens,
                prompt.outcome,
                model=loaded.session.identity,
                salt=prompt.asked.salt,
                sequence=prompt.sequence,
                grain=loaded.session.grain,
            )


def _longest(model: Any, tokens: list[int], prompt: Prompt, own: Found, limit: int | None) -> Found:
    """The host's own finding or a longer one from the store, at most ``limit`` tokens of it."""
    cache, rest = own
    held = len(tokens) - len(rest)
    prompt.hit, prompt.outcome = None, Outcome(held, "none", "host" if held else None)
    session = session_for(model)
    if session is None or not is_on("ssd_cache"):
        return own
    if prompt.given is not None:
        prompt.sequence = session.sequence(tokens, prompt.asked.salt)
        given, prompt.given = prompt.given, None
        return _given(prompt, given, tokens)
    sequence = session.sequence(tokens, prompt.asked.salt)
    if prompt.asked.chat.boundaries is not None:
        sequence.boundaries = prompt.asked.chat.boundaries.cuts()
    prompt.sequence = sequence
    if cache and (usable := sequence.fit(held, cache)) < held:
        cache, rest = trimmed(cache, tokens, usable)
        held = len(tokens) - len(rest)
        prompt.outcome = Outcome(held, "none", "host" if held else None)
    if limit is None:
        hit = sequence.lookup(longer_than=held, full=is_on("skip_logic"))
    else:
        hit = sequence.lookup(longer_than=held, full=False, limit=limit)
    if not (hit and hit.full):
        nearly = _nearly(sequence)
        if nearly is not None and nearly.length > max(held, hit.length if hit else 0):
            hit, prompt.sequence = nearly, None
            keep_out(tokens)
    if hit is None:
        return cache, rest
    if loaded.prefill is not None:
        loaded.prefill.held(prompt.reservation, hit.length)
    skip = "full" if hit.full else "approximate" if hit.approximate else "none"
    skipped = hit.length if hit.reused is None else hit.reused
    prompt.outcome = Outcome(skipped, skip, hit.source)
    return _hand_over(prompt, hit), tokens[min(hit.length, len(tokens) - 1) :]


def _given(prompt: Prompt, hit: Hit, tokens: list[int]) -> Found:
    assert prompt.sequence is not None
    prompt.sequence.keep = 0
    keep_out(tokens)
    prompt.outcome = Outcome(hit.length, "none", hit.source, codec=hit.codec)
    return _hand_over(prompt, hit), tokens[hit.length :]


def _hand_over(prompt: Prompt, hit: Hit) -> Any:
    """The restored caches, for the host alone: arrays that are held twice are copied when written to."""
    prompt.hit = replace(hit, caches=[])
    return adopt(hit.caches)


def _nearly(sequence: AnySequence) -> Hit | None:
    if not is_on("approx_skip") or loaded.family not in FAMILIES or loaded.ranks is not None:
        return None
    if not isinstance(sequence, Sequence) or (sequence.tokens < 0).any():  # images
        return None
    return approximate(sequence, lambda ids, kv: loaded.model(mx.array([ids]), cache=kv))
