"""Reads compat/: the hosts, their recorded versions' fingerprints, the model families."""

from __future__ import annotations

import functools
import json
import tomllib
from pathlib import Path
from typing import Any


@functools.cache
def folder() -> Path:
    """compat/, inside the package (wheel) or beside it (editable install, checkout)."""
    package = Path(__file__).resolve().parent.parent
    for place in (package / "compat", package.parent / "compat"):
        if (place / "hosts.toml").is_file():
            return place
    raise FileNotFoundError(f"no compat folder in or beside {package}; install the package again")


@functools.cache
def hosts() -> dict[str, dict[str, Any]]:
    """The entries of hosts.toml by host name."""
    return _toml("hosts.toml")["hosts"]


@functools.cache
def families() -> dict[str, dict[str, Any]]:
    """The entries of families.toml by ``model_type``."""
    return _toml("families.toml")


def fingerprints(distribution: str, version: str) -> dict[str, list[str]] | None:
    """The accepted fingerprints of each target, ``module:attribute``; None: not recorded.

    A target with an empty list is known to be absent from that version.
    """
    try:
        return json.loads(file(distribution, version).read_text(encoding="utf-8"))["targets"]
    except FileNotFoundError:
        return None


def file(distribution: str, version: str) -> Path:
    """Where the fingerprints of a host version are kept."""
    return folder() / "fingerprints" / f"{distribution}-{version}.json"


def recorded(distribution: str) -> list[str]:
    """The versions of `distribution` that have fingerprints, oldest first."""
    from packaging.version import Version

    names = (path.stem for path in (folder() / "fingerprints").glob(f"{distribution}-*.json"))
    return sorted((name.removeprefix(f"{distribution}-") for name in names), key=Version)


def _toml(name: str) -> dict[str, Any]:
    return tomllib.loads((folder() / name).read_text(encoding="utf-8"))
