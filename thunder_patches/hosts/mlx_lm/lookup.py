"""``LRUPromptCache.fetch_nearest_cache``: the host's lookup, made longer from the store."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx

from ...patching.guard import is_on, shield
from ..approximate import FAMILIES, approximate
from ..arguments import named
from ..runtime import runtime
from .adopt import adopt
from .load import loaded, session_for
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
    if prompt.boundaries is not None:
        sequence.boundaries = prompt.boundaries.cuts()
    prompt.sequence = sequence
    held = min(len(tokens) - len(rest), len(tokens) - 1)
    hit = sequence.lookup(longer_than=held, full=is_on("skip_logic"))
    if is_on("approx_skip") and loaded.family in FAMILIES and not (hit and hit.full):
        nearly = approximate(sequence, lambda ids, kv: loaded.model(mx.array([ids]), cache=kv))
        if nearly is not None and nearly.length > max(held, hit.length if hit else 0):
            hit = nearly
            prompt.sequence = None
            keep_out(tokens)
    counters = runtime().counters
    if hit is None:
        counters.add("partial" if held else "miss")
        counters.add("tokens_skipped", held)
        counters.add("tokens_computed", len(tokens) - held)
        return cache, rest
    prompt.hit = hit
    skip = "full" if hit.full else "approximate" if hit.approximate else "none"
    skipped = hit.length if hit.reused is None else hit.reused
    prompt.outcome = Outcome(skipped, skip, hit.source)
    counters.add("partial" if skip == "none" else skip)
    counters.add("tokens_skipped", skipped)
    counters.add("tokens_computed", len(tokens) - skipped)
    return adopt(hit.caches), tokens[min(hit.length, len(tokens) - 1) :]


_approximate: deque[list[int]] = deque(maxlen=64)
"""Prompts whose caches are approximate: the host must not keep those for exact lookups."""


def keep_out(tokens: list[int]) -> None:
    """Keep the caches of this prompt, and of what is generated after it, out of the host's cache."""
    _approximate.append(list(tokens))


def insert_cache(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``LRUPromptCache.insert_cache(model, tokens, prompt_cache, ...)``."""
    kept_out = False
    with shield("approx_skip", "insert"):
        tokens = named(wrapped, args, kwargs)["tokens"]
        kept_out = any(a == tokens[: len(a)] or tokens == a[: len(tokens)] for a in _approximate)
    return None if kept_out else wrapped(*args, **kwargs)
