"""A real browser for the page, where the machine has one: Chromium through Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium; skips the test, and says why, where there is none."""
    reason = "no browser: pip install playwright, and Chromium from the system"
    playwright = pytest.importorskip("playwright.sync_api", reason=reason)
    found = os.environ.get("THUNDER_TEST_BROWSER") or next(
        filter(None, map(shutil.which, NAMES)), None
    )
    if found is None:
        pytest.skip(reason)
    with playwright.sync_playwright() as driver:
        # Root, as in a container, gets no sandbox.
        chromium = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class View:
    """The page as a browser shows it, with all that it complained of."""

    def __init__(self, chromium: Any, url: str, *, dark: bool = False, width: int = 1200) -> None:
        scheme = "dark" if dark else "light"
        size = {"width": width, "height": 900}
        self.tab = chromium.new_page(color_scheme=scheme, viewport=size)
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.tab.on("console", lambda message: self._said(message.type, message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("dialog", lambda dialog: self._said("error", f"dialog {dialog.message}"))
        self.tab.on("request", lambda request: self.asked.append(request.url))
        self.tab.goto(url)

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def wait_live(self) -> View:
        """Until the first status is drawn."""
        self.tab.wait_for_selector("#live.ok", timeout=20_000)
        return self

    def text(self, part: str) -> str:
        """What a part of the page, by its id, says."""
        return str(self.tab.locator(f"#{part}").inner_text())
