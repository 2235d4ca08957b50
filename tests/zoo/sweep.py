"""Exact reuse, tried on every architecture of mlx-lm: prefill, store, restore, compare all logits.

    python -m tests.zoo.sweep [NAME ...]      prints the results
    python -m tests.zoo.sweep --write         writes compat/families.toml (newest known mlx-lm)
    python -m tests.zoo.sweep --older         under an older mlx-lm: notes what isn't so there

What is stored and restored goes through `hosts.session.Session` and a `CacheStore` in a folder, as
in a server; what a server does around them (pieces of prefill, the last token alone, decoding) is
done here with plain calls of the model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from packaging.version import Version

from tests.zoo import models, reference
from tests.zoo.facts import difference, run
from thunder_patches.cache.store import CacheStore, ReadJob
from thunder_patches.config import Settings
from thunder_patches.hosts.mlx_lm.adopt import adopt
from thunder_patches.hosts.runtime import Runtime
from thunder_patches.hosts.session import Family, Hit, Session
from thunder_patches.observe.counters import Counters
from thunder_patches.patching import compat
from thunder_patches.tensors.layers import UnsupportedCache, describe

BLOCK = 64
GRID = 256
"""Cuts at its multiples are exact where a family scans the prompt in steps of its own (ssm: 256)."""
DECODED = 4
UNSTABLE = 1e-3
"""Deviations of the logits. A host that moves by more with its own prefill step isn't tried."""
SEEN = 1e-4
"""What a wrong block must change at the least."""
PIECES = (7, 50, 64, 131, 190)
TABLE = "families.toml"


@dataclass(frozen=True)
class Entry:
    """A family's line in the table.

    result: "exact" (to the bit), "tolerance" (rounding, as between the host's own prefill steps, at
    most `tolerance` deviations of the logits) or "no" (`reason`). kind: "full", "sliding" (windows
    or chunks), "hybrid" (state). cuts: "any", or "block" where only cuts between blocks of 256
    tokens leave the bits alone. decode: "same" if a decoded token leaves the state that prefill
    would leave. since: the first mlx-lm of which this is true; not eligible in earlier ones.
    """

    result: str
    kind: str
    cuts: str = "any"
    decode: str = "same"
    tolerance: float = 0.0
    reason: str = ""
    since: str = ""


@dataclass
class Outcome:
    """What was tried with one configuration, and the largest difference at each point."""

    entry: Entry
    points: dict[str, float] = field(default_factory=dict)
    control: float = math.inf
    problems: list[str] = field(default_factory=list)


def sweep(name: str, folder: Path) -> Outcome:
    """Measure how `name` behaves, then store and restore at several points in `folder`."""
    model = models.build(name)
    try:
        describe(models.make_cache(name, model))
    except UnsupportedCache as error:
        return Outcome(Entry("no", "hybrid", reason=str(error)))
    entry = _behaviour(name, model)
    if entry.result == "no":
        return Outcome(entry)
    trial = Trial(name, model, entry, folder)
    outcome = Outcome(entry)
    trial.fill()
    try:
        trial.restore(outcome)
    except HostWrong as error:
        return Outcome(replace(entry, result="no", reason=str(error)))
    worst = max(outcome.points.values(), default=0.0)
    if worst >= UNSTABLE:
        outcome.problems.append(f"restored logits differ by {worst:.1e} deviations")
    if worst or entry.tolerance:
        tolerance = _decade(max(worst, entry.tolerance))
        outcome.entry = replace(entry, result="tolerance", tolerance=tolerance)
    if outcome.control < max(SEEN, 10 * worst):
        outcome.problems.append(f"a wrong block changed the logits by {outcome.control:.1e} only")
    return outcome


