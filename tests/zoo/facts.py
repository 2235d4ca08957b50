"""What each architecture keeps while it reads a prompt: measured, not read from the sources.

`python -m tests.zoo.facts [--json FILE] [NAME ...]` prints a table of all of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as host_cache

from tests.zoo import models, reference

PROMPT = 277
ATTRIBUTES = {
    "KVCache": {"keys", "values", "offset"},
    "RotatingKVCache": {"keep", "keys", "values", "offset", "max_size", "_idx"},
    "ArraysCache": {"cache", "left_padding", "lengths"},
    "ChunkedKVCache": {"keys", "values", "offset", "chunk_size", "start_position"},
    "CacheList": {"caches"},
}


@dataclass
class Facts:
    name: str
    error: str | None = None
    layers: int = 0
    caches: list[str] = field(default_factory=list)
    mergeable: bool = False
    foreign_classes: list[str] = field(default_factory=list)  # not of mlx_lm.models.cache
    foreign_attributes: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)  # of each distinct leaf, after the prompt
    empty_after_prefill: int = 0  # leaves that hold nothing although the prompt was read
    outside_state: list[str] = field(default_factory=list)  # model attributes that changed
    distinct: int = 0  # distinct most likely tokens over the prompt
    # Largest difference of logits to one call over the whole prompt, in units of their deviation,
    # by chunk size. 0.0 is equality to the bit.
    chunks: dict[str, float] = field(default_factory=dict)
    copied: float | None = None  # the same after a copy of the cache into a fresh model


def run(model: nn.Module, cache: list[Any], ids: list[int], cuts: Iterable[int]) -> mx.array:
    """Logits (tokens, vocabulary) of `ids`, fed in calls that end at `cuts` and at the end."""
    parts = []
    edges = sorted({0, *(c for c in cuts if 0 < c < len(ids)), len(ids)})
    for start, end in itertools.pairwise(edges):
        logits = model(mx.array([ids[start:end]]), cache=cache)
        mx.eval(logits)
        parts.append(logits[0].astype(mx.float32))
    return mx.concatenate(parts, axis=0)


def difference(got: mx.array, want: mx.array) -> float:
    """Largest absolute difference over the standard deviation of `want`; 0.0 if bit-equal."""
    a, b = np.array(got), np.array(want)
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)):
        return float("inf")
    return max(float(np.abs(a[finite] - b[finite]).max() / b[finite].std()), 1e-12)


def observe(name: str) -> Facts:
    facts = Facts(name)
    model = models.build(name)
    facts.layers = len(model.layers)
    cache = models.make_cache(name, model)
    facts.caches = [reference.describe(c) for c in cache]
    facts.mergeable = all(hasattr(c, "merge") for c in cache)
    ids = models.tokens(PROMPT)
    before = _attributes(model)
    try:
        whole = run(model, cache, ids, [])
    except Exception as error:
        facts.error = f"{type(error).__name__}: {error}"
        return facts
    facts.distinct = len(np.unique(np.array(mx.argmax(whole, axis=-1))))
    facts.outside_state = sorted(
        path for path, value in _attributes(model).items() if before.get(path) != value
    )
    for leaf in reference.leaves(cache):
        kind = type(leaf).__name__
        if getattr(host_cache, kind, None) is not type(leaf):
            facts.foreign_classes.append(f"{type(leaf).__module__}.{kind}")
        extra = set(vars(leaf)) - ATTRIBUTES.get(kind, set())
        facts.foreign_attributes += [f"{kind}.{a}" for a in sorted(extra)]
        facts.empty_after_prefill += int(bool(leaf.empty()))
    facts.foreign_classes = sorted(set(facts.foreign_classes))
    facts.foreign_attributes = sorted(set(facts.foreign_attributes))
    facts.shapes = sorted({_shapes(leaf) for leaf in reference.leaves(cache)})

    for size in (64, 48, 7):
        facts.chunks[str(size)] = _recut(name, model, ids, range(size, PROMPT, size), whole)
    # As the servers do it: all but the last token, then the last one alone.
    facts.chunks["last alone"] = _recut(name, model, ids, [PROMPT - 1], whole)

    facts.copied = _copied(name, model, ids)
    return facts


def _recut(
    name: str, model: nn.Module, ids: list[int], cuts: Iterable[int], whole: mx.array
) -> float:
    """Difference to `whole` when the prompt is cut; infinite where the host's own code fails."""
    try:
        return difference(run(model, models.make_cache(name, model), ids, cuts), whole)
    except ValueError:
        return float("inf")


def _copied(name: str, model: nn.Module, ids: list[int]) -> float:
    """Prefill in `model`, copy the cache, continue in a new model that never saw the prompt."""
    at = PROMPT - 40
    want = run(model, models.make_cache(name, model), ids, [at])[at:]
    first = models.make_cache(name, model)
    run(model, first, ids[:at], [])
    other = models.build(name)
    got = run(other, reference.load(reference.dump(first)), ids[at:], [])
    return difference(got, want)


def _attributes(model: nn.Module) -> dict[str, Any]:
    """Fingerprints of everything that the modules of `model` hold."""
    result: dict[str, Any] = {}
    for path, module in model.named_modules():
        for key, value in [*module.items(), *vars(module).items()]:
            if isinstance(value, nn.Module):
                continue
            result[f"{path}.{key}"] = _fingerprint(value)
    return result


def _fingerprint(value: Any) -> Any:
    if isinstance(value, mx.array):
        return (tuple(value.shape), str(value.dtype), float(value.astype(mx.float32).sum()))
    if isinstance(value, list | tuple):
        return [_fingerprint(item) for item in value if not isinstance(item, nn.Module)]
    if isinstance(value, dict) and not isinstance(value, nn.Module):
        return {key: _fingerprint(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return type(value).__name__


def _shapes(leaf: Any) -> str:
    def show(value: Any) -> str:
        if isinstance(value, mx.array):
            return f"{value.dtype}{tuple(value.shape)}".replace("mlx.core.", "")
        if isinstance(value, list | tuple):
            return "[" + ", ".join(show(item) for item in value) + "]"
        return str(value)

    parts = [f"{key}={show(value)}" for key, value in vars(leaf).items()]
    return f"{type(leaf).__name__}({', '.join(parts)})"


def _summary(facts: Facts) -> str:
    classes = ", ".join(f"{n} {c}" for c, n in Counter(facts.caches).items())
    head = f"{facts.name:24s} {facts.layers:2d} layers: {classes}"
    if facts.error:
        return f"{head}\n    FAILS {facts.error}"
    chunks = ", ".join(f"{size}: {value:.1e}" for size, value in facts.chunks.items() if value)
    notes = [
        "" if facts.mergeable else "not mergeable",
        f"foreign {facts.foreign_classes}" if facts.foreign_classes else "",
        f"attributes {facts.foreign_attributes}" if facts.foreign_attributes else "",
        f"empty {facts.empty_after_prefill}" if facts.empty_after_prefill else "",
        f"outside {facts.outside_state[:6]}" if facts.outside_state else "",
        f"copy differs {facts.copied:.1e}" if facts.copied else "",
        f"chunks differ ({chunks})" if chunks else "chunks equal",
        f"{facts.distinct} distinct",
    ]
    return f"{head}\n    {'; '.join(note for note in notes if note)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    table = []
    for name in options.names or models.names() + models.variants():
        facts = observe(name)
        table.append(asdict(facts))
        print(_summary(facts), flush=True)
    for name in models.unknown():
        print(f"{name:24s} no configuration")
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
