"""oMLX's scheduler: lookup and store around its prefill, on the engine's own thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ...patching.guard import is_on, shield
from ...prefill.progress import Progress
from ..arguments import named, replaced
from ..asked import salted
from ..counting import Outcome, count
from ..mlx_lm.adopt import adopt
from ..mlx_lm.batched import Row, expect
from ..pilot import looked_up
from ..seeing import note, place_of
from ..session import Hit, Sequence
from ..steps import Prefilling
from . import contexts
from .engines import Engine, add, engine_of
from .messages import boundaries
from .requests import Http, asked_for


def scheduler_init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``Scheduler.__init__``: for an eligible model the host's own prefix cache is put out of use.

    It knows no tenants, so with a cache for each API key no model uses it.
    """
    result = wrapped(*args, **kwargs)
    with shield("ssd_cache", "load"):
        engine = add(instance)
        if is_on("ssd_cache") and (engine.session is not None or salted()):
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
        asked_for(named(wrapped, args, kwargs)["request"].request_id).reservation = None
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
        self, engine: Engine, model: Any, sequence: Sequence, tokens: list[int], hit: Hit | None
    ) -> None:
        held = hit.length if hit is not None else 0
        self.rest = tokens[min(held, len(tokens) - 1) :]
        self.caches = adopt(hit.caches) if hit is not None else None
        self.prefilling = Prefilling(model, sequence, held, engine.prefill)
        self.row = Row(sequence, hit.logits if hit is not None else None)


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
    http = asked_for(request.request_id)
    sequence = engine.session.sequence(tokens, http.salt)
    with shield("context_pilot", "boundaries"):
        if http.prompt is not None:
            found = boundaries(engine.follower, scheduler.tokenizer, http.prompt, sequence.tokens)
            http.chat.boundaries, sequence.boundaries = found, found.cuts()
    with shield("contexts", "look up"):
        contexts.follow(request.request_id, http, sequence, tokens)
    hit: Hit | None = None
    with shield("contexts", "restore"):
        hit = contexts.restored(request.request_id, sequence, tokens)
    if hit is None:
        hit = sequence.lookup(longer_than=0, full=is_on("skip_logic"))
    outcome = Outcome()
    if hit is not None:
        outcome = Outcome(hit.length, "full" if hit.full else "none", hit.source, codec=hit.codec)
    request.cached_tokens = outcome.cached_tokens
    count(outcome, len(tokens))
    result = _Found(engine, scheduler.model, sequence, tokens, hit)
    _tell(http, sequence, tokens, outcome, result.prefilling)
    with shield("routes", "first token"):
        place = place_of(sequence, len(tokens), http.chat)
        result.row.begun = partial(note, outcome, http.started, http.chat, place)
    return result


def _tell(
    http: Http, sequence: Sequence, tokens: list[int], outcome: Outcome, prefilling: Prefilling
) -> None:
    """What the client is to see of it, while the prompt is prefilled and after."""
    http.outcomes.append(outcome)
    skipped = outcome.cached_tokens
    http.progress, http.prefilling = Progress(len(tokens), skipped, skipped), prefilling
    with shield("context_pilot", "explain"):
        if is_on("context_pilot"):
            looked_up(
                http.chat,
                tokens,
                outcome,
                model=sequence.session.identity,
                salt=http.salt,
                sequence=sequence,
                grain=sequence.session.grain,
            )


@contextmanager
def _standing_in(scheduler: Any, prefilling: Prefilling) -> Iterator[None]:
    model = scheduler.model
    scheduler.model = prefilling
    try:
        yield
    finally:
        scheduler.model = model
