"""Calibrate KVTC for a loaded model: run texts through it, gather statistics, fit, choose steps.

Each piece of text goes forward and back once. Forward gives the keys and values; back gives, for a
token sampled from the model's own distribution at each place, the gradient of its log-likelihood with
respect to every key and value. Their outer products are the model's Fisher information: to second
order, half of error x Fisher x error is the KL divergence that an error costs (Amari's metric), so
they say in which directions an error matters. No layer's inner workings need to be known for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import mlx.core as mx
import numpy as np

from ..cache.record import Record
from ..codec.calibration import SINKS, Basis, Calibration
from ..codec.fit import Moments, groups, load_moments, save_moments
from ..codec.kvtc import Kvtc, project, quantise
from ..codec.layout import rows_of
from ..codec.numbers import to_float32
from .layers import CacheObject, Layout, leaves
from .quality import Document, Quality, sink_bytes
from .rope import check, rotaries

PIECE = 512  # tokens that go through the model at once
TARGETS = {"high": 0.002, "balanced": 0.0075, "small": 0.024}
"""KL divergence, in nats a token, that each quality aims at on text held out. On the small model,
contexts of 1,536 tokens showed about half of what the short held-out pieces here show."""
SLACK = 2.0  # an encoded block's error may be so many times the mean error on text held out
Step = tuple[int, int, str]
"""Pieces of text done, of how many, and what is done next."""
Progress = Callable[[int, int, str], None]
Result = TypeVar("Result")
MakeCache = Callable[[], Sequence[CacheObject]]


class CannotCalibrate(Exception):
    """This model's keys and values can't be coded with KVTC; the message says why."""


def pieces(texts: Sequence[Sequence[int]], size: int = PIECE) -> list[list[int]]:
    """Token sequences of at most ``size``, shuffled so that every share of them has all kinds."""
    cut = [list(t[i : i + size]) for t in texts for i in range(0, len(t), size)]
    cut = [piece for piece in cut if len(piece) >= 4 * SINKS]
    random.Random(0).shuffle(cut)
    return cut


class Collector:
    """Statistics of a model's attention keys and values, one piece of text after another.

    Raises:
        CannotCalibrate: no attention layer with plain keys and values.
        rope.UnknownRotary: a rotary embedding that can't be undone exactly.
    """

    def __init__(self, model: Any, make_cache: MakeCache) -> None:
        self._model, self._make_cache = model, make_cache
        caches = list(make_cache())
        model(mx.array([[100] * 48]), cache=caches)
        found = leaves(caches)
        layout = Layout.of(found)
        rows = {name: r for name, r in rows_of(layout.dumps()).items() if r.attention}
        if not rows:
            raise CannotCalibrate("no layer keeps attention keys and values")
        self.rotary = rotaries(model, layout)
        self.shapes = {name: (r.heads, r.dim) for name, r in rows.items()}
        self.moments = {
            name: Moments(groups(r.layers, r.dim), r.heads, r.dim) for name, r in rows.items()
        }
        self._leaves = [
            (path, placed)
            for path, _, _, placed in layout.parts
            if placed and all(name in rows for name, _, _ in placed)
        ]
        if all(leaf.cuttable for leaf in found):
            check(
                self.rotary,
                self._join({leaf.path: [a for _, a in leaf.rows] for leaf in found}, 48),
            )
        self.gradients = True

    def add(self, piece: Sequence[int]) -> None:
        """Run one piece through the model and add what it shows."""
        rows, slopes = self._both(piece) if self.gradients else (self._forward(piece), None)
        for name, moments in self.moments.items():
            keep = slice(SINKS, None)
            gradient = None if slopes is None else self._undone(name, slopes)[:, keep]
            moments.add(self._undone(name, rows)[:, keep], gradient)

    def bases(self) -> dict[str, tuple[Basis, ...]]:
        return {name: moments.fit() for name, moments in self.moments.items()}

    def _undone(self, name: str, rows: dict[str, np.ndarray]) -> np.ndarray:
        blank = Calibration("", {}, {}, self.rotary, {}, {})
        return blank.turn(name, rows[name], 0, inverse=True)

    def _forward(self, piece: Sequence[int]) -> dict[str, np.ndarray]:
        caches = list(self._make_cache())
        self._model(mx.array([list(piece)]), cache=caches)
        return self._join(
            {leaf.path: [a for _, a in leaf.rows] for leaf in leaves(caches)}, len(piece)
        )

    def _both(
        self, piece: Sequence[int]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray] | None]:
        tokens = mx.array([list(piece)])
        # A key made of the text: whatever ran before, the same is drawn.
        key = mx.random.key(crc32(np.array(piece, "<i8").tobytes()))

        def likelihood(deltas: dict[str, list[mx.array]]) -> tuple[mx.array, Any]:
            caches, seen = list(self._make_cache()), {}
            for path, cache in _by_path(caches):
                if path in deltas:
                    seen[path] = _probe(cache, deltas[path])
            logits = self._model(tokens, cache=caches)[0].astype(mx.float32)
            chosen = mx.random.categorical(mx.stop_gradient(logits), key=key)[:, None]
            picked = mx.take_along_axis(logits, chosen, axis=-1)[:, 0]
            return (picked - mx.logsumexp(logits, axis=-1)).sum(), seen

        deltas = {
            path: [
                mx.zeros((1, n, len(piece), self.shapes[name][1]), mx.float32)
                for name, _, n in placed
            ]
            for path, placed in self._leaves
        }
        try:
            (_, seen), slopes = mx.value_and_grad(likelihood)(deltas)
            mx.eval(seen, slopes)
        except (ValueError, RuntimeError, NotImplementedError):
            self.gradients = False
            return self._forward(piece), None
        return self._join(seen, len(piece), 4), self._join(slopes, len(piece), 4)

    def _join(
        self, arrays: dict[str, Sequence[mx.array]], tokens: int, axes: int = 3
    ) -> dict[str, np.ndarray]:
        """Arrays of the leaves by path to float32 rows ``[heads, tokens, dim]`` by tensor name."""
        out = {n: np.empty((heads, tokens, d), np.float32) for n, (heads, d) in self.shapes.items()}
        for path, placed in self._leaves:
            for array, (name, first, n) in zip(arrays[path], placed, strict=True):
                rows = array[0] if axes == 4 else array
                out[name][first : first + n] = np.array(rows[:, :tokens].astype(mx.float32))
        return out


@dataclass
class Trial:
    """A calibration whose steps are being chosen, and the documents that they are tried on."""

    calibration: Calibration
    documents: Sequence[Document]

    def at(self, step: float) -> Generator[None, None, tuple[list[Quality], dict[str, float]]]:
        """Quality on each document, a step of work each, and the mean error a token by tensor."""
        errors: dict[str, list[float]] = {name: [] for name in self.calibration.bases}
        steps = {"trial": step}
        limits = {"trial": dict.fromkeys(self.calibration.bases, float("inf"))}
        calibration = replace(self.calibration, steps=steps, limits=limits)
        codec = Kvtc(lambda id: calibration, calibration, "trial")

        def through(record: Record) -> tuple[Record, int, int]:
            _errors(calibration, record, step, errors)
            return through_codec(codec, record)

        found = []
        for document in self.documents:
            yield
            found.append(document.measure(through))
        return found, {name: float(np.mean(values)) for name, values in errors.items()}


def through_codec(codec: Any, record: Record) -> tuple[Record, int, int]:
    """A record encoded and decoded, its stored bytes and how many of them are exact sinks."""
    header = record.header
    coded = [codec.encode(s, d, header) for s, d in zip(header.tensors, record.data, strict=True)]
    data = [codec.decode(s, c, header) for s, c in zip(header.tensors, coded, strict=True)]
    return Record(header, tuple(data)), sum(c.nbytes for c in coded), sink_bytes(record, coded)


def choose_steps(
    collector: Collector, model_id: str, documents: Sequence[Document]
) -> Generator[None, None, tuple[dict[str, float], dict[str, dict[str, float]], dict[str, Any]]]:
    """Step sizes, limits and measured quality, for bases that haven't seen the documents.

    KL grows about with the square of the step; three rounds of that rule find each target.
    """
    yield
    trial = Trial(_draft(collector, model_id, collector.bases()), documents)
    step = _first_step(trial)
    known: list[tuple[float, float, list[Quality], dict[str, float]]] = []

    def measured(step: float) -> Iterator[None]:
        found, errors = yield from trial.at(step)
        known.append((step, float(np.mean([q.kl for q in found])), found, errors))

    yield from measured(step)
    for target in TARGETS.values():
        for _ in range(3):
            near = min(known, key=lambda k: abs(np.log(k[1] / target)))
            if abs(np.log(near[1] / target)) < 0.1:
                break
            yield from measured(near[0] * (target / near[1]) ** 0.5)
    steps, limits, report = {}, {}, {}
    for quality, target in TARGETS.items():
        step, kl, found, errors = min(known, key=lambda k: abs(np.log(k[1] / target)))
        steps[quality] = float(step * min(1.0, (target / kl) ** 0.5))
        limits[quality] = {name: SLACK * error for name, error in errors.items()}
        report[quality] = {
            "kl": round(kl, 5),
            "top1": round(float(np.mean([q.top1 for q in found])), 4),
            "ratio": round(sum(q.raw for q in found) / sum(q.stored for q in found), 2),
        }
    return steps, limits, report


def finish(
    collector: Collector,
    model_id: str,
    steps: dict[str, float],
    limits: dict[str, dict[str, float]],
    report: dict[str, Any],
) -> Calibration:
    """The calibration from all statistics gathered, cut to the directions that are ever coded."""
    finest = min(steps.values()) / 2
    bases = {
        name: tuple(_cut(basis, finest) for basis in parts)
        for name, parts in collector.bases().items()
    }
    draft = _draft(collector, model_id, bases)
    about = {
        "held_out": report,
        "tokens": max(m.tokens for m in collector.moments.values()),
        "gradients": collector.gradients,
        "bases": {name: len(parts) for name, parts in bases.items()},
    }
    return replace(draft, steps=steps, limits=limits, measured=about)


def calibrate(
    model: Any,
    make_cache: MakeCache,
    model_id: str,
    texts: Sequence[Sequence[int]],
    *,
    progress: Progress = lambda done, total, what: None,
    state: Path | None = None,
    held_out: int = 4,
    size: int = PIECE,
) -> Calibration:
    """Calibrate a model on tokenised texts; see `calibrating`."""
    steps = calibrating(
        model, make_cache, model_id, texts, state=state, held_out=held_out, size=size
    )
    while True:
        try:
            progress(*next(steps))
        except StopIteration as end:
            return end.value


def calibrating(
    model: Any,
    make_cache: MakeCache,
    model_id: str,
    texts: Sequence[Sequence[int]],
    *,
    state: Path | None = None,
    held_out: int = 4,
    size: int = PIECE,
) -> Generator[Step, None, Calibration]:
    """Calibrate a model on tokenised texts, a step of work after each yield.

    The same model and texts give the same calibration to the bit on one machine, interrupted or not:
    what is drawn at random is drawn from the texts, and MLX's own random state isn't touched.

    Args:
        texts: more of them, of more kinds, give smaller blocks: 10,000 tokens are enough.
        state: file that statistics are kept in, so that a later call goes on where this one ended.
        size: tokens of a piece, the most that a step has to do with. The last quarter of those held
            out is what is predicted.
        held_out: pieces that step sizes are chosen on before they too count for the bases.

    Raises:
        CannotCalibrate, rope.UnknownRotary: for a model that KVTC can't be used with.
    """
    collector = Collector(model, make_cache)
    todo = pieces(texts, size)
    long = [piece for piece in todo if len(piece) == size][:held_out]
    if len(long) < 2:
        raise CannotCalibrate(f"expected 2 pieces of {size} tokens or more, found {len(long)}")
    rest = [piece for piece in todo if not any(piece is held for held in long)]
    done, total = 0, len(todo) + 1
    if state is not None and state.exists():
        try:
            done = load_moments(state, collector.moments)
        except (ValueError, OSError):
            state.unlink(missing_ok=True)
    for i in range(done, len(rest)):
        yield i, total, "statistics"
        collector.add(rest[i])
        if state is not None and (i % 4 == 3 or i == len(rest) - 1):
            save_moments(state, collector.moments, i + 1)
    ahead, documents = size // 4, []
    for piece in long:
        yield len(rest), total, "steps"
        documents.append(Document(model, make_cache, piece, context=size - ahead, predict=ahead))
    choosing = choose_steps(collector, model_id, documents)
    steps, limits, report = yield from _telling(choosing, (len(rest), total, "steps"))
    for i, piece in enumerate(long):
        yield len(rest) + i, total, "statistics"
        collector.add(piece)
    yield total - 1, total, "bases"
    return finish(collector, model_id, steps, limits, report)


def _telling(work: Generator[None, None, Result], step: Step) -> Generator[Step, None, Result]:
    """The same work, with this said before each part of it."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value
        yield step