def _behaviour(name: str, model: nn.Module) -> Entry:
    """How the host itself behaves when prefill is cut and when tokens are decoded."""
    entry = Entry("exact", _kind(models.make_cache(name, model)))
    ids = models.tokens(3 * BLOCK + 21)
    try:
        whole = _feed(name, model, ids, [])
        moved = difference(_feed(name, model, ids, PIECES), whole)
    except ValueError as error:
        return replace(entry, result="no", reason=f"fails in mlx-lm itself: {error}")
    if not np.isfinite(moved) or moved >= UNSTABLE:
        reason = "the host's own logits depend on the prefill step"
        return replace(entry, result="no", reason=reason)
    if moved:
        entry = replace(entry, cuts="block")
        longer = models.tokens(2 * GRID + 85)
        whole_longer = _feed(name, model, longer, [])
        moved = difference(_feed(name, model, longer, [GRID, 2 * GRID]), whole_longer)
        entry = replace(entry, tolerance=moved)
        if moved:
            entry = replace(entry, cuts="any")
    single = [*range(100, 112), len(ids) - 1]
    if difference(_feed(name, model, ids, single)[112:], whole[112:]):
        entry = replace(entry, decode="differs")
    return entry


class HostWrong(Exception):
    """What the host computes can't be compared with; the message says why."""


