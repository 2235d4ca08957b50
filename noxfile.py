"""Everything CI runs: ``nox``; one session: ``nox -s "tests-3.11(mlx_lm='0.32.2')"``."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["lint", "types", "imports", "tests"]

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHONS = os.environ.get("NOX_PYTHONS", HERE).split(",")
HOSTS = tomllib.loads(Path("compat/hosts.toml").read_text())["hosts"]
MLX_LM = [entry["version"] for entry in HOSTS["mlx_lm"]["versions"]]
# MLX has no backend of its own on Linux; on a machine with an NVIDIA GPU, NOX_MLX=mlx[cuda13].
MLX = os.environ.get("NOX_MLX", "mlx[cpu]" if sys.platform == "linux" else "mlx")


@nox.session(python=PYTHONS)
@nox.parametrize("mlx_lm", MLX_LM)
def tests(session: nox.Session, mlx_lm: str) -> None:
    """The tests against each known mlx-lm."""
    session.install("-e", ".[dev]", MLX, f"mlx-lm=={mlx_lm}")
    session.run("pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style and format."""
    session.install("ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Static types of the package."""
    session.install("-e", ".[dev]", MLX)
    session.run("mypy")


@nox.session
def imports(session: nox.Session) -> None:
    """Who may import whom."""
    session.install("-e", ".[dev]", MLX)
    session.run("lint-imports")
