"""The metrics of a real server, checked with Prometheus' own tools, where the machine has them."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.core.test_observe_dashboard import expressions
from tests.core.test_observe_metrics import lint
from tests.harness.fleet import BLOCK, Fleet
from tests.harness.models import Model, text_of
from tests.harness.server import free_port

pytest.importorskip("prometheus_client")


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} (Debian: prometheus)")
    return found


def test_the_route_tells_what_the_status_tells(fleet: Fleet, full: Model, seed: int) -> None:
    server = fleet.server(full)
    prompt = text_of(5 * BLOCK, seed)
    for _ in range(3):
        server.complete(prompt)
    code, text = server.get("/thunder/metrics")
    assert code == 200
    counts = server.status()["cache"]["counts"]
    assert f'thunder_requests_total{{result="full"}} {counts["full"]:.1f}' in text
    assert 'thunder_requests_total{result="full"} 2.0' in text
    assert 'thunder_time_to_first_token_seconds_count{result="miss"} 1.0' in text
    assert f'thunder_prompt_tokens_total{{state="skipped"}} {counts["tokens_skipped"]:.1f}' in text
    if promtool := shutil.which("promtool"):
        assert lint(promtool, text.encode()) == ""


def test_prometheus_scrapes_it_and_every_panel_has_data(
    fleet: Fleet, full: Model, seed: int, tmp_path: Path
) -> None:
    binary = tool("prometheus")
    server = fleet.server(full)
    with prometheus(binary, server.port, tmp_path) as ask:
        for i in range(8):
            server.complete(text_of(5 * BLOCK, seed + i // 2))
            time.sleep(1)
        time.sleep(2)
        empty = []
        for expression in expressions():
            for name, value in (
                ("$instance", ".*"),
                ("$__rate_interval", "8s"),
                ("$__range", "1m"),
            ):
                expression = expression.replace(name, value)
            found = ask(expression)
            if not found or any(one["value"][1] == "NaN" for one in found):
                empty.append(expression)
        assert empty == []
        assert ask("thunder_requests_total") and not ask("thunder_nothing_total")


@contextmanager
def prometheus(binary: str, target: int, folder: Path) -> Iterator[Any]:
    """A Prometheus that scrapes `target` every second; yields a function that asks it."""
    port = free_port()
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs:\n"
        "  - job_name: thunder\n"
        "    metrics_path: /thunder/metrics\n"
        f"    static_configs: [{{targets: ['127.0.0.1:{target}']}}]\n"
    )
    command = [binary, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)

    def ask(expression: str) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode({"query": expression})
        url = f"http://127.0.0.1:{port}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            return list(json.load(answer)["data"]["result"])

    try:
        for _ in range(100):
            try:
                ask("up")
                break
            except OSError:
                time.sleep(0.2)
        yield ask
    finally:
        process.terminate()
        process.wait(20)
