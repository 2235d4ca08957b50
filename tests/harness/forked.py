"""Servers that are forked from a process which has their libraries imported: a start in a third of
the time.

For servers as the tests start them by the hundred. Real interpreters are started in
tests/contract/test_launch.py, in every way, and wherever a test asks for something that an
interpreter or a library reads at its start. THUNDER_TEST_FRESH=1 starts all of them so. Linux only:
elsewhere a process that uses Metal can't be forked.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .hosts import run

PARENT = Path(__file__).with_name("parent.py")
LIBRARIES = (
    "numpy",
    "jinja2",
    "packaging.specifiers",
    "psutil",
    "regex",
    "requests",
    "safetensors.numpy",
    "yaml",
    "http.server",
    "concurrent.futures.thread",
    "huggingface_hub:snapshot_download",
    "huggingface_hub:scan_cache_dir",
    "transformers",
    "transformers:AutoTokenizer",
    "transformers:PreTrainedTokenizerFast",
    "transformers.models.auto.tokenization_auto",
    "transformers.processing_utils",
    "transformers.image_processing_utils",
    "jsonschema",
    "fastapi",
    "uvicorn",
    "openai_harmony",
)
"""What the hosts import, without what imports MLX."""


class Process:
    """A forked server, with what `subprocess.Popen` has for one."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile()
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; raises TimeoutExpired."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._connection.close()
        return self.returncode


def kept_environment() -> dict[str, str]:
    """This process's variables without what could change an answer or leak between tests."""
    other = ("THUNDER", "HARNESS", "PYTHON", "MLX", "HF_", "LD_PRELOAD", "XDG_")
    return {name: value for name, value in os.environ.items() if not name.startswith(other)}


def start(
    command: Sequence[str], env: Mapping[str, str], folder: Path, log: Path
) -> Process | None:
    """`python -m ...` in a session of its own, its output appended to `log`; None where it can't be."""
    if command[1] != "-m" or sys.platform != "linux" or os.environ.get("THUNDER_TEST_FRESH"):
        return None
    address = _parent(command[0])
    if address is None:
        return None
    order = {"command": list(command), "env": dict(env), "folder": str(folder), "log": str(log)}
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    connection.sendall(json.dumps(order).encode() + b"\n")
    return Process(connection)


@functools.cache
def _parent(python: str) -> str | None:
    """The address of the parent of this interpreter's servers; it ends with this process."""
    place = tempfile.TemporaryDirectory(prefix="forked-")
    env = {
        **kept_environment(),
        "HF_HUB_OFFLINE": "1",
        "HOME": place.name,
        "HF_HOME": str(Path(place.name, "hf")),
        "THUNDER": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    told = run([python, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"], env=env)
    address = str(Path(place.name, "orders"))
    log = Path(place.name, "log")
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [python, "-S", str(PARENT), address, told.strip(), json.dumps(LIBRARIES)],
            env=env,
            cwd=place.name,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    assert process.stdin is not None and process.stdout is not None

    def end() -> None:
        with contextlib.suppress(OSError):
            process.communicate(timeout=10)
        place.cleanup()

    if process.stdout.readline() != b"ready\n":
        print(f"servers can't be forked here:\n{log.read_text()}", file=sys.stderr)
        end()
        return None
    atexit.register(end)
    return address
