"""A real `omlx serve` on a tiny model, with the plugin or without, asked over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.harness.models import Model

START = 90.0


class Server:
    def __init__(self, port: int, log: Path) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self.log = log

    def get(self, path: str, timeout: float = 10.0) -> Any:
        with urllib.request.urlopen(self._url + path, timeout=timeout) as answer:
            return json.load(answer)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps({"model": "tiny", "temperature": 0, **body}).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def complete(self, prompt: str, tokens: int = 16) -> tuple[str, dict[str, Any]]:
        answer = self.post("/v1/completions", {"prompt": prompt, "max_tokens": tokens})
        return answer["choices"][0]["text"], answer["usage"]

    def chat(self, messages: list[dict[str, Any]], tokens: int = 16) -> tuple[str, dict[str, Any]]:
        answer = self.post("/v1/chat/completions", {"messages": messages, "max_tokens": tokens})
        return answer["choices"][0]["message"]["content"], answer["usage"]


@contextmanager
def omlx(model: Model, folder: Path, *, thunder: bool = True, **settings: str) -> Iterator[Server]:
    """Serve ``model``; ``folder`` keeps the plugin's cache from one server to the next."""
    models = folder / "models"
    if not (models / "tiny").exists():
        shutil.copytree(model.path, models / "tiny")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = folder / f"base-{port}"
    command = [str(Path(sys.executable).with_name("omlx")), "serve", "--model-dir", str(models)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--base-path", str(base)]
    if not thunder:
        command += ["--paged-ssd-cache-dir", str(base / "ssd")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("THUNDER")}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "THUNDER": str(int(thunder)),
        "THUNDER_CACHE_DIR": str(folder / "cache"),
        **settings,
    }
    log = folder / f"log-{port}.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        server = Server(port, log)
        try:
            deadline = time.monotonic() + START
            while True:
                try:
                    server.get("/health", timeout=1)
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise AssertionError(f"omlx did not start:\n{log.read_text()}") from None
                    time.sleep(0.1)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
