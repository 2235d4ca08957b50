"""The sweep under `--kv-bits`: the host converts the layers to quantised KV between two pieces.

    python -m tests.zoo.quantised [NAME ...]

Group size 32, since the heads of the tiny models have 32 dimensions; the prefill step is a block, so
that a cold run converts after the first one.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.zoo import models, reference
from tests.zoo.facts import difference
from tests.zoo.sweep import BLOCK, DECODED, GRID, SEEN, Entry, WrongStore, table
from thunder_patches.cache.store import CacheStore
from thunder_patches.config import Settings
from thunder_patches.hosts.mlx_lm.serial import maybe_quantize_kv_cache
from thunder_patches.hosts.quantised import QuantisedSession
from thunder_patches.hosts.runtime import Runtime
from thunder_patches.hosts.session import Family, Hit, Session
from thunder_patches.observe.counters import Counters

GROUP = 32


class HostFails(Exception):
    """The host's own code can't run this model with quantised KV; the message says why."""


def sweep(name: str, bits: int, folder: Path) -> dict[str, float]:
    """Differences to a cold run at each point of resumption, "control" among them.

    Raises:
        HostFails: when a cold run fails already.
    """
    return _Trial(name, bits, table()[models.module_of(name)], folder).restore()


class _Trial:
    def __init__(self, name: str, bits: int, entry: Entry, folder: Path) -> None:
        self.name, self.bits, self.entry, self.folder = name, bits, entry, folder
        self.model = models.build(name)
        self.block, blocks = (BLOCK, 3) if entry.cuts == "any" else (GRID, 2)
        self.ids = models.tokens(blocks * self.block + 21)
        self.everything = self.ids + models.tokens(DECODED, seed=7)
        cache = models.make_cache(name, self.model)
        try:
            self.cold = self._run(cache, 0)
        except Exception as error:
            raise HostFails(f"{type(error).__name__}: {error}") from error
        if not any(type(leaf).__name__ == "QuantizedKVCache" for leaf in reference.leaves(cache)):
            raise HostFails("no layer of it can be quantised")

    def _quantise(self, cache: list[Any]) -> None:
        host = importlib.import_module("mlx_lm.generate")
        original = getattr(
            host.maybe_quantize_kv_cache, "__wrapped__", host.maybe_quantize_kv_cache
        )
        maybe_quantize_kv_cache(original, None, (cache, 0, GROUP, self.bits), {})

    def _run(self, cache: list[Any], held: int) -> mx.array:
        length = len(self.ids)
        steps = range(self.block, length - 1, self.block)
        edges = {held, *steps, *range(length - 1, length + DECODED + 1)}
        parts = []
        for start, end in itertools.pairwise(sorted(e for e in edges if e >= held)):
            logits = self.model(mx.array([self.everything[start:end]]), cache=cache)
            self._quantise(cache)
            mx.eval(logits)
            parts.append(logits[0].astype(mx.float32))
        return mx.concatenate(parts, axis=0)

    @contextmanager
    def _session(self, store_class: type[CacheStore] = CacheStore) -> Iterator[QuantisedSession]:
        counters = Counters()
        store = store_class(
            self.folder, disk_budget=1 << 30, ram_budget=0, prefetch=False, counters=counters
        )
        runtime = Runtime(Settings(block_tokens=self.block, snapshot_stride=1), counters, store)
        family = Family(self.entry.cuts == "any", self.entry.decode == "same")

        def make() -> list[Any]:
            return models.make_cache(self.name, self.model)

        identity, variant = f"zoo:{self.name}", f" kv_bits={self.bits}"
        plain = Session(runtime, identity, family, make)
        quantised = Session(runtime, identity, family, make, variant=variant)
        try:
            yield QuantisedSession(plain, quantised, start=0, step=self.block)
            if not store.flush(30):
                raise TimeoutError("the store did not write everything in 30 s")
        finally:
            store.close()

    def restore(self) -> dict[str, float]:
        length = len(self.ids)
        with self._session() as session:
            sequence = session.sequence(self.ids)
            cache = models.make_cache(self.name, self.model)
            due = sequence.due(0, length - 1)
            edges = sorted({0, *due, *range(self.block, length - 1, self.block), length - 1})
            for start, end in itertools.pairwise(edges):
                mx.eval(self.model(mx.array([self.ids[start:end]]), cache=cache))
                self._quantise(cache)
                sequence.store(cache, end, snapshot=end in due)
            logits = self.model(mx.array([self.ids[-1:]]), cache=cache)[0, -1]
            sequence.store(cache, length, snapshot=True, logits=logits)
        found: dict[str, float] = {}
        with self._session() as session:
            for count in (self.block + 1, 2 * self.block, 2 * self.block + 1, length):
                hit = session.sequence(self.ids[:count]).lookup(longer_than=0, full=count == length)
                if hit is not None:
                    found[str(hit.length)] = self._compare(hit)
        with self._session(WrongStore) as session:
            hit = session.sequence(self.ids[: 2 * self.block + 1]).lookup(longer_than=0, full=False)
            found["control"] = 0.0 if hit is None else self._compare(hit)
        return found

    def _compare(self, hit: Hit) -> float:
        first = 0.0
        if hit.logits is not None:
            first = difference(hit.logits[None].astype(mx.float32), self.cold[hit.length - 1][None])
        caches = reference.load(reference.dump(hit.caches))
        return max(first, difference(self._run(caches, hit.length), self.cold[hit.length :]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    for name in options.names or models.names() + models.variants():
        if table()[models.module_of(name)].result == "no":
            continue
        for bits in (4, 8):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = sweep(name, bits, Path(folder))
                except HostFails as error:
                    print(f"{name:24s} {bits} bits: the host fails: {str(error)[:120]}", flush=True)
                    continue
            control = found.pop("control")
            wrong = {at: value for at, value in found.items() if value}
            verdict = "exact" if not wrong and len(found) > 1 else f"DIFFERS {wrong}"
            weak = "" if control > SEEN else " WEAK"
            print(
                f"{name:24s} {bits} bits: {verdict} at {', '.join(found)}, control "
                f"{control:.0e}{weak}",
                flush=True,
            )


if __name__ == "__main__":
    main()