def _draft(collector: Collector, model_id: str, bases: dict[str, tuple[Basis, ...]]) -> Calibration:
    return Calibration(model_id, collector.shapes, bases, collector.rotary, {}, {})


def _first_step(trial: Trial) -> float:
    """A step near which half the coordinates' energy is lost to none: a start for the search."""
    variance = np.concatenate(
        [basis.variance for parts in trial.calibration.bases.values() for basis in parts]
    )
    return float(np.sqrt(12 * variance.sum() / len(variance)) / 16)


def _errors(
    calibration: Calibration, record: Record, step: float, into: dict[str, list[float]]
) -> None:
    for spec, data in zip(record.header.tensors, record.data, strict=True):
        sinks = max(0, calibration.sinks - record.header.start)
        rows = to_float32(data, spec.dtype).reshape(spec.shape)[:, sinks:]
        start = record.header.start + sinks
        coded, weighted = project(calibration, spec.name, rows, start)
        _, _, error = quantise(calibration, spec.name, coded, weighted, step)
        into[spec.name].append(error / max(1, rows.shape[1]))


def _cut(basis: Basis, step: float) -> Basis:
    """Without the directions whose numbers are practically always zero."""
    rank = max(1, int((np.sqrt(basis.variance) > step / 4).sum()))
    return replace(
        basis,
        directions=np.ascontiguousarray(basis.directions[:, :rank]),
        variance=basis.variance[:rank],
    )


def _by_path(caches: Sequence[CacheObject], prefix: str = "") -> Iterator[tuple[str, CacheObject]]:
    for i, cache in enumerate(caches):
        if type(cache).__name__ == "CacheList":
            yield from _by_path(cache.caches, f"{prefix}{i}.")
        else:
            yield f"{prefix}{i}", cache


def _probe(cache: CacheObject, deltas: Sequence[mx.array]) -> list[mx.array]:
    """Have a cache add ``deltas`` to the keys and values it is given; returns what it was given."""
    given: list[mx.array] = []
    update = cache.update_and_fetch

    def update_and_fetch(keys: mx.array, values: mx.array, *rest: Any, **more: Any) -> Any:
        given.extend((keys, values))
        keys, values = (a + d.astype(a.dtype) for a, d in zip((keys, values), deltas, strict=True))
        return update(keys, values, *rest, **more)

    cache.update_and_fetch = update_and_fetch
    return given
