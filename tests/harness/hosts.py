"""The Python environments whose host is tested, and the wheel installed in them.

THUNDER_TEST_PYTHONS="0.31.3=/path/python,0.32.2=/path/python" names them; the default is the
running interpreter. THUNDER_TEST_WHEEL names a built wheel; the default is one built from this
repository. The wheel goes into a small virtual environment on top of the named one, so that
nothing is changed there; THUNDER_TEST_INSTALLED=1 says that the named ones have it already.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]

_PROBE = """
import importlib.metadata as m, json, sys, sysconfig
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
direct = None
try: direct = m.distribution("thunder-patches").read_text("direct_url.json")
except m.PackageNotFoundError: pass
print(json.dumps({"mlx_lm": version("mlx-lm"), "mlx": version("mlx"),
    "thunder": version("thunder-patches"), "purelib": sysconfig.get_path("purelib"),
    "editable": bool(direct and json.loads(direct).get("dir_info", {}).get("editable")),
    "hatchling": version("hatchling"), "python": sys.version.split()[0]}))
"""

_MISSING = """
import importlib.metadata as m, json
def missing(line):
    from pip._vendor.packaging.requirements import Requirement
    requirement = Requirement(line)
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}): return False
    try: return not requirement.specifier.contains(m.version(requirement.name), prereleases=True)
    except m.PackageNotFoundError: return True
print(json.dumps([r for r in m.requires("thunder-patches") or [] if missing(r)]))
"""


@dataclass(frozen=True)
class Host:
    """One environment to test: the mlx-lm version it claims to hold, and its interpreter."""

    version: str
    python: Path

    def at_least(self, version: str) -> bool:
        return _numbers(self.version) >= _numbers(version)


def declared_hosts(environ: Mapping[str, str] = os.environ) -> list[Host]:
    """The environments to test, as THUNDER_TEST_PYTHONS names them."""
    text = environ.get("THUNDER_TEST_PYTHONS", "").strip()
    if not text:
        python = Path(sys.executable)
        return [Host(probe(python)["mlx_lm"] or "none", python)]
    hosts = []
    for entry in text.split(","):
        version, separator, path = entry.strip().partition("=")
        if not separator or not Path(path).is_file():
            raise ValueError(
                f"THUNDER_TEST_PYTHONS: expected VERSION=PATH of an interpreter, found {entry!r}"
            )
        hosts.append(Host(version, Path(path)))
    return hosts


@functools.cache
def probe(python: Path) -> dict[str, Any]:
    """What is installed in an interpreter: versions, and whether thunder-patches is editable."""
    output = run([str(python), "-c", _PROBE], env=os.environ | {"THUNDER": "0"})
    return dict(json.loads(output))


class Environments:
    """Prepares each host once a session: the wheel is built once and installed in each."""

    def __init__(self, folder: Path, environ: Mapping[str, str] = os.environ) -> None:
        self.folder = folder
        self.environ = environ
        self._ready: dict[Path, Path] = {}

    def python(self, host: Host) -> Path:
        """An interpreter that has the host and the wheel, as a user would have them."""
        if host.python not in self._ready:
            self._ready[host.python] = self._prepare(host)
        return self._ready[host.python]

    def wheel(self) -> Path:
        given = self.environ.get("THUNDER_TEST_WHEEL")
        return Path(given) if given else build_wheel(self.folder / "wheel")

    def _prepare(self, host: Host) -> Path:
        found = probe(host.python)
        if self.environ.get("THUNDER_TEST_INSTALLED") == "1":
            if not found["thunder"] or found["editable"]:
                raise AssertionError(
                    f"expected thunder-patches installed from a wheel in {host.python}, "
                    f"found version {found['thunder']}, editable {found['editable']}"
                )
            return host.python
        return overlay(host.python, self.folder / f"env-{len(self._ready)}", self.wheel())


def build_wheel(folder: Path) -> Path:
    """The wheel of this repository, built into `folder` unless it is there."""
    if not list(folder.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(folder)]
        if probe(Path(sys.executable))["hatchling"]:
            command.append("--no-build-isolation")
        run([*command, str(REPOSITORY)])
    (wheel,) = folder.glob("*.whl")
    return wheel


def overlay(python: Path, folder: Path, wheel: Path) -> Path:
    """A virtual environment that sees all that `python` has, with the wheel installed in it."""
    run([str(python), "-m", "venv", "--without-pip", str(folder)])
    inner = folder / "bin" / "python"
    site_packages = Path(probe(inner)["purelib"])
    parent = probe(python)["purelib"]
    # Last by name, so that the wheel's own .pth runs first, as in a plain environment.
    (site_packages / "zz-parent.pth").write_text(f"import site; site.addsitedir({parent!r})\n")
    probe.cache_clear()
    pip = [str(inner), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    run([*pip, "--no-deps", "--ignore-installed", str(wheel)])
    missing = json.loads(run([str(inner), "-c", _MISSING]))
    if missing:
        run([*pip, *missing])
    return inner


def run(command: list[str], timeout: float = 300, **options: Any) -> str:
    """The command's standard output; what it printed is in the error when it fails."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        **options,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
