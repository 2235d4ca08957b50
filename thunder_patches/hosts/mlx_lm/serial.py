"""The serial path: ``generate_step``, for seeds and for caches that cannot be batched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from ...patching.guard import is_on, shield
from ..session import Sequence
from .first_step import SerialSteps
from .load import session_of
from .requests import current


def generate_step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``generate_step(prompt, model, ..., prompt_cache, prompt_progress_callback)``."""
    with shield("ssd_cache", "start"):
        prompt, model, *others = args
        request, cache = current(), kwargs.get("prompt_cache")
        if (
            is_on("ssd_cache")
            and request is not None
            and request.sequence is not None
            and session_of(model) is request.sequence.session
            and cache is not None
            and kwargs.get("input_embeddings") is None
        ):
            sequence = request.sequence
            logits = request.hit.logits if request.hit is not None else None
            held = len(sequence) - len(prompt)
            steps = _steps(model, sequence, cache, held, logits)
            return _generate(wrapped, prompt, steps, sequence, cache, held, others, kwargs)
    return wrapped(*args, **kwargs)


def _steps(
    model: Any, sequence: Sequence, cache: Any, held: int, stored: mx.array | None
) -> SerialSteps:
    def at_stop(seen: int) -> None:
        with shield("ssd_cache", "snapshot"):
            sequence.store(cache, held + seen, snapshot=True)

    def at_end(logits: mx.array) -> None:
        with shield("ssd_cache", "first token"):
            sequence.store(cache, len(sequence), snapshot=True, logits=logits)

    total = len(sequence) - held
    stops = [p - held for p in sequence.due(held, len(sequence) - 1)]
    return SerialSteps(model, total, stored, stops, at_stop, at_end)


def _generate(
    wrapped: Any,
    prompt: mx.array,
    steps: SerialSteps,
    sequence: Sequence,
    cache: Any,
    held: int,
    others: list[Any],
    kwargs: dict[str, Any],
) -> Iterator[Any]:
    length = len(sequence)
    report = kwargs.get("prompt_progress_callback")

    def progress(processed: int, total: int) -> None:
        if report is not None:
            report(processed, total)
        if processed < total:
            with shield("ssd_cache", "prefill"):
                sequence.store(cache, held + processed)

    answer: list[int] = []
    try:
        for token, logprobs in wrapped(
            prompt, steps, *others, **{**kwargs, "prompt_progress_callback": progress}
        ):
            answer.append(token)
            yield token, logprobs
    finally:
        with shield("ssd_cache", "answer"):
            held_now = held + steps.seen
            if length < held_now <= length + len(answer):
                sequence.extend(answer[: held_now - length])
                sequence.store(cache, held_now, snapshot=True, decoded=True)
