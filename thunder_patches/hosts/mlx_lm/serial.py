"""The serial path: ``generate_step``, for seeds and for caches that cannot be batched."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from packaging.version import Version

from ...patching.guard import is_on, shield
from ..arguments import named, replaced
from ..quantised import AnySequence
from ..steps import SerialSteps
from .host_cache import keep_out_decoded
from .load import loaded, session_of
from .requests import current


def generate_step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``generate_step(prompt, model, ..., prompt_cache, prompt_progress_callback)``."""
    with shield("ssd_cache", "penalties"):
        args, kwargs = _penalised_whole(wrapped, args, kwargs)
    with shield("ssd_cache", "start"):
        given = named(wrapped, args, kwargs)
        request, caches = current(), given.get("prompt_cache")
        if (sequence := _sequence(given)) is not None:
            assert request is not None
            logits = request.hit.logits if request.hit is not None else None
            held = len(sequence) - len(given["prompt"])
            steps = SerialSteps(given["model"], sequence, held, loaded.prefill, logits)
            return _generate(wrapped, args, kwargs, steps, sequence, caches)
    return wrapped(*args, **kwargs)


def _penalised_whole(wrapped: Any, args: Any, kwargs: Any) -> Any:
    """The call with logits processors that see the tokens in the cache before those of the prompt.

    From 0.32 on the host hands them the whole prompt, but of a cached prompt only the rest, so that
    an answer with penalties would depend on what is cached. Before, they saw its last token alone.
    """
    given, request = named(wrapped, args, kwargs), current()
    held = len(request) - len(given["prompt"]) if request is not None else 0
    processors = given.get("logits_processors")
    if request is None or held <= 0 or not processors or not _shows_prompts():
        return args, kwargs
    before = mx.array(request[:held], dtype=given["prompt"].dtype)

    def whole(processor: Any) -> Any:
        return lambda tokens, logits: processor(mx.concatenate([before, tokens]), logits)

    return replaced(wrapped, args, kwargs, logits_processors=[whole(p) for p in processors])


@functools.cache
def _shows_prompts() -> bool:
    return Version(sys.modules["mlx_lm"].__version__) >= Version("0.32.0")


def speculative_generate_step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``speculative_generate_step(prompt, model, draft_model, ..., prompt_cache)``.

    The prompt's rows are right in both models' caches once the first token is there.
    """
    steps = wrapped(*args, **kwargs)
    with shield("ssd_cache", "start"):
        given = named(wrapped, args, kwargs)
        if (sequence := _sequence(given)) is not None:
            return _store_first(steps, sequence, given["prompt_cache"])
    return steps


def _store_first(steps: Iterator[Any], sequence: AnySequence, cache: Any) -> Iterator[Any]:
    for i, step in enumerate(steps):
        if i == 0:
            with shield("ssd_cache", "prefill"):
                sequence.store(cache, len(sequence) - 1, snapshot=True)
        yield step


def _sequence(given: dict[str, Any]) -> AnySequence | None:
    """The sequence that this generation is for, if it is one of ours."""
    request = current()
    if not is_on("ssd_cache") or request is None or request.sequence is None:
        return None
    if session_of(given["model"]) is not request.sequence.session:
        return None
    return request.sequence if given.get("prompt_cache") is not None else None


def _generate(
    wrapped: Any,
    args: Any,
    kwargs: Any,
    steps: SerialSteps,
    sequence: AnySequence,
    caches: Any,
) -> Iterator[Any]:
    length = len(sequence)
    args, kwargs = replaced(wrapped, args, kwargs, model=steps)
    if not sequence.session.exact_decode:
        keep_out_decoded(caches)
    answer: list[int] = []
    try:
        for token, logprobs in wrapped(*args, **kwargs):
            answer.append(token)
            yield token, logprobs
    finally:
        with shield("ssd_cache", "answer"):
            if length < steps.position <= length + len(answer):
                sequence.extend(answer[: steps.position - length])
                sequence.store(caches, steps.position, snapshot=True, decoded=True)


def maybe_quantize_kv_cache(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``maybe_quantize_kv_cache(prompt_cache, ...)``: layers that can't be quantised stay as they are.

    The stock function raises for a sliding-window layer, so that every request of such a model fails.
    """
    caches = named(wrapped, args, kwargs)["prompt_cache"]
    capable = [i for i, c in enumerate(caches) if type(c).__name__ not in _NEVER_QUANTISED]
    if len(capable) == len(caches):
        return wrapped(*args, **kwargs)
    some = [caches[i] for i in capable]
    args, kwargs = replaced(wrapped, args, kwargs, prompt_cache=some)
    result = wrapped(*args, **kwargs)
    for i, cache in zip(capable, some, strict=True):
        caches[i] = cache
    return result


_NEVER_QUANTISED = frozenset({"RotatingKVCache", "RestoredRotatingKVCache"})
