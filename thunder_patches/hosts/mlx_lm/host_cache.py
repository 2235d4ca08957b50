"""The host's own prompt cache (``LRUPromptCache``): what it finds and keeps is checked.

Without this the stock server dies where a prompt equals a stored key, answers wrongly after speculative
decoding, and knows no tenants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from ...patching.guard import shield
from ..arguments import named
from ..asked import salted
from .load import loaded

_approximate: deque[list[int]] = deque(maxlen=64)
_decoded: deque[int] = deque(maxlen=256)


def keep_out(tokens: list[int]) -> None:
    """Keep the approximate caches of this prompt, and of what follows it, out of the host's cache."""
    _approximate.append(list(tokens))


def keep_out_decoded(cache: list[Any]) -> None:
    """Keep this one prompt cache out: decoding left another state in it than prefill would."""
    _decoded.append(id(cache))


def checked(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``fetch_nearest_cache(model, tokens) -> (cache, rest)``: what the host found is usable.

    ``rest`` is never empty (there would be nothing to feed), and the caches hold what their key says.
    """
    cache, rest = wrapped(*args, **kwargs)
    with shield("host_cache", "fetch"):
        tokens = named(wrapped, args, kwargs)["tokens"]
        held = len(tokens) - len(rest)
        if not cache:
            return cache, rest
        if salted() or any(offset != held for offset in _offsets(cache)):
            return None, tokens
        if not rest:
            return trimmed(cache, tokens, held - 1)
    return cache, rest


def trimmed(cache: list[Any], tokens: list[int], length: int) -> tuple[Any, list[int]]:
    """The first ``length`` tokens of what the host found, or nothing where it can't be cut."""
    held = next(_offsets(cache), None)
    if length < 1 or held is None or not all(c.is_trimmable() for c in cache):
        return None, tokens
    for c in cache:
        c.trim(held - length)
    return cache, tokens[length:]


def insert_cache(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``LRUPromptCache.insert_cache(model, tokens, prompt_cache, ...)``: within its budget."""
    with shield("host_cache", "insert"):
        given = named(wrapped, args, kwargs)
        tokens, cache = given["tokens"], given["prompt_cache"]
        if salted() or id(cache) in _decoded:
            return None
        if any(a == tokens[: len(a)] or tokens == a[: len(tokens)] for a in _approximate):
            return None
    result = wrapped(*args, **kwargs)
    with shield("host_cache", "trim"):
        # The host itself does so before the next batched request, and never on its serial path.
        if loaded.host_bytes is not None:
            instance.trim_to(n_bytes=loaded.host_bytes)
    return result


def _offsets(caches: Iterable[Any]) -> Iterator[int]:
    for cache in caches:
        if hasattr(cache, "caches"):
            yield from _offsets(cache.caches)
        elif isinstance(offset := getattr(cache, "offset", None), int):
            yield offset
