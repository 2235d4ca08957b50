"""Kill a process that writes and re-encodes blocks, at a random moment, again and again.

    python -m tests.crash.kill [--rounds N] [--seed N] [--careless]

After each kill: the folder is within its budget; nothing that was being written is left once a
store has opened; all that the writer knew to be finished is found; no file is half written; and
every byte served is right. Another process, that of this command, has its own store open on the
folder all the time. Every third round has a small budget, so that kills meet evictions too.
`--careless` is the control: a writer without temporary files, which must be found out.
Exit status 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.core.cache_support import Shortens, counts, files, folder_bytes, open_store, read
from tests.crash import writer

LARGE, SMALL = 1 << 30, 400_000
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.crash.writer"])


@dataclass
class Tally:
    """What the rounds met, so that none of them proves nothing."""

    rounds: int = 0
    killed_while_writing: int = 0
    finished: int = 0
    found: int = 0
    faults: list[str] = field(default_factory=list)

    def demand(self, right: bool, what: str) -> None:
        if not right:
            self.faults.append(f"round {self.rounds}: {what}")


def kill_one(folder: Path, seed: int, budget: int, careless: bool, tally: Tally) -> None:
    """Start a writer, kill it, and look at what it left."""
    chooser = random.Random(seed)
    ours, theirs = context.Pipe()
    process = context.Process(
        target=writer.run, args=(str(folder), seed, budget, seed % 2 == 0, careless, theirs)
    )
    process.start()
    theirs.close()
    done = ours.recv()
    time.sleep(chooser.random() * 0.3)
    process.kill()
    process.join()
    try:
        while ours.poll():
            done = ours.recv()
    except (EOFError, OSError):
        pass
    ours.close()

    tally.rounds += 1
    tally.killed_while_writing += any((folder / "tmp").glob("*/*.part"))
    tally.demand(folder_bytes(folder) <= budget, "the folder exceeds its budget")
    check(folder, seed, budget, done, tally)


def check(folder: Path, seed: int, budget: int, done: int, tally: Tally) -> None:
    """A new store on the folder finds all that was finished, and nothing half done."""
    store = open_store(folder, disk_budget=budget, codec=Shortens())
    try:
        tally.demand(store.ready(60), "the first scan doesn't end")
        tally.demand(not list(folder.glob("tmp/*/*.part")), "unfinished files are left")
        for n, record in enumerate(writer.records_of(seed), 1):
            try:
                source = read(store, record.header)
            except AssertionError:
                tally.demand(False, f"record {n} was served with wrong bytes")
                continue
            tally.found += source is not None
            if n <= done:
                tally.finished += 1
                missing = source is None and budget == LARGE
                tally.demand(not missing, f"record {n} of {done} finished ones is missing")
        seen = counts(store)
        tally.demand(seen["corrupt"] == 0, f"{seen['corrupt']} files are half written")
        stats = store.stats()
        tally.demand(stats["problem"] is None, f"problem: {stats['problem']}")
        tally.demand(stats["ssd"]["bytes"] == folder_bytes(folder), "bytes are counted wrongly")
    finally:
        store.close()


def kill_many(rounds: int, seed: int, careless: bool = False) -> Tally:
    tally = Tally()
    with tempfile.TemporaryDirectory() as place:
        for budget, share in ((LARGE, rounds - rounds // 3), (SMALL, rounds // 3)):
            folder = Path(place) / f"{budget}" / "v1"
            bystander = open_store(folder, disk_budget=budget, codec=Shortens())
            for n in range(share):
                kill_one(folder, seed + tally.rounds, budget, careless, tally)
                if n % 5 == 4:
                    chosen = writer.records_of(seed + tally.rounds - 1)
                    for record in chosen[:10]:
                        bystander.put(record, time.time_ns())
                    tally.demand(bystander.flush(60), "the other process is held up")
                    for record in chosen[:10]:
                        source = read(bystander, record.header)
                        missing = source is None and budget == LARGE
                        tally.demand(not missing, "the other process misses its own record")
            tally.demand(bool(files(folder)), "nothing was stored at all")
            bystander.close()
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--careless", action="store_true")
    args = parser.parse_args()
    tally = kill_many(args.rounds, args.seed, args.careless)
    print(
        f"{tally.rounds} kills (seed {args.seed}), {tally.killed_while_writing} of them while a "
        f"file was being written; {tally.finished} finished records, {tally.found} found"
    )
    for fault in tally.faults[:20]:
        print("FAULT", fault)
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
