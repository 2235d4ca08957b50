"""A faster matrix multiplication for MLX's CPU backend on Linux.

The ``mlx-cpu`` wheel carries the reference BLAS. An OpenBLAS of the system, put in front of it with
LD_PRELOAD, multiplies float32 matrices tens of times faster; it has to export the plain names
(``cblas_sgemm``), which the copies inside numpy and scipy do not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_PLACES = (
    "/usr/lib/*/openblas-pthread/libblas.so.3",  # Debian, Ubuntu: libopenblas0-pthread
    "/usr/lib/*/openblas-openmp/libblas.so.3",
    "/usr/lib64/libopenblasp.so.0",  # Fedora: openblas-threads
    "/usr/lib/libopenblas.so",  # Arch
)

# An OpenBLAS that does not know the processor can crash or compute nonsense, so try it first.
_TRIAL = """
import mlx.core as mx, numpy as np
a, b = (np.random.default_rng(i).standard_normal((97, 97), np.float32) for i in (0, 1))
found = np.array(mx.array(a) @ mx.array(b).T)
assert np.allclose(found, a.astype(np.float64) @ b.T.astype(np.float64), atol=1e-3)
"""


def openblas() -> Path | None:
    """An OpenBLAS of this system that MLX computes rightly with; None without one, or on a GPU."""
    import mlx.core as mx

    if sys.platform != "linux" or mx.default_device() != mx.Device(mx.cpu):
        return None
    for place in _PLACES:
        for library in sorted(Path("/").glob(place[1:])):
            if _works(library):
                return library
    return None


def _works(library: Path) -> bool:
    command = [sys.executable, "-c", _TRIAL]
    try:
        done = subprocess.run(
            command, env=preload(os.environ, library), capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def preload(environ: Mapping[str, str], library: Path | None) -> dict[str, str]:
    """``environ`` with ``library`` first in LD_PRELOAD; unchanged for None."""
    if library is None:
        return dict(environ)
    others = environ.get("LD_PRELOAD", "").replace(":", " ").split()
    return {**environ, "LD_PRELOAD": ":".join([str(library), *others])}
