"""oMLX's scheduler: lookup and store around its prefill, on the engine's own thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...patching.guard import is_on, shield
from ..arguments import named, replaced
from ..counting import Outcome, count
from ..mlx_lm.adopt import adopt
from ..mlx_lm.batched import Row, expect
from ..session import Sequence
from ..steps import Prefilling
from .engines import Engine, add, engine_of


class CachedTokens(int):
    """``cached_tokens`` of a request: travels through the host to the usage, with what became of it."""

    outcome: Outcome

    def __radd__(self, other: int) -> CachedTokens:
        """The host adds up several prompts of one request; the last one's outcome is told."""
        total = CachedTokens(other + int(self))
        total.outcome = self.outcome
        return total


def scheduler_init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``Scheduler.__init__``: for an eligible model the host's own prefix cache is put out of use."""
    result = wrapped(*args, **kwargs)
    with shield("ssd_cache", "load"):
        engine = add(instance)
        if engine.session is not None and is_on("ssd_cache"):
            instance.block_aware_cache = None
    return result


def do_external_prefill(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``Scheduler._do_external_prefill(request, tokens, existing_cache, ...) -> (cache, [last])``."""
    found: _Found | None = None
    with shield("ssd_cache", "lookup"):
        found = _look_up(instance, named(wrapped, args, kwargs))
    if found is None:
        return wrapped(*args, **kwargs)
    args, kwargs = replaced(wrapped, args, kwargs, tokens=found.rest, existing_cache=found.caches)
    with _standing_in(instance, found.prefilling):
        cache, last = wrapped(*args, **kwargs)
    with shield("ssd_cache", "prefill"):
        expect(cache, found.row)
    return cache, last


def begin_prefill(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``Scheduler._begin_prefill(request, tokens, existing_cache) -> state``: chunked prefill."""
    found: _Found | None = None
    with shield("ssd_cache", "lookup"):
        found = _look_up(instance, named(wrapped, args, kwargs))
    if found is None:
        return wrapped(*args, **kwargs)
    args, kwargs = replaced(wrapped, args, kwargs, tokens=found.rest, existing_cache=found.caches)
    state = wrapped(*args, **kwargs)
    with shield("ssd_cache", "prefill"):
        state.thunder = found.prefilling
        expect(state.cache, found.row)
    return state


def step_prefill_chunk(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``Scheduler._step_prefill_chunk(state) -> done``."""
    prefilling = None
    with shield("ssd_cache", "prefill"):
        prefilling = getattr(named(wrapped, args, kwargs)["state"], "thunder", None)
    if prefilling is None:
        return wrapped(*args, **kwargs)
    with _standing_in(instance, prefilling):
        return wrapped(*args, **kwargs)


class _Found:
    """A prompt's lookup: what is left to prefill, into which caches, and the row it becomes."""

    def __init__(
        self,
        engine: Engine,
        model: Any,
        sequence: Sequence,
        tokens: list[int],
        caches: Any,
        held: int,
    ) -> None:
        self.rest = tokens[min(held, len(tokens) - 1) :]
        self.caches = caches
        self.prefilling = Prefilling(model, sequence, held, engine.prefill)
        self.row = Row(sequence, None)


def _look_up(scheduler: Any, given: dict[str, Any]) -> _Found | None:
    """Look a whole text prompt up; None where the host goes on alone."""
    engine = engine_of(scheduler)
    request, tokens = given["request"], given["tokens"]
    if engine is None or engine.session is None or not is_on("ssd_cache"):
        return None
    if given.get("vlm_embeds") is not None or given.get("existing_cache") is not None:
        return None
    if len(tokens) != len(request.prompt_token_ids):
        return None
    sequence = engine.session.sequence(tokens)
    hit = sequence.lookup(longer_than=0, full=is_on("skip_logic"))
    held = hit.length if hit is not None else 0
    skip = "full" if hit is not None and hit.full else "none"
    outcome = Outcome(held, skip, hit.source if hit is not None else None)
    count(outcome, len(tokens))
    request.cached_tokens = CachedTokens(held)
    request.cached_tokens.outcome = outcome
    caches = adopt(hit.caches) if hit is not None else None
    found = _Found(engine, scheduler.model, sequence, tokens, caches, held)
    found.row.logits = hit.logits if hit is not None else None
    return found


@contextmanager
def _standing_in(scheduler: Any, prefilling: Prefilling) -> Iterator[None]:
    model = scheduler.model
    scheduler.model = prefilling
    try:
        yield
    finally:
        scheduler.model = model
