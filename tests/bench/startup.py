"""What the package costs a Python process that is no server: ``python -c pass`` with and without.

    python -m tests.bench.startup [--runs N] [--json]

Two fresh environments, one with the package's files as the wheel installs them; the two interpreters
start in turns. Target: 1.05 or less. Exit status 1 when it is missed.
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


def _start(python: Path) -> float:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "THUNDER"))}
    begin = time.perf_counter()
    subprocess.run([python, "-c", "pass"], env=clean, check=True)
    return time.perf_counter() - begin


def measure(runs: int, folder: Path) -> dict[str, Any]:
    """Seconds, and the ratio of the medians and of the least."""
    pythons = {
        "without": environment(folder / "without", with_package=False),
        "with": environment(folder / "with", with_package=True),
    }
    times: dict[str, list[float]] = {name: [] for name in pythons}
    for turn in range(runs):
        for name in pythons if turn % 2 else reversed(pythons):
            times[name].append(_start(pythons[name]))
    spreads = {name: Spread.of(values) for name, values in times.items()}
    return {
        "seconds": {name: asdict(spread) for name, spread in spreads.items()},
        "ratio": spreads["with"].median / spreads["without"].median,
        "ratio_of_least": spreads["with"].low / spreads["without"].low,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(options.runs, Path(scratch))
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(
            f"python -c pass: ratio of medians {result['ratio']:.3f}, of the least "
            f"{result['ratio_of_least']:.3f}, target <= {TARGET}"
        )
    return 0 if result["ratio"] <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
