"""The page in a real browser, fed with statuses that no test server would reach."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.harness.browser import View, browser
from tests.harness.statuses import big_status, empty_status
from thunder_patches.observe.routes import answer

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "\"><svg onload=alert(3)>'",
    "javascript:alert(4)",
    "\u202eevil\u0000\ud83d\ude08 {{7*7}} ${alert(5)}",
    "x" * 5000,
)


class Stand:
    """An HTTP server that answers with `observe.routes`, and a status that the test may change."""

    def __init__(self) -> None:
        self.status = empty_status()
        self.key = ""
        stand = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                found = answer("GET", path, query, lambda *, details=False: stand.status)
                asked = self.headers.get("Authorization")
                if path == "/thunder/status" and stand.key and asked != f"Bearer {stand.key}":
                    return self.send_error(401)
                if found is None:
                    return self.send_error(404)
                self.send_response(found.status)
                for name, value in (("Content-Type", found.content_type), *found.headers):
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(found.body)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/thunder/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture
def stand() -> Iterator[Stand]:
    found = Stand()
    yield found
    found.stop()


def keep(view: View, name: str) -> None:
    """A picture to look at, where THUNDER_TEST_PICTURES names a folder."""
    folder = os.environ.get("THUNDER_TEST_PICTURES")
    if folder:
        view.tab.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def test_an_empty_cache(chromium: Any, stand: Stand) -> None:
    view = View(chromium, stand.url).wait_live()
    keep(view, "empty")
    assert view.complaints == []
    assert "Nothing is cached yet" in view.text("map")
    assert "No requests yet" in view.text("requests")
    assert "NaN" not in view.text("tiles") and "undefined" not in view.tab.inner_text("body")


@pytest.mark.parametrize(("dark", "width"), [(False, 1200), (True, 1200), (False, 390)])
def test_ten_thousand_blocks(chromium: Any, stand: Stand, dark: bool, width: int) -> None:
    stand.status = big_status()
    view = View(chromium, stand.url, dark=dark, width=width).wait_live()
    keep(view, f"big-{'dark' if dark else 'light'}-{width}")
    assert view.complaints == []
    shown = view.tab.locator("#map rect").count()
    assert shown == len(stand.status["prefixes"]["stretches"]) and 100 < shown <= 240
    assert "left out" in view.text("extent")
    assert view.tab.evaluate("document.documentElement.scrollWidth") <= width
    took = view.tab.evaluate(
        "() => { const t = performance.now(); drawn.clear(); draw(last); return performance.now() - t }"
    )
    assert took < 2000
    view.tab.locator("#map rect.pinned").first.focus()
    assert "pinned by agents" in view.text("chosen")


def test_it_follows_the_server_and_says_when_that_is_gone(chromium: Any, stand: Stand) -> None:
    view = View(chromium, stand.url).wait_live()
    status = empty_status()
    status["cache"]["counts"] |= {"full": 3, "miss": 1, "tokens_skipped": 4321}
    stand.status = status
    view.tab.locator("#tiles", has_text="75 %").wait_for()
    stand.stop()
    view.tab.wait_for_selector("#live.lost", timeout=20_000)
    assert "75 %" in view.text("tiles")


def test_hostile_text_stays_text(chromium: Any, stand: Stand) -> None:
    status = big_status(40)
    status["host"] |= {"distribution": HOSTILE[0], "version": HOSTILE[1]}
    status["model"] = {"eligible": False, "family": HOSTILE[2], "reason": HOSTILE[5]}
    status["problems"] = list(HOSTILE)
    status["cache"]["problem"] = HOSTILE[1]
    status["cache"]["last_fault"] = HOSTILE[5]
    status["features"] = {text: {"state": text, "reason": text} for text in HOSTILE}
    for request, text in zip(status["requests"], HOSTILE * 20, strict=False):
        request |= {"source": text, "text": text, "system": text}
        request["miss"] = {"token": 1, "reason": text, "before": text, "now": text}
    for stretch, text in zip(status["prefixes"]["stretches"], HOSTILE * 20, strict=False):
        stretch |= {"root": text, "text": text, "systems": [text], "messages": 1, "requests": 1}
        stretch["pinned"] = list(HOSTILE)
    stand.status = status
    view = View(chromium, stand.url).wait_live()
    keep(view, "hostile")
    view.tab.wait_for_timeout(500)
    assert view.complaints == []
    assert view.tab.locator("img, main svg[onload], iframe, main script").count() == 0
    assert HOSTILE[0] in view.text("problems") and HOSTILE[1] in view.text("problems")
    assert view.tab.evaluate("document.documentElement.scrollWidth") <= 1200
    assert {url.rpartition("/")[2] for url in view.asked} <= {"", "status"}


def test_no_other_script_can_run(chromium: Any, stand: Stand) -> None:
    """The control of the test above: markup that did get in would be stopped by the policy."""
    view = View(chromium, stand.url).wait_live()
    view.tab.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=alert(1)>')"
    )
    view.tab.wait_for_timeout(300)
    assert any("Content Security Policy" in text for text in view.complaints)
    assert not any("dialog" in text for text in view.complaints)


def test_a_server_with_a_key_is_asked_with_it(chromium: Any, stand: Stand) -> None:
    stand.key = "sesame"
    view = View(chromium, stand.url)
    view.tab.wait_for_selector("#key form")
    for attempt in ("wrong", "sesame"):
        view.tab.fill("#key input", attempt)
        view.tab.click("#key button")
    view.wait_live()
    assert not view.tab.is_visible("#key")
    assert "sesame" not in view.tab.url
