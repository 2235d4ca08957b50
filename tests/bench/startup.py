"""What the package costs a Python process that is no server: ``python -c pass`` with and without.

    python -m tests.bench.startup [--runs N] [--json]

Two fresh environments, one with the package's files as the wheel installs them; the two interpreters
start in turns. The wall clock is what a user waits; processor time is less moved by what else the
machine does. Target: 1.05 or less on the wall clock. Exit status 1 when it is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import asdict
from pathlib import Path
from typing import Any

import thunder_patches
from thunder_patches.cli._play.figures import Spread

TARGET = 1.05
SOURCE = Path(thunder_patches.__file__).parent


def environment(folder: Path, *, with_package: bool) -> Path:
    """A new environment without pip; its interpreter."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    site = next(folder.glob("lib/python*/site-packages"))
    if with_package:
        shutil.copytree(SOURCE, site / SOURCE.name, ignore=shutil.ignore_patterns("__pycache__"))
        for start in SOURCE.parent.glob("thunder_patches.[ps]t*"):
            shutil.copy(start, site)
        if not (site / "thunder_patches.pth").is_file():
            raise SystemExit(
                "run this from a checkout: thunder_patches.pth is not beside the package"
            )
    python = folder / "bin" / "python"
    _start(python)  # compiles what is imported
    return python


def _start(python: Path) -> tuple[float, float]:
    """Wall clock and processor seconds of one process."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "THUNDER"))}
    begin, before = time.perf_counter(), os.times()
    subprocess.run([python, "-c", "pass"], env=clean, check=True)
    wall, after = time.perf_counter() - begin, os.times()
    spent = after.children_user + after.children_system
    return wall, spent - before.children_user - before.children_system


def measure(runs: int, folder: Path) -> dict[str, Any]:
    """Seconds and ratios: of the medians, of the least, of processor time."""
    pythons = {
        "without": environment(folder / "without", with_package=False),
        "with": environment(folder / "with", with_package=True),
    }
    walls: dict[str, list[float]] = {name: [] for name in pythons}
    spent = dict.fromkeys(pythons, 0.0)
    for turn in range(runs):
        for name in pythons if turn % 2 else reversed(pythons):
            wall, processor = _start(pythons[name])
            walls[name].append(wall)
            spent[name] += processor
    spreads = {name: Spread.of(values) for name, values in walls.items()}
    return {
        "runs": runs,
        "seconds": {name: asdict(spread) for name, spread in spreads.items()},
        "ratio": spreads["with"].median / spreads["without"].median,
        "ratio_of_least": spreads["with"].low / spreads["without"].low,
        "ratio_of_processor_time": spent["with"] / spent["without"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(options.runs, Path(scratch))
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"python -c pass: ratio of medians {result['ratio']:.3f}, of the least "
            f"{result['ratio_of_least']:.3f}, of processor time "
            f"{result['ratio_of_processor_time']:.3f}, target <= {TARGET}"
        )
    return 0 if result["ratio"] <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
