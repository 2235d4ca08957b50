"""The batched path of ``mlx_lm.generate``: store while prefilling, skip the first step where possible.

A sequence is known by the uid that ``BatchGenerator.insert_segments`` gave it, from there until its
answer is finished or it is removed. Only the generation thread comes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...patching.guard import is_on, shield
from ...prefill.memory import Reservation
from ..arguments import named, replaced
from ..quantised import AnySequence
from ..runtime import runtime
from ..steps import FirstStep, measured, next_piece
from .host_cache import keep_out_decoded
from .load import loaded, session_of
from .requests import current


@dataclass
class Row:
    """A sequence in the batch generator, and the logits to start it with, if they were stored."""

    sequence: AnySequence
    logits: mx.array | None
    fed: int = 0
    """Tokens that the host counts for this row once the first step is done."""
    begun: Callable[[], None] | None = None
    """Called once, when the first token of the answer is there."""
    reservation: Reservation | None = None
    """Memory that this row's prompt has still to fill."""


_rows: dict[int, Row] = {}
_expected: list[tuple[Any, Row]] = []


def expect(cache: Any, row: Row) -> None:
    """Tell which row the prompt cache ``cache`` (the very object) will be, once it is inserted."""
    _expected[:] = [*_expected[-63:], (cache, row)]


def _claim(given: dict[str, Any]) -> Row | None:
    caches = given.get("caches") or [None]
    for i, (cache, row) in enumerate(_expected):
        if cache is caches[0] and cache is not None:
            del _expected[i]
            return row
    prompt = current()
    if prompt is None or prompt.sequence is None:
        return None
    logits = prompt.hit.logits if prompt.hit is not None else None
    return Row(prompt.sequence, logits, reservation=prompt.reservation)


def batch_generator_init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``BatchGenerator.__init__``: uids start anew; models with state prefill one prompt at a time.

    mlx-lm 0.31.3 computes the shorter rows of a ragged hybrid batch wrongly, and a snapshot needs its
    own position for each prompt.
    """
    with shield("ssd_cache", "new batch"):
        _rows.clear()
        session = session_of(named(wrapped, args, kwargs)["model"])
        if session is not None and not session.cuttable:
            args, kwargs = replaced(wrapped, args, kwargs, prefill_batch_size=1)
    return wrapped(*args, **kwargs)


def insert_segments(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``BatchGenerator.insert_segments(segments, max_tokens, caches, all_tokens, ...) -> uids``."""
    uids = wrapped(*args, **kwargs)
    with shield("ssd_cache", "insert"):
        row = _claim(named(wrapped, args, kwargs)) if len(uids) == 1 else None
        if row is not None:
            _rows[uids[0]] = row
    return uids