class Trial:
    """One model, its cold run, and a store that holds what that run left."""

    def __init__(self, name: str, model: nn.Module, entry: Entry, folder: Path) -> None:
        self.name = name
        self.model = model
        self.entry = entry
        self.folder = folder
        self.block = GRID if entry.cuts == "block" else BLOCK
        rest = 85 if entry.cuts == "block" else 21
        self.ids = models.tokens((2 if entry.cuts == "block" else 3) * self.block + rest)
        self.answer = models.tokens(DECODED, seed=7)
        self.everything = self.ids + self.answer
        self.cold = self._run(models.make_cache(name, model), 0)

    def _run(self, cache: list[Any], held: int, cuts: Iterable[int] = ()) -> mx.array:
        """Logits from token `held` on: pieces of the prompt, its last token alone, the answer."""
        length = len(self.ids)
        edges = [p - held for p in (*cuts, *range(length - 1, length + DECODED))]
        return run(self.model, cache, self.everything[held:], edges)

    @contextmanager
    def session(self, store_class: type[CacheStore] = CacheStore) -> Iterator[Session]:
        counters = Counters()
        store = store_class(
            self.folder, disk_budget=1 << 30, ram_budget=0, prefetch=False, counters=counters
        )
        settings = Settings(block_tokens=self.block, snapshot_stride=1)
        family = Family(self.entry.cuts == "any", self.entry.decode == "same")
        try:
            yield Session(
                Runtime(settings, counters, store),
                f"zoo:{self.name}",
                family,
                lambda: models.make_cache(self.name, self.model),
            )
            if not store.flush(30):
                raise TimeoutError("the store did not write everything in 30 s")
        finally:
            store.close()

    def fill(self) -> None:
        """A first request: prefill in pieces as the adapters cut it, then the first token."""
        with self.session() as session:
            sequence = session.sequence(self.ids)
            sequence.boundaries = (self.block + self.block // 2 + 3,)
            cache = session.make_cache()
            end = len(self.ids) - 1
            due = sequence.due(0, end)
            for start, stop in itertools.pairwise(sorted({0, *due, end})):
                mx.eval(self.model(mx.array([self.ids[start:stop]]), cache=cache))
                sequence.store(cache, stop, snapshot=stop in due)
            logits = self.model(mx.array([self.ids[-1:]]), cache=cache)[0, -1]
            sequence.store(cache, len(self.ids), snapshot=True, logits=logits)

    def restore(self, outcome: Outcome) -> None:
        """Later requests that know more and more of the prompt; the rest is the cold run's."""
        length, lengths = len(self.ids), set()
        known = [self.block + 1, 2 * self.block, 2 * self.block + 1, length - 4, length]
        with self.session() as session:
            for count in known:
                hit = session.sequence(self.ids[:count]).lookup(longer_than=0, full=count == length)
                if hit is None:
                    outcome.problems.append(f"nothing found for {count} tokens")
                    continue
                if hit.source != "ssd":
                    outcome.problems.append(f"came from {hit.source}, not from the folder")
                lengths.add(hit.length)
                outcome.points[str(hit.length)] = self._compare(hit)
                if count == 2 * self.block + 1 and self._mergeable(hit.caches):
                    outcome.points[f"{hit.length} batched"] = self._batched(hit)
        if length not in lengths:
            outcome.problems.append("no full hit for the whole prompt")
        if len(lengths) < (2 if self.entry.cuts == "block" else 3):
            outcome.problems.append(f"restored at {sorted(lengths)} only")
        with self.session(WrongStore) as session:
            hit = session.sequence(self.ids[: 2 * self.block + 1]).lookup(longer_than=0, full=False)
            outcome.control = 0.0 if hit is None else self._compare(hit)

    def _compare(self, hit: Hit) -> float:
        cold = self.cold
        if hit.logits is not None:
            first = difference(hit.logits[None].astype(mx.float32), cold[hit.length - 1][None])
        else:
            first = 0.0
        # Evaluated here, because the caller's caches go on to other comparisons.
        caches = reference.load(reference.dump(hit.caches))
        return max(first, difference(self._run(caches, hit.length), cold[hit.length :]))

    def _mergeable(self, caches: Sequence[Any]) -> bool:
        return all(hasattr(cache, "merge") for cache in caches)

    def _batched(self, hit: Hit) -> float:
        """The same as a batch of one, which has cache classes of its own.

        Raises:
            HostWrong: when the host's own batch of one hasn't the logits of its serial run.
        """
        merged = [cache.merge([cache]) for cache in adopt(hit.caches)]
        fresh = [cache.merge([cache]) for cache in models.make_cache(self.name, self.model)]
        restored: mx.array | None = None
        failed: Exception | None = None
        try:
            restored = self._run(merged, hit.length)
        except ValueError as error:
            failed = error
        if restored is not None and not difference(restored, self.cold[hit.length :]):
            return 0.0
        try:
            cold = self._run(fresh, 0)
        except ValueError:
            return 0.0  # The host fails too (afm7 in 0.31.3): no answer to compare with.
        if restored is None:
            raise AssertionError("a batch fails with restored caches only") from failed
        if difference(cold, self.cold) >= UNSTABLE:
            raise HostWrong("in mlx-lm itself a batch of one has other logits than a single run")
        return difference(restored, cold[hit.length :])


class WrongStore(CacheStore):
    """A store that gives one wrong record: in the last block, or the state, signs are flipped.

    (Moving whole tokens about would not do: attention doesn't see the order of its keys.)
    """

    def read_many(self, jobs: Sequence[ReadJob]) -> list[Any]:
        found = list(super().read_many(jobs))
        blocks = [job for job in jobs if job.kind == "block" and _views(job)]
        for view in _views((blocks or list(jobs))[-1]):
            np.frombuffer(view, np.uint8)[3::4] ^= 0x80
        return found


def _views(job: ReadJob) -> list[memoryview]:
    return [part for parts in job.targets.values() for part in parts if not isinstance(part, int)]


def _feed(name: str, model: nn.Module, ids: list[int], cuts: Iterable[int]) -> mx.array:
    """Logits of a prompt fed in pieces, its last token alone."""
    return run(model, models.make_cache(name, model), ids, [*cuts, len(ids) - 1])


def _kind(cache: list[Any]) -> str:
    classes = {type(leaf).__name__ for leaf in reference.leaves(cache)}
    if classes - {"KVCache", "RotatingKVCache", "ChunkedKVCache"}:
        return "hybrid"
    return "full" if classes == {"KVCache"} else "sliding"


def _decade(value: float) -> float:
    """The smallest power of ten that isn't below `value`."""
    return float(f"1e{math.ceil(math.log10(value))}")


# The table

HEAD = """\
# Model families by the name of their module in mlx_lm/models: whether a prefix that is stored and
# restored gives the logits of a cold run. Written by `python -m tests.zoo.sweep --write`, which
# tries a small float32 model of each on the CPU; checked by tests/hosts/test_sweep.py.
#   result     exact: to the bit; tolerance: at most `tolerance` deviations of the logits off, as
#              the host itself between two prefill steps; no: not eligible, for the `reason`
#   kind       full (attention to everything), sliding (windows or chunks), hybrid (state)
#   cuts       any: prefill may be cut everywhere (in pieces of two tokens or more) and stays the
#              same to the bit; block: only between blocks, of 256 tokens or a multiple
#   decode     same: a decoded token leaves the state that prefill would leave; differs: not so
#   since      the first mlx-lm of which this is true; not eligible in earlier ones
"""


def table() -> dict[str, Entry]:
    """The entries of compat/families.toml as it is."""
    text = (compat.folder() / TABLE).read_text(encoding="utf-8")
    known = set(Entry.__dataclass_fields__)
    return {
        family: Entry(**{key: value for key, value in entry.items() if key in known})
        for family, entry in tomllib.loads(text).items()
    }


def render(entries: dict[str, Entry]) -> str:
    """The table's text, families sorted by name."""
    parts = [HEAD]
    for family in sorted(entries, key=str.lower):
        entry = entries[family]
        name = family if family.replace("_", "").replace("-", "").isalnum() else json.dumps(family)
        lines = [f"[{name}]", f'result = "{entry.result}"', f'kind = "{entry.kind}"']
        if entry.result == "no":
            lines.append(f"reason = {json.dumps(entry.reason)}")
        else:
            lines += [f'cuts = "{entry.cuts}"', f'decode = "{entry.decode}"']
        if entry.result == "tolerance":
            lines.append(f"tolerance = {entry.tolerance:g}")
        if entry.since:
            lines.append(f'since = "{entry.since}"')
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def disagreement(measured: Entry, listed: Entry | None) -> str:
    """What the table says otherwise than was measured with the installed mlx-lm; empty: nothing."""
    if listed is None:
        return "is not in the table"
    if listed.since and Version(version("mlx-lm")) < Version(listed.since):
        if measured.result == "no":
            return ""
        return f"is {measured.result}, although the table has it since {listed.since} only"
    if measured.result == "tolerance" == listed.result and measured.tolerance > listed.tolerance:
        return f"differs by {measured.tolerance:g}, in the table by {listed.tolerance:g}"
    for name in ("result", "kind", "cuts", "decode"):
        if listed.result == "no" and name in ("cuts", "decode"):
            continue
        if getattr(measured, name) != getattr(listed, name):
            found, said = getattr(measured, name), getattr(listed, name)
            return f"{name} is {found!r}, in the table {said!r} ({measured.reason})"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--older", metavar="VERSION", help="mlx-lm from which the table is true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    outcomes: dict[str, Outcome] = {}
    for name in options.names or models.names() + models.variants():
        with tempfile.TemporaryDirectory() as folder:
            outcomes[name] = sweep(name, Path(folder))
        print(line(name, outcomes[name]), flush=True)
    families = {name: o.entry for name, o in outcomes.items() if name not in models.variants()}
    share = sum(entry.result == "exact" for entry in families.values()) / max(len(families), 1)
    print(f"{len(families)} architectures, {share:.1%} exact")
    if options.json:
        options.json.write_text(json.dumps({n: asdict(o) for n, o in outcomes.items()}, indent=1))
    file = compat.folder() / TABLE
    if options.write:
        file.write_text(render((table() if options.names else {}) | families), encoding="utf-8")
    if options.older:
        listed = table()
        changed = {
            name: replace(listed[name], since=options.older)
            for name, entry in families.items()
            if disagreement(entry, listed.get(name)) and name in listed
        }
        file.write_text(render(listed | changed), encoding="utf-8")
    return int(any(outcome.problems for outcome in outcomes.values()))


def line(name: str, outcome: Outcome) -> str:
    """What was found, on one line."""
    entry = outcome.entry
    what = f"{entry.result} {entry.kind} cuts {entry.cuts} decode {entry.decode}"
    if entry.result == "no":
        return f"{name:24s} no: {entry.reason}"
    points = ", ".join(
        f"{at}: {value:.0e}" if value else at for at, value in outcome.points.items()
    )
    problems = f" PROBLEM {'; '.join(outcome.problems)}" if outcome.problems else ""
    control = f"control {outcome.control:.0e}"
    return f"{name:24s} {what} [{points}] {control}{problems}"


if __name__ == "__main__":
    sys.exit(main())
