"""Servers for a comparison: a host with the package on or off, each its own process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from thunder_patches.patching.host import find

from .client import Client, Message, Scored, ServerError

STOP_TIMEOUT = 60.0  # the package writes out what is queued


class Server(Client):
    """``python -m mlx_lm server`` with this interpreter, on a free port of 127.0.0.1.

    Used as a context manager it starts on entry and is gone on exit. ``log`` collects what the
    process prints, over restarts too.
    """

    title: ClassVar[str] = "mlx_lm.server"
    compared: ClassVar[str] = "logprobs"
    """What its answers are compared by: "logprobs", or "text" where it tells none."""

    def __init__(
        self,
        model: str,
        log: Path,
        *,
        env: Mapping[str, str],
        arguments: Sequence[str] = (),
        start_timeout: float = 180.0,
    ) -> None:
        super().__init__(port=0)
        self.model = model
        self.log = log
        self.env = dict(env)
        self.arguments = tuple(arguments)
        self.start_timeout = start_timeout
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start the process, wait until it answers, and have it load the model."""
        self.port = _free_port()
        where = ["--host", self.host, "--port", str(self.port)]
        command = [sys.executable, *self._command(), *where, *self.arguments]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours; we stop it in order
            )
        deadline = time.monotonic() + self.start_timeout
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise ServerError(f"the server did not start; its log ends:\n{self.log_tail()}")
            time.sleep(0.1)
        # /health answers before the model is there; the first request waits for it.
        self.stream([{"role": "user", "content": "Hi"}], 1)
        return self

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when that does not end it."""
        process, self.process = self.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_TIMEOUT)

    def restart(self) -> Self:
        """The same server as a new process."""
        self.stop()
        return self.start()

    def log_tail(self, lines: int = 15) -> str:
        """The end of what the process printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def patched(self) -> bool:
        """Whether the package is at work in it."""
        return self.get("/thunder/status")[0] == 200

    def _command(self) -> list[str]:
        return ["-m", "mlx_lm", "server", "--model", self.model]

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class OmlxServer(Server):
    """``python -m omlx.cli serve``, with its own SSD cache on, as it comes.

    What it keeps is in a folder beside ``log``, over restarts too. oMLX reads its settings there,
    so none of the user's hold, and none of the environment (``OMLX_*``), where a cache folder
    would be one for two servers. ServerError where ``model``'s weights are not on this machine.
    """

    title = "oMLX"
    compared = "text"

    def __init__(
        self,
        model: str,
        log: Path,
        *,
        env: Mapping[str, str],
        arguments: Sequence[str] = (),
        start_timeout: float = 180.0,
    ) -> None:
        env = {name: value for name, value in env.items() if not name.startswith("OMLX_")}
        super().__init__(model, log, env=env, arguments=arguments, start_timeout=start_timeout)
        folder = model_folder(model)
        if not any(folder.glob("*.safetensors")):
            raise ServerError(f"expected the model's weights in {folder}, found no *.safetensors")
        self.home = log.with_suffix("")
        models = self.home / "models"
        models.mkdir(parents=True)
        name = Path(os.path.abspath(model)).name  # not the folder's own: a hub's is a hash
        (models / name).symlink_to(folder.resolve(), target_is_directory=True)
        self.fields = {"model": name}

    def score(self, prompt: list[Message] | str, max_tokens: int, top: int = 5) -> Scored:
        """The answer to a chat once more, as a text alone: oMLX tells no logprobs."""
        if isinstance(prompt, str):
            raise ValueError("expected the messages of a chat, found a text")
        answer = self.stream(prompt, max_tokens)
        return Scored(answer.text, (), (), (), answer.cached_tokens, answer.skip)

    def _command(self) -> list[str]:
        folders = ["--model-dir", str(self.home / "models"), "--base-path", str(self.home / "base")]
        return ["-m", "omlx.cli", "serve", *folders]


HOSTS: dict[str, type[Server]] = {"mlx_lm": Server, "omlx": OmlxServer}


def installed_host(name: str | None) -> str:
    """``name``, or the host that this interpreter's user means: oMLX brings mlx-lm, not vice versa.

    ValueError for a name that is not in `HOSTS`, or a host that is not installed.
    """
    if name is None:
        return "omlx" if find("omlx") else "mlx_lm"
    if name not in HOSTS:
        raise ValueError(f"expected {' or '.join(HOSTS)}, found {name!r}")
    if find(name) is None:
        others = " and ".join(other for other in HOSTS if find(other)) or "neither host"
        raise ValueError(f"expected {name} beside {sys.executable}, found {others}")
    return name


def model_folder(model: str) -> Path:
    """The folder of a model that is on this machine, given as a folder or as a hub's name."""
    if Path(model).is_dir():
        return Path(model)
    from mlx_lm.utils import hf_repo_to_path

    return Path(hf_repo_to_path(model))


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack while the block runs, so that no server is left behind."""

    def unwind(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stock_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with the package off and none of its settings."""
    return {**_without_settings(environ), "THUNDER": "0"}


def patched_environment(
    environ: Mapping[str, str], cache_dir: Path, *, keep_settings: bool, **settings: str
) -> dict[str, str]:
    """``environ`` with the package on, its cache in ``cache_dir``.

    ``settings`` are variables without their prefix, in any case (``block_tokens="32"``). With
    ``keep_settings`` those of ``environ`` stay in force, too.
    """
    kept = environ if keep_settings else _without_settings(environ)
    ours = {f"THUNDER_{name.upper()}": value for name, value in settings.items()}
    return {**kept, **ours, "THUNDER": "1", "THUNDER_CACHE_DIR": str(cache_dir)}


def _without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name != "THUNDER" and not name.startswith("THUNDER_")
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