def remove(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``BatchGenerator.remove(uids, ...)``: the client went away; what was prefilled for it is kept."""
    with shield("ssd_cache", "cancelled"):
        batch, uids = instance._prompt_batch, named(wrapped, args, kwargs)["uids"]
        for i, uid in enumerate(batch.uids):
            row, position = _row(batch, i), len(batch.tokens[i])
            if uid not in uids or row is None or row.logits is not None or not position:
                continue
            if row.sequence.session.cut_anywhere:
                row.sequence.store(batch.prompt_cache, position, row=i, snapshot=True)
    result = wrapped(*args, **kwargs)
    with shield("ssd_cache", "remove"):
        for uid in named(wrapped, args, kwargs)["uids"]:
            _rows.pop(uid, None)
    return result


def prompt(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``PromptProcessingBatch.prompt(tokens)``: prefill one chunk of each row, then store its blocks.

    A chunk of one prompt is cut further where memory asks for it and where snapshots are due.
    """
    row: Row | None = None
    tokens: list[list[int]] = []
    with shield("ssd_cache", "plan"):
        tokens = named(wrapped, args, kwargs)["tokens"]
        row = _row(instance, 0) if len(tokens) == 1 and tokens[0] else None
    if row is None:
        with _forgotten_on_failure(instance):
            result = wrapped(*args, **kwargs)
        with shield("ssd_cache", "prefill"):
            _store_rows(instance, False)
        with shield("chunked_prefill", "held"):
            for i, done in enumerate(tokens):
                _held(_row(instance, i), len(done))
        return result
    rest = tokens[0]
    while rest:
        start, size, snapshot = len(instance.tokens[0]), len(rest), False
        with shield("ssd_cache", "plan"):
            size, snapshot = next_piece(row.sequence, loaded.prefill, start, len(rest))
        with measured(loaded.prefill, start, size), _forgotten_on_failure(instance):
            wrapped([rest[:size]])
        rest = rest[size:]
        with shield("chunked_prefill", "held"):
            _held(row, size)
        with shield("ssd_cache", "prefill"):
            _store_rows(instance, snapshot)
    return None


@contextmanager
def _forgotten_on_failure(batch: Any) -> Iterator[None]:
    """The host counts a chunk's tokens before it computes them: after a failure no count is right."""
    try:
        yield
    except BaseException:
        for uid in batch.uids:
            _rows.pop(uid, None)
        raise


def _store_rows(batch: Any, snapshot: bool) -> None:
    for i, position in enumerate(map(len, batch.tokens)):
        row = _row(batch, i)
        if row is not None and row.logits is None:
            row.sequence.store(batch.prompt_cache, position, row=i, snapshot=snapshot)


def _held(row: Row | None, tokens: int) -> None:
    if row is not None and loaded.prefill is not None:
        loaded.prefill.held(row.reservation, tokens)


def _row(batch: Any, i: int) -> Row | None:
    return _rows.get(batch.uids[i]) if is_on("ssd_cache") else None


def generate(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``PromptProcessingBatch.generate(tokens)``: rows with stored logits start apart from the others."""
    tokens: Seq[list[int]] = ()
    skipping: list[int] = []
    with shield("skip_logic"):
        tokens = named(wrapped, args, kwargs)["tokens"]
        skipping = [
            i for i in range(len(tokens)) if (row := _row(instance, i)) and row.logits is not None
        ]
    if not skipping or len(skipping) == len(tokens):
        return wrapped(*args, **kwargs)
    order = list(instance.uids)
    apart = instance.split(skipping)
    computed = wrapped([t for i, t in enumerate(tokens) if i not in skipping])
    computed.extend(apart.generate([tokens[i] for i in skipping]))
    computed.filter([computed.uids.index(uid) for uid in order])
    return computed


def generation_init(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``GenerationBatch.__init__(model, uids, inputs, prompt_cache, tokens, ...)``: the first step."""
    rows: list[Row | None] = []
    with shield("ssd_cache", "first step"):
        given = named(wrapped, args, kwargs)
        rows = [_rows.get(uid) for uid in given["uids"]]
    if not any(rows) or not is_on("ssd_cache"):
        return wrapped(*args, **kwargs)
    stored = [row.logits for row in rows if row is not None and row.logits is not None]
    step = FirstStep(given["model"], stored if len(stored) == len(rows) else None)
    args, kwargs = replaced(wrapped, args, kwargs, model=step)
    try:
        wrapped(*args, **kwargs)
    finally:
        instance.model = step.model
    for row, tokens in zip(rows, instance.tokens, strict=True):
        if row is not None:
            row.fed = len(tokens)
    if step.stored is not None:
        return
    with shield("ssd_cache", "first token"):
        for i, row in enumerate(rows):
            if row is not None and step.logits is not None:
                row.sequence.store(
                    instance.prompt_cache,
                    len(row.sequence),
                    row=i,
                    snapshot=True,
                    logits=step.logits[i],
                )


def generation_next(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """``GenerationBatch.next() -> responses``: a finished answer's blocks are stored too."""
    responses = wrapped(*args, **kwargs)
    with shield("ssd_cache", "activity"):
        runtime().activity.note()
    for response in responses:
        row = _rows.get(response.uid)
        if row is not None and row.begun is not None:
            begun, row.begun = row.begun, None
            with shield("routes", "first token"):
                begun()
        if response.finish_reason is not None and response.uid in _rows:
            with shield("ssd_cache", "answer"):
                row = _rows.pop(response.uid)
                sequence = row.sequence
                if not sequence.session.exact_decode:
                    keep_out_decoded(response.prompt_cache)
                sequence.extend(response.all_tokens[row.fed :])
                if response.prompt_cache is not None:
                    sequence.store(
                        response.prompt_cache, len(sequence), snapshot=True, decoded=True
                    )
    return responses
