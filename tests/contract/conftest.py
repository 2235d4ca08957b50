"""Fresh environments with the package installed, as a wheel and as an editable install."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.server import INDEX, TRACE

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"PYTHONPATH": str(TRACE), "HARNESS_INDEX": INDEX.name}
"""For an interpreter that imports a host: it need not read all of transformers to know its modules.

Nothing else of the harness's module is on. Not for what is said of the interpreter's own start.
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment whose dependencies, hosts included, are those of this test run."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        [lib] = (self.folder / "lib").glob("python3*")
        return lib / "site-packages"

    def run(
        self, *arguments: str, env: dict[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """A fresh interpreter of it, in an empty folder and without our own path."""
        return subprocess.run(
            [str(self.python), *arguments],
            env=self.environ(env),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def environ(self, env: dict[str, str] | None = None) -> dict[str, str]:
        """The variables of a fresh interpreter: no THUNDER_* and no PYTHON* of the test run."""
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("THUNDER", "PYTHON"))
        }
        return clean | {"THUNDER_CACHE_DIR": str(self.folder / "cache")} | (env or {})

    def says(self, code: str, *options: str, env: dict[str, str] | None = None) -> str:
        """What `code` prints; anything else that is printed fails the test."""
        done = self.run(*options, "-c", code, env=env)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout.strip()


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def make(folder: Path, install: Sequence[str] = ()) -> Environment:
    """A new environment, with this run's site folder on its path and `install` handed to pip."""
    venv.create(folder, with_pip=False, symlinks=True)
    found = Environment(folder)
    # A path line adds the folder's modules, but doesn't process that folder's own start files.
    (found.site / "zz_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if install:
        pip = [sys.executable, "-m", "pip", "--python", str(found.python), "install", "--no-deps"]
        options = ["--no-build-isolation", "--no-index", "--disable-pip-version-check", "-q"]
        subprocess.run([*pip, *options, *install], check=True, timeout=240)
    return found


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built once."""
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    subprocess.run([*build, str(ROOT)], check=True, timeout=240, capture_output=True)
    [found] = out.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The control: the same environment without the package."""
    return make(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="session")
def from_wheel(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """The wheel, installed."""
    return make(tmp_path_factory.mktemp("from_wheel"), [str(wheel)])


@pytest.fixture(scope="session")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """This checkout, installed for development."""
    return make(tmp_path_factory.mktemp("editable"), ["--editable", str(ROOT)])


@pytest.fixture(scope="session", params=["wheel", "editable"])
def environment(request: pytest.FixtureRequest) -> Environment:
    """Both, one after the other."""
    name = "from_wheel" if request.param == "wheel" else "editable"
    found: Environment = request.getfixturevalue(name)
    return found
