"""The page of a real server in a real browser: nothing cached, in use, under load, gone."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_page_data import chat
from tests.harness.browser import View, browser
from tests.harness.fleet import BLOCK, Fleet
from tests.harness.models import Model, text_of
from tests.harness.server import Server


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}/thunder/"


def keep(view: View, name: str) -> None:
    """A picture to look at, where THUNDER_TEST_PICTURES names a folder."""
    folder = os.environ.get("THUNDER_TEST_PICTURES")
    if folder:
        view.tab.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def test_a_server_s_first_minutes(chromium: Any, fleet: Fleet, full: Model, seed: int) -> None:
    server = fleet.server(full)
    view = View(chromium, url(server)).wait_live()
    assert "Nothing is cached yet" in view.text("map")
    system = text_of(10 * BLOCK, seed)
    for i in range(3):
        server.chat(chat(system, text_of(3 * BLOCK, seed + i % 2)))
    view.tab.locator("#requests tbody tr").nth(2).wait_for(timeout=20_000)
    view.tab.locator("#map rect").nth(3).wait_for(timeout=20_000)
    keep(view, "served")
    assert view.complaints == []
    assert "67 %" in view.text("tiles") and "whole" in view.text("requests")
    assert "applied" in view.text("features") and "mlx-lm" in view.text("host")
    assert "NaN" not in view.tab.inner_text("body")
    server.stop()
    view.tab.wait_for_selector("#live.lost", timeout=20_000)
    assert "67 %" in view.text("tiles")


def test_it_stays_live_while_the_server_works(
    chromium: Any, fleet: Fleet, full: Model, seed: int
) -> None:
    server = fleet.server(full)
    server.complete(text_of(10, seed))
    done = threading.Event()

    def ask(who: int) -> None:
        for i in range(200):
            if done.is_set():
                return
            server.complete(text_of(4 * BLOCK, seed + 1000 * who + i), max_tokens=24)

    askers = [threading.Thread(target=ask, args=(who,)) for who in range(4)]
    for asker in askers:
        asker.start()
    try:
        view = View(chromium, url(server)).wait_live()
        view.tab.locator("#requests tbody tr").nth(11).wait_for(timeout=60_000)
        keep(view, "under-load")
        assert view.tab.locator("#live.ok").count() == 1
        assert view.complaints == []
    finally:
        done.set()
        for asker in askers:
            asker.join()
    told = server.status()
    assert len(json.dumps(told)) < 200_000
    counts = told["cache"]["counts"]
    assert min(counts["miss"] + counts["partial"], 100) == len(told["requests"])


def test_the_page_keeps_the_host_s_own_rules(fleet: Fleet, full: Model) -> None:
    """Other origins read it only as far as they may read the host's answers."""
    server = fleet.server(full, args=("--allowed-origins", "http://good.example"))
    allowed = {}
    for origin in ("http://good.example", "http://evil.example"):
        for path in ("/thunder/", "/thunder/status", "/health"):
            connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
            connection.request("GET", path, headers={"Origin": origin})
            answer = connection.getresponse()
            answer.read()
            connection.close()
            allowed[origin, path] = answer.getheader("Access-Control-Allow-Origin")
            if path == "/thunder/":
                policy = answer.getheader("Content-Security-Policy") or ""
                assert "default-src 'none'" in policy and "unsafe" not in policy
    assert {allowed["http://good.example", path] for path in ("/thunder/", "/thunder/status")} == {
        "http://good.example"
    }
    assert {value for (origin, _), value in allowed.items() if "evil" in origin} == {None}
    assert server.get("/thunder/nothing")[0] == 404
    assert server.get("/thunder")[0] == 308


@pytest.mark.parametrize("path", ["/thunder/", "/thunder/status"])
def test_the_stock_server_has_no_such_route(fleet: Fleet, full: Model, path: str) -> None:
    assert fleet.stock(full).get(path)[0] == 404
