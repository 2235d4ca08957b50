"""What a lossy codec does to a model's answers: the same text continued on stored and on exact KV."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..cache.record import Coded, Header, Record, TensorSpec
from .cut import cut
from .layers import DTYPES, CacheObject, Layout, leaves

Decoder = Callable[[Record], tuple[Record, int, int]]
"""A record to what comes back of it, its stored bytes, and how many of those are exact sinks."""


@dataclass(frozen=True)
class Quality:
    """Of one document: divergence of the next-token distributions, in nats, and what was saved.

    Args:
        kl: mean over the predicted tokens; `top1` the share of them with the same first choice.
        greedy: tokens of a greedy continuation before it differs, of as many as were made.
        stored: bytes in blocks, exact sinks left out; `raw` those of the same rows uncoded.
    """

    kl: float
    top1: float
    greedy: int | None
    stored: int
    raw: int

    @property
    def ratio(self) -> float:
        return self.raw / self.stored


class Document:
    """A text's context as records, and the model's own continuation of it.

    Args:
        model: called as ``model(tokens, cache=caches)``.
        make_cache: makes a fresh prompt cache.
        tokens: at least ``context + predict`` of them.
        context: tokens that go through the codec, in records of ``block`` tokens.
        rows_as: dtype that float rows are rounded to first, so that models of any dtype compare.
        greedy: length of the greedy continuation that is also compared; 0 for none.
    """

    def __init__(
        self,
        model: Any,
        make_cache: Callable[[], Sequence[CacheObject]],
        tokens: Sequence[int],
        *,
        context: int = 1536,
        predict: int = 255,
        block: int = 256,
        rows_as: str = "BF16",
        greedy: int = 0,
    ) -> None:
        if len(tokens) < context + predict:
            raise ValueError(f"expected {context + predict} tokens or more, found {len(tokens)}")
        self._model = model
        self._next = list(tokens[context : context + predict])
        self.greedy = greedy
        self._caches = list(make_cache())
        for i in range(0, context, block):
            model(mx.array([list(tokens[i : min(i + block, context)])]), cache=self._caches)
            mx.eval([leaf.rows and leaf.rows[0][1] for leaf in leaves(self._caches)])
        self._context = context
        round_rows(self._caches, context, rows_as)
        found = leaves(self._caches)
        self._layout = Layout.of(found)
        spans = [(i, min(i + block, context)) for i in range(0, context, block)]
        self.records = [
            _record(c.tensors, self._layout, rows_as, span, tokens)
            for c, span in zip(cut(found, self._layout, spans), spans, strict=True)
        ]
        self._logprobs, self._answer = self._run(self._caches)

    def measure(self, decoder: Decoder) -> Quality:
        """Put all records through a codec and continue on what comes back."""
        back, stored, raw = [], 0, 0
        for record in self.records:
            decoded, size, sinks = decoder(record)
            back.append(decoded)
            stored += size - sinks
            raw += sum(spec.nbytes for spec in record.header.tensors) - sinks
        logprobs, answer = self._run(self._with_rows(back))
        p = np.exp(self._logprobs)
        kl = float((p * (self._logprobs - logprobs)).sum(axis=-1).mean())
        top1 = float((self._logprobs.argmax(-1) == logprobs.argmax(-1)).mean())
        same = [a == b for a, b in zip(self._answer, answer, strict=True)]
        greedy = (same.index(False) if False in same else len(same)) if self.greedy else None
        return Quality(kl, top1, greedy, stored, raw)

    def _with_rows(self, records: Sequence[Record]) -> list[CacheObject]:
        caches = copy.deepcopy(self._caches)
        rows = {}
        for i, spec in enumerate(records[0].header.tensors):
            parts = [_array(record, i) for record in records]
            rows[spec.name] = mx.concatenate(parts, axis=1)
        for leaf, cache, (_, _, _, placed) in zip(
            leaves(caches), _flat(caches), self._layout.parts, strict=True
        ):
            if leaf.cuttable and len(leaf.rows) == 2:
                arrays = [rows[name][first : first + n] for name, first, n in placed]
                cache.keys, cache.values = (
                    a[None].astype(old.dtype)
                    for a, old in zip(arrays, (cache.keys, cache.values), strict=True)
                )
        return caches

    def _run(self, caches: Sequence[CacheObject]) -> tuple[np.ndarray, list[int]]:
        """Log-probabilities ``[predict, vocabulary]`` and the greedy continuation."""
        fresh = copy.deepcopy(list(caches))
        logits = self._model(mx.array([self._next]), cache=fresh)[0].astype(mx.float32)
        logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        answer: list[int] = []
        fresh, token = copy.deepcopy(list(caches)), self._next[0]
        for _ in range(self.greedy):
            logits = self._model(mx.array([[token]]), cache=fresh)[0, -1]
            token = int(mx.argmax(logits))
            answer.append(token)
        return logprobs, answer


def round_rows(caches: Sequence[CacheObject], length: int, dtype: str) -> None:
    """Round the first ``length`` rows of plain KV caches to a dtype, in place, and cut the rest."""
    for cache in _flat(caches):
        if type(cache).__name__ == "KVCache":
            cache.keys, cache.values = (
                a[..., :length, :].astype(DTYPES[dtype]).astype(a.dtype)
                for a in (cache.keys, cache.values)
            )


def _record(
    tensors: dict[str, tuple[str, tuple[int, ...], memoryview]],
    layout: Layout,
    rows_as: str,
    span: tuple[int, int],
    tokens: Sequence[int],
) -> Record:
    specs, data = [], []
    groups = {}
    for name, (dtype, shape, raw) in tensors.items():
        if dtype in ("F32", "F16", "BF16") and dtype != rows_as:
            array = mx.array(np.frombuffer(raw, np.uint8)).view(DTYPES[dtype])
            cast = array.astype(DTYPES[rows_as]).view(mx.uint8)
            mx.eval(cast)
            dtype, raw = rows_as, np.array(cast).data
        specs.append(TensorSpec(name, dtype, shape))
        data.append(raw)
        groups[name] = (dtype, shape[0], shape[2])
    text = Layout(groups, layout.parts).dumps()
    ids = np.array(tokens[span[0] : span[1]], "<i8").tobytes()
    header = Header(bytes(16), bytes(16), "block", span[0], ids, text, tuple(specs))
    return Record(header, tuple(data))


def _array(record: Record, i: int) -> mx.array:
    spec = record.header.tensors[i]
    raw = mx.array(np.frombuffer(record.data[i], np.uint8))
    return raw.view(DTYPES[spec.dtype]).reshape(spec.shape)


def _flat(caches: Sequence[CacheObject]) -> list[CacheObject]:
    found = []
    for cache in caches:
        found += _flat(cache.caches) if type(cache).__name__ == "CacheList" else [cache]
    return found


def sink_bytes(record: Record, coded: Sequence[Coded]) -> int:
    """Bytes of a record's exact sinks in its KVTC payloads."""
    total = 0
    for spec, tensor in zip(record.header.tensors, coded, strict=True):
        sinks = tensor.params.get("sinks", 0)
        total += sinks * spec.nbytes // max(1, spec.shape[1]) if sinks else 0
    return total
