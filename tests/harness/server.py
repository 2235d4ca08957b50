"""A host's server in a process of its own, started as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import forked
from .client import Client

TRACE = Path(__file__).parent / "trace"
START_TIMEOUT = 60.0
STOP_TIMEOUT = 20.0
INDEX = tempfile.TemporaryDirectory(prefix="harness-index-")
"""What the servers of this process tell each other to start faster; see the trace module."""


class Server(Client):
    """`python -m mlx_lm server` on a free port, with its own cache folder, home and log.

    Args:
        python: the interpreter to start it with.
        model: the model folder, or None to name models in requests.
        folder: where the log, the trace and the home folder go; made if missing.
        cache_dir: THUNDER_CACHE_DIR; the default is a folder inside `folder`.
        args: further arguments of the server.
        env: further environment variables; None removes one.
        launch: what starts the server, between the interpreter and the arguments.
    """

    def __init__(
        self,
        python: Path,
        model: Path | None,
        folder: Path,
        *,
        cache_dir: Path | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        launch: Sequence[str] = ("-m", "mlx_lm", "server"),
        timeout: float = 60.0,
    ) -> None:
        super().__init__(port=0, timeout=timeout)
        self.python = python
        self.model = model
        self.folder = folder
        self.cache_dir = cache_dir or folder / "cache"
        self.args = tuple(args)
        self.env = dict(env or {})
        self.launch = tuple(launch)
        self.log_file = folder / "server.log"
        self.trace_file = folder / "trace.jsonl"
        self.process: subprocess.Popen[bytes] | forked.Process | None = None
        self.may_fail = False
        """Set by tests that make the host fail: stack traces in the log are then expected."""

    def start(self) -> Server:
        """Starts the process and waits until /health answers; raises with the log if it does not."""
        if self.process is not None:
            raise AssertionError("the server is running already")
        (self.folder / "home").mkdir(parents=True, exist_ok=True)
        for attempt in range(3):
            self.port = free_port()
            self._spawn()
            if self._wait_until_up():
                return self
            self.kill()
            if attempt == 2 or "Address already in use" not in self.log():
                break
        raise RuntimeError(f"the server did not come up:\n{self.log()[-4000:]}")

    def stop(self) -> int:
        """SIGTERM, then SIGKILL when that does not help; the exit status."""
        return self._end(signal.SIGTERM)

    def interrupt(self) -> int:
        """SIGINT, as Ctrl-C sends it; the exit status."""
        return self._end(signal.SIGINT)

    def kill(self) -> int:
        """SIGKILL for the whole process group; the exit status."""
        return self._end(signal.SIGKILL)

    def restart(self, *, kill: bool = False, **env: str | None) -> Server:
        """Ends the process and starts another on the same folders, with `env` added."""
        if self.process is not None:
            self.kill() if kill else self.stop()
        self.env |= env
        return self.start()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def rss(self) -> int:
        """The process's resident memory in bytes."""
        assert self.process is not None
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no VmRSS in the process's status")

    # What the trace module saw.

    @contextlib.contextmanager
    def watch(self) -> Iterator[ModelCalls]:
        """The model calls made while the block runs; read the result after the block."""
        calls = ModelCalls()
        start = self.trace_file.stat().st_size if self.trace_file.exists() else 0
        yield calls
        if self.trace_file.exists():
            with self.trace_file.open() as file:
                file.seek(start)
                calls.extend((line["batch"], line["width"]) for line in map(json.loads, file))

    def wait_until_idle(self, pause: float = 1.0) -> None:
        """Returns once no model call has come for `pause` seconds."""
        size = -1
        while size != (size := self.trace_file.stat().st_size):
            time.sleep(pause)

    def inject(self, *, after: int, error: str = "", sleep: float = 0.0) -> None:
        """The model call after `after` further ones raises RuntimeError(error), or sleeps."""
        self.may_fail = self.may_fail or bool(error)
        fault: dict[str, Any] = {"skip": after}
        fault |= {"error": error} if error else {"sleep": sleep}
        path = self.trace_file.with_name(self.trace_file.name + ".fault")
        path.write_text(json.dumps(fault))

    def _spawn(self) -> None:
        command = [str(self.python), *self.launch, "--host", "127.0.0.1", "--port", str(self.port)]
        if self.model is not None:
            command += ["--model", str(self.model)]
        command += self.args
        env, self.process = self._environment(), None
        # The interpreter and the libraries read other variables than these when they start.
        if all(name.startswith(("THUNDER", "HARNESS")) for name in self.env):
            self.process = forked.start(command, env, self.folder, self.log_file)
        if self.process is None:
            with self.log_file.open("ab") as log:
                self.process = subprocess.Popen(
                    command,
                    cwd=self.folder,  # not the repository, whose package would be found first
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def _environment(self) -> dict[str, str]:
        home = self.folder / "home"
        env: dict[str, str | None] = {
            **forked.kept_environment(),
            "HOME": str(home),
            "HF_HOME": str(home / "hf"),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(TRACE),
            "HARNESS_TRACE": str(self.trace_file),
            "HARNESS_INDEX": INDEX.name,
            "THUNDER_CACHE_DIR": str(self.cache_dir),
            **self.env,
        }
        return {name: value for name, value in env.items() if value is not None}

    def _wait_until_up(self) -> bool:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and self.running:
            if self.healthy():
                return True
            time.sleep(0.05)
        return False

    def _end(self, sign: signal.Signals) -> int:
        process = self.process
        if process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        try:
            status = process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait(STOP_TIMEOUT)
        self.process = None
        return status


class ModelCalls(list[tuple[int, int]]):
    """Model calls as (rows, tokens a row)."""

    def prompt_tokens_run(self, answer_tokens: int) -> int:
        """Prompt tokens that went through the model for one request that ran alone.

        The host calls the model once more for each answer token, one ahead of what it returns.
        0 therefore means that the first token was sampled without any call.
        """
        rows = {rows for rows, _ in self}
        if rows - {1}:
            raise AssertionError(f"expected calls of one row, found {sorted(rows)}")
        return sum(width for _, width in self) - answer_tokens


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
