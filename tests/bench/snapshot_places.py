"""Would snapshots at text boundaries save more than snapshots at even distances? Counted, not timed.

    python -m tests.bench.snapshot_places [--edits N] [--json]

Long messages (131,072 characters of the texts in tests/data/chunking, in random order), each edited at
one place. State that cannot be cut is resumed at the last snapshot before the edit; what lies between
is computed again. Snapshots every 2,048 tokens (4 characters a token), against

    moved   each at the best text boundary of the 256 tokens before its place,
    added   the same, and one more at the best text boundary of each stretch,
    denser  every 1,024 tokens: as many as "added", without looking at the text.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from bisect import bisect_right
from pathlib import Path
from typing import Any

from thunder_patches.pilot.chunking import Level, cuts, last_cut

TEXTS = Path(__file__).parents[1] / "data" / "chunking"
LENGTH, TOKEN = 131_072, 4
STRIDE, BLOCK = 2048 * TOKEN, 256 * TOKEN
MESSAGES = 30


def measure(edits: int) -> dict[str, Any]:
    """Tokens computed again, mean over the edits, by where edits begin."""
    texts = [file.read_text() for file in sorted(TEXTS.glob("*-*-*.txt"))]
    chance = random.Random(0)
    again: dict[str, dict[str, list[float]]] = {}
    seconds = []
    for _ in range(MESSAGES):
        parts: list[str] = []
        while sum(map(len, parts)) < LENGTH:
            parts += chance.sample(texts, len(texts))
        text = "\n\n".join(parts)[:LENGTH]
        begin = time.perf_counter()
        places = cuts(text)
        seconds.append(time.perf_counter() - begin)
        even = list(range(STRIDE, LENGTH, STRIDE))
        moved = [found.at if (found := last_cut(places, at - BLOCK, at)) else at for at in even]
        best = [last_cut(places, at - STRIDE + 1, at) for at in even]
        points = {
            "even": even,
            "moved": moved,
            "added": sorted({*even, *(cut.at for cut in best if cut)}),
            "denser": list(range(STRIDE // 2, LENGTH, STRIDE // 2)),
        }
        starts = {
            "paragraph": [cut.at for cut in places if cut.level >= Level.PARAGRAPH],
            "sentence": [cut.at for cut in places],
            "anywhere": list(range(LENGTH)),
        }
        for kind, pool in starts.items():
            for edit in chance.choices(pool, k=edits):
                for name, where in points.items():
                    i = bisect_right(where, edit)
                    lost = (edit - (where[i - 1] if i else 0)) / TOKEN
                    again.setdefault(kind, {}).setdefault(name, []).append(lost)
    means = {
        kind: {name: round(statistics.mean(values)) for name, values in row.items()}
        for kind, row in again.items()
    }
    return {
        "edits": MESSAGES * edits,
        "tokens_computed_again": means,
        "seconds_to_find_boundaries": statistics.median(seconds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--edits", type=int, default=300, help="of each message and kind")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.edits)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for kind, row in found["tokens_computed_again"].items():
            told = ", ".join(f"{name} {mean:,}" for name, mean in row.items())
            print(f"edits that begin at: {kind}: {told} tokens computed again")
        print(f"finding the boundaries: {found['seconds_to_find_boundaries']:.2f} s a message")
    return 0


if __name__ == "__main__":
    sys.exit(main())
