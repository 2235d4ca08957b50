"""Make, hold, use and release contexts in processes that are killed at random moments.

    python -m tests.crash.handoffs [--handoffs N] [--seed N] [--careless]

All processes share one folder. After each kill: every descriptor that is there can be used, with its
state whole; no state is without its descriptor once the shelf has been swept; what a descriptor needs
of the store is there. At the end, with everything released, nothing is left at all, and the bytes
counted are those in the folder. `--careless` is the control: a writer that gives the descriptor its
name before its state has one. Exit status 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.core.cache_support import folder_bytes, open_store
from thunder_patches.cache.keys import chain, root_key, token_bytes
from thunder_patches.cache.record import Header, Record, TensorSpec
from thunder_patches.cache.store import CacheStore
from thunder_patches.handoff.context import Context, Payload, encode_ids
from thunder_patches.handoff.keeping import digest, keep_coded, keep_exact, release
from thunder_patches.handoff.names import new_id, owner_of
from thunder_patches.handoff.parcel import Packed, Parcel, write
from thunder_patches.handoff.precision import encode
from thunder_patches.handoff.refusal import Refused
from thunder_patches.handoff.shelf import Shelf
from thunder_patches.handoff.transfer import read

BUDGET, STEP, BLOCKS = 3_000_000, 16, 3
OWNER, ROOT = owner_of(""), root_key("model", "KVCache", "", STEP)
LAYOUT = (
    '{"layers":[{"class":"KVCache","meta":{},"path":"0","rows":[["k0",0,2],["v0",0,2]]}],'
    '"rows":{"k0":["F32",2,16],"v0":["F32",2,16]}}'
)
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["thunder_patches.handoff.transfer", "tests.core.cache_support"])


@dataclass
class Tally:
    """What the rounds met, so that none of them proves nothing."""

    made: int = 0
    kills: int = 0
    used: int = 0
    leftovers: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)

    def demand(self, right: bool, what: str) -> None:
        if not right:
            self.faults.append(what)


def shelf_of(folder: Path) -> Shelf:
    return Shelf(folder / "contexts")


def opened(folder: Path) -> CacheStore:
    return open_store(folder, disk_budget=BUDGET, kept=shelf_of(folder).kept)


def records(seed: int) -> list[Record]:
    """A chain of blocks whose bytes follow from the seed."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 1000, BLOCKS * STEP)
    keys = [ROOT, *chain(ROOT, tokens, STEP)]
    specs = tuple(TensorSpec(name, "F32", (2, STEP, 16)) for name in ("k0", "v0"))
    found = []
    for i in range(BLOCKS):
        ids = token_bytes(tokens[i * STEP : (i + 1) * STEP])
        header = Header(keys[i + 1], keys[i], "block", i * STEP, ids, LAYOUT, specs)
        data = tuple(
            rng.standard_normal(s.shape, np.float32).reshape(-1).view(np.uint8).data for s in specs
        )
        found.append(Record(header, data))
    return found


def make(
    store: CacheStore, shelf: Shelf, seed: int, precision: str, careless: bool = False
) -> Context:
    """One handoff of the chain that follows from the seed."""
    chain_ = records(seed)
    tokens = b"".join(record.header.tokens for record in chain_)
    made = Context(
        id=new_id(),
        named=False,
        owner=OWNER,
        model="model",
        model_name="name",
        layout="KVCache",
        block_tokens=STEP,
        precision=precision,
        ids=encode_ids(np.frombuffer(tokens, "<i8")),
        position=BLOCKS * STEP,
        said={"prompt": str(seed)},
        pins=(),
        created=time.time(),
        expires=time.time() + 600,
        holders=("maker",),
    )
    for record in chain_:
        store.put(record, time.time_ns())
    store.flush(30)
    if precision == "exact":
        wanted = [("block", r.header.key, r.header.parent) for r in chain_]
        return keep_exact(store, shelf, made, wanted)  # type: ignore[arg-type]
    packed = [Packed(r.header, tuple(encode(r, "int8"))) for r in chain_]
    if careless:
        temporary = shelf.temporary()
        write(temporary, made, packed)
        made = replace(made, payload=Payload(temporary.stat().st_size, digest(temporary)))
        shelf.put(made)
        time.sleep(0.002)
        os.replace(temporary, shelf.payload(made))
        return made
    return keep_coded(store, shelf, made, packed)


