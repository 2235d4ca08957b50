"""``LRUPromptCache.fetch_nearest_cache``: the host's lookup, made longer from the store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ...patching.guard import is_on, shield
from ..arguments import named
from ..runtime import runtime
from .adopt import adopt
from .load import session_for
from .requests import Outcome, Prompt, current


def checked(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``fetch_nearest_cache(model, tokens) -> (cache, rest)``: what the host found is usable.

    The stock server dies where a prompt equals a stored key: ``rest`` is empty, there is nothing to
    feed. After speculative decoding it stores caches that hold fewer tokens than their key says, and
    answers wrongly from them.
    """
    cache, rest = wrapped(*args, **kwargs)
    with shield("exact_hit"):
        tokens = named(wrapped, args, kwargs)["tokens"]
        if cache and any(offset != len(tokens) - len(rest) for offset in _offsets(cache)):
            return None, tokens
        if not rest and tokens:
            if not all(c.is_trimmable() for c in cache):
                return None, tokens
            for c in cache:
                c.trim(1)
            return cache, tokens[-1:]
    return cache, rest


def _offsets(caches: Iterable[Any]) -> Iterator[int]:
    for cache in caches:
        if hasattr(cache, "caches"):
            yield from _offsets(cache.caches)
        elif isinstance(offset := getattr(cache, "offset", None), int):
            yield offset


def fetch_nearest_cache(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``fetch_nearest_cache(model, tokens) -> (cache, rest)``."""
    cache, rest = wrapped(*args, **kwargs)
    with shield("ssd_cache", "lookup"):
        given, prompt = named(wrapped, args, kwargs), current()
        tokens = given["tokens"]
        if prompt is not None and len(prompt) == len(tokens):
            cached = len(tokens) - len(rest)
            prompt.outcome = Outcome(cached, "none", "host" if cached else None)
            cache, rest = _longer(given["model"], tokens, prompt, cache, rest)
    return cache, rest


def _longer(
    model: Any, tokens: list[int], prompt: Prompt, cache: Any, rest: list[int]
) -> tuple[Any, list[int]]:
    session = session_for(model)
    if session is None or not is_on("ssd_cache"):
        return cache, rest
    sequence = session.sequence(tokens, prompt.asked.salt)
    prompt.sequence = sequence
    held = min(len(tokens) - len(rest), len(tokens) - 1)
    hit = sequence.lookup(longer_than=held, full=is_on("skip_logic"))
    counters = runtime().counters
    if hit is None:
        counters.add("partial" if held else "miss")
        counters.add("tokens_skipped", held)
        counters.add("tokens_computed", len(tokens) - held)
        return cache, rest
    prompt.hit = hit
    prompt.outcome = Outcome(hit.length, "full" if hit.full else "none", hit.source)
    counters.add("full" if hit.full else "partial")
    counters.add("tokens_skipped", hit.length)
    counters.add("tokens_computed", len(tokens) - hit.length)
    return adopt(hit.caches), tokens[min(hit.length, len(tokens) - 1) :]
