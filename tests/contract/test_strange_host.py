"""A real mlx-lm whose code was changed, and one that other plugins patch: the server answers as
stock, and the features that can't be had are off with the reason."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import QUICK, free_port, make
from tests.harness.models import ModelFactory

PLUGIN = """
import functools
import threading
import time


def wrapped(method):
    @functools.wraps(method)
    def do_GET(self):
        self.close_connection = True
        return method(self)

    do_GET.__module__ = "other_plugin"
    return do_GET


def wrap(cls):
    cls.do_GET = wrapped(cls.do_GET)


def once_patched(cls, act):
    original = vars(cls)["do_GET"]

    def wait():
        while vars(cls)["do_GET"] is original:
            time.sleep(0.02)
        act(original)

    threading.Thread(target=wait, daemon=True).start()


def wrap_later(cls):
    once_patched(cls, lambda original: wrap(cls))


def replace_later(cls):
    once_patched(cls, lambda original: setattr(cls, "do_GET", wrapped(original)))
"""


class Strange:
    """An environment with the package and a copy of mlx-lm that a test may change."""

    def __init__(self, folder: Path, wheel: Path, model: Path) -> None:
        self.environment = make(folder)
        self.model = model
        site = self.environment.site
        zipfile.ZipFile(wheel).extractall(site)
        found = importlib.metadata.distribution("mlx-lm")
        shutil.copytree(str(found.locate_file("mlx_lm")), site / "mlx_lm")
        info = site / f"mlx_lm-{found.version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(found.read_text("METADATA") or "")
        (site / "other_plugin.py").write_text(PLUGIN)

    def change(self, *edits: tuple[str, str], files: tuple[str, ...] = ("server.py",)) -> None:
        for name in files:
            file = self.environment.site / "mlx_lm" / name
            text = file.read_text()
            for old, new in edits:
                assert old in text, f"{old!r} is not in {name}"
                text = text.replace(old, new)
            file.write_text(text)

    def plugin(self, call: str) -> None:
        """Have the server module hand its handler to another plugin."""
        line = f"import other_plugin\nother_plugin.{call}(APIHandler)\n\n\ndef main():"
        self.change(("def main():", line))

    @contextlib.contextmanager
    def serving(self, **env: str) -> Iterator[Server]:
        port = free_port()
        log = self.environment.folder / "server.log"
        command = ["-m", "mlx_lm.server", "--model", str(self.model), "--port", str(port)]
        with log.open("w") as out:
            process = subprocess.Popen(
                [str(self.environment.python), *command],
                env=self.environment.environ({"HF_HUB_OFFLINE": "1", **QUICK, **env}),
                cwd=self.environment.folder,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        server = Server(port, log, process)
        try:
            server.wait()
            yield server
        finally:
            process.kill()
            process.wait()


class Server:
    """A running server, as its client sees it."""

    def __init__(self, port: int, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self.log = log
        self.process = process

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return json.load(answer)

    def wait(self) -> None:
        for _ in range(300):
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                self.get("/health")
                return
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.2)
        pytest.fail(self.log.read_text())

    def answer(self) -> Any:
        """The text and the log probabilities of a completion."""
        body = {"prompt": "The river runs to the sea and", "max_tokens": 6, "logprobs": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            [choice] = json.load(answer)["choices"]
        return choice

    @property
    def line(self) -> str:
        [line] = [x for x in self.log.read_text().splitlines() if x.startswith("thunder")]
        return line


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ModelFactory(tmp_path_factory.mktemp("models")).get("qwen3").path


@pytest.fixture
def strange(tmp_path: Path, wheel: Path, model: Path) -> Strange:
    return Strange(tmp_path / "environment", wheel, model)


@pytest.fixture(scope="module")
def stock_answer(tmp_path_factory: pytest.TempPathFactory, wheel: Path, model: Path) -> Any:
    """What the host says without us; the control of all that follows."""
    plain = Strange(tmp_path_factory.mktemp("stock") / "environment", wheel, model)
    with plain.serving(THUNDER="0") as server:
        answer = server.answer()
        assert "thunder" not in server.log.read_text()
    assert len(answer["logprobs"]["content"]) == 6
    return answer


RENAMED = ("_tokenize(", "_tokenise(")
EXTENDED = ("def stop_and_join(self)", "def stop_and_join(self, patience=None)")


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        pytest.param(RENAMED, "has no mlx_lm.server:ResponseGenerator._tokenize", id="renamed"),
        pytest.param(
            EXTENDED,
            "mlx_lm.server:ResponseGenerator.stop_and_join is not that of a known mlx-lm",
            id="extended",
        ),
    ],
)
def test_changed_method(
    strange: Strange, stock_answer: Any, edit: tuple[str, str], reason: str
) -> None:
    strange.change(edit)
    with strange.serving() as server:
        assert "ssd_cache" in server.line and "unknown fingerprint" in server.line
        assert reason in server.line
        assert server.answer() == stock_answer
        assert server.answer() == stock_answer


def test_host_that_lost_what_tells_its_start(strange: Strange, stock_answer: Any) -> None:
    strange.change(("LRUPromptCache", "PrefixCache"), files=("server.py", "models/cache.py"))
    with strange.serving() as server:
        assert "ssd_cache" in server.line and "unknown fingerprint" in server.line
        assert server.answer() == stock_answer


def test_unknown_version(strange: Strange, stock_answer: Any) -> None:
    [info] = strange.environment.site.glob("mlx_lm-*.dist-info")
    metadata = info / "METADATA"
    version = importlib.metadata.version("mlx-lm")
    text = metadata.read_text().replace(f"Version: {version}", "Version: 0.99.0", 1)
    metadata.write_text(text)
    with strange.serving() as server:
        assert " 0 of " in server.line and "mlx-lm 0.99.0 is not known here" in server.line
        assert server.answer() == stock_answer


def test_plugin_that_was_first(strange: Strange, stock_answer: Any) -> None:
    strange.plugin("wrap")
    with strange.serving() as server:
        assert "routes, contexts conflict" in server.line and "by other_plugin" in server.line
        assert server.answer() == stock_answer


@pytest.mark.parametrize(
    ("call", "reason"),
    [("wrap_later", "ours still runs inside"), ("replace_later", "the feature is switched off")],
)
def test_plugin_that_came_later(
    strange: Strange, stock_answer: Any, call: str, reason: str
) -> None:
    strange.plugin(call)
    cache = strange.environment.folder / "cache" / "run"
    with strange.serving() as server:
        assert "routes" not in server.line
        for _ in range(600):
            [file] = cache.glob("*.json")
            routes = json.loads(file.read_text())["features"]["routes"]
            if routes["state"] == "displaced":
                break
            time.sleep(0.1)
        assert routes["state"] == "displaced"
        assert "other_plugin" in routes["reason"] and reason in routes["reason"]
        assert server.answer() == stock_answer