def work(folder: str, seed: int, careless: bool, said: Any) -> None:
    """Make, hold and release contexts until somebody kills this process; tells of each that is made."""
    chooser = random.Random(seed)
    store, shelf = opened(Path(folder)), shelf_of(Path(folder))
    said.send("ready")
    while True:
        try:
            precision = "int8" if careless else chooser.choice(["exact", "int8"])
            made = make(store, shelf, chooser.randrange(1 << 30), precision, careless)
            said.send(made.id)
            if chooser.random() < 0.3:
                shelf.hold(made, "other")
            for known in shelf.handoffs():
                if chooser.random() < 0.2:
                    release(store, shelf, known, chooser.choice([None, "maker", "other"]))
        except Refused:
            said.send(None)
            for known in shelf.handoffs()[:4]:
                release(store, shelf, known)


def check(store: CacheStore, folder: Path, tally: Tally) -> None:
    """Every context that is there can be used, to the last byte."""
    shelf = shelf_of(folder)
    shelf.sweep()
    contexts = shelf.handoffs()
    files = {f.name for f in (folder / "contexts" / "handoff").glob("*")}
    named = {f"{c.id}.json" for c in contexts}
    named |= {f"{c.id}.safetensors" for c in contexts if c.payload is not None}
    tally.demand(files == named, f"dangling: {sorted(files ^ named)[:3]}")
    for known in contexts:
        tally.used += 1
        expected = records(int(known.said["prompt"]))
        if known.payload is None:
            try:
                found = read(store, [("block", r.header.key, r.header.parent) for r in expected])
            except Refused:
                tally.demand(False, "a record that a context needs was evicted")
                continue
            same = [bytes(d) for r in found for d in r.data]
            tally.demand(same == [bytes(d) for r in expected for d in r.data], "wrong bytes")
            continue
        file = shelf.payload(known)
        whole = file.exists() and digest(file) == known.payload.sha256
        tally.demand(whole, "a context's state is missing or not whole")
        if whole:
            parts = list(Parcel(file).records())
            tally.demand(len(parts) == BLOCKS, "a context's state has other records")


def run(handoffs: int, seed: int, careless: bool = False) -> Tally:
    """Processes, two at a time, until so many handoffs were made."""
    tally, chooser = Tally(), random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "v1"
        store = opened(folder)
        while tally.made < handoffs and not (careless and tally.faults):
            workers = []
            for _ in range(2):
                ours, theirs = context.Pipe()
                number = chooser.randrange(1 << 30)
                process = context.Process(target=work, args=(str(folder), number, careless, theirs))
                process.start()
                theirs.close()
                workers.append((process, ours))
            for _, ours in workers:
                ours.recv()
            time.sleep(chooser.random() * (0.2 if careless else 1.2))
            for process, ours in workers:
                process.kill()
                process.join()
                tally.kills += 1
                try:
                    while ours.poll():
                        told = ours.recv()
                        tally.made += told is not None
                        tally.refused += told is None
                except (EOFError, OSError):
                    pass
                ours.close()
            tally.leftovers += len(list((folder / "contexts" / "tmp").glob("*")))
            check(store, folder, tally)
        shelf = shelf_of(folder)
        for known in shelf.handoffs():
            tally.demand(release(store, shelf, known), "a context that doesn't go")
        shelf.sweep()
        left = [f for f in (folder / "contexts").rglob("*") if f.is_file() and f.name != "lock"]
        tally.demand(not left, f"left behind: {[f.name for f in left][:3]}")
        tally.demand(shelf.kept() == frozenset(), "records are kept for nobody")
        store.close()
        store = opened(folder)
        store.ready(30)
        counted, there = store.stats()["ssd"]["bytes"], folder_bytes(folder)
        tally.demand(counted == there <= BUDGET, f"{counted} bytes counted, {there} there")
        store.close()
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--handoffs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--careless", action="store_true")
    options = parser.parse_args()
    tally = run(options.handoffs, options.seed, options.careless)
    print(tally)
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
