"""C21 over HTTP: hosts that are not what the version says, and other plugins on the same function.

Each host is a copy of the installed mlx-lm, changed in one place, first on the server's path.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.steps import MISS
from tests.harness.compare import assert_same
from tests.harness.fleet import Fleet
from tests.harness.hosts import run
from tests.harness.models import Model, text_of
from tests.harness.server import TRACE, Server

LATER = """
def _another_plugin():
    from .models import cache
    original = cache.LRUPromptCache.fetch_nearest_cache
    cache.LRUPromptCache.fetch_nearest_cache = lambda *args, **kwargs: original(*args, **kwargs)
"""


@pytest.fixture
def strange(fleet: Fleet, tmp_path: Path) -> Path:
    """A folder with a copy of the host's package, to be changed by the test."""
    where = run(
        [
            str(fleet.python),
            "-c",
            "import importlib.util as u; print(u.find_spec('mlx_lm').submodule_search_locations[0])",
        ],
        env={"THUNDER": "0"},
    )
    shutil.copytree(where.strip(), tmp_path / "path" / "mlx_lm")
    return tmp_path / "path"


def start(fleet: Fleet, model: Model, path: Path, **env: str) -> Server:
    """The server on the changed host."""
    python_path = f"{TRACE}:{path}"
    return fleet.server(model, env={"PYTHONPATH": python_path, **env})


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text, f"{old!r} is not in {file.name}"
    file.write_text(text.replace(old, new))


def check(fleet: Fleet, server: Server, model: Model, seed: int, *, hits: bool) -> None:
    """Right answers, twice the same prompt; the second is a hit or is not."""
    prompt = text_of(100, seed)
    expected = fleet.expected(model, prompt=prompt)
    assert_same(expected, server.complete(prompt))
    again = server.complete(prompt)
    assert_same(expected, again)
    assert (again.cached_tokens == 100) if hits else (again.cached_tokens or 0) in MISS
    assert server.healthy()


def test_the_copy_alone_changes_nothing(
    fleet: Fleet, full: Model, seed: int, strange: Path
) -> None:
    """The control: an unchanged copy is the host that is known."""
    check(fleet, start(fleet, full, strange), full, seed, hits=True)


def test_a_changed_method_is_left_alone(
    fleet: Fleet, full: Model, seed: int, strange: Path
) -> None:
    """An argument more: an unknown fingerprint; untested hosts can be allowed all the same."""
    edit(
        strange / "mlx_lm" / "models" / "cache.py",
        "def fetch_nearest_cache(self, model: Any, tokens: List[int]):",
        "def fetch_nearest_cache(self, model: Any, tokens: List[int], hint: Any = None):",
    )
    server = start(fleet, full, strange)
    check(fleet, server, full, seed, hits=False)
    feature = server.status()["features"]["ssd_cache"]
    assert feature["state"] == "unknown_fingerprint"
    assert "fetch_nearest_cache" in feature["reason"]
    server.stop()
    server = start(fleet, full, strange, THUNDER_ALLOW_UNTESTED="1")
    check(fleet, server, full, seed + 1, hits=True)


def test_a_renamed_method_is_missing(fleet: Fleet, full: Model, seed: int, strange: Path) -> None:
    """The host works under its own new name; ours is off and says which name it missed."""
    for file in (strange / "mlx_lm").rglob("*.py"):
        text = file.read_text()
        if "fetch_nearest_cache" in text:
            file.write_text(text.replace("fetch_nearest_cache", "find_nearest_cache"))
    for env in ({}, {"THUNDER_ALLOW_UNTESTED": "1"}):
        server = start(fleet, full, strange, **env)
        check(fleet, server, full, seed, hits=False)
        feature = server.status()["features"]["ssd_cache"]
        assert feature["state"] != "applied"
        assert "fetch_nearest_cache" in feature["reason"]
        server.stop()


def test_another_plugin_later(fleet: Fleet, full: Model, seed: int, strange: Path) -> None:
    """It wraps our wrapper after us: answers stay right, and the status says displaced or knows it."""
    file = strange / "mlx_lm" / "server.py"
    edit(file, "def main():\n", LATER + "\n\ndef main():\n    _another_plugin()\n")
    server = start(fleet, full, strange, THUNDER_ALLOW_UNTESTED="1")
    server.may_fail = True  # what our wrapper could not do is logged with its stack trace
    prompt = text_of(100, seed)
    expected = fleet.expected(full, prompt=prompt)
    for _ in range(2):
        assert_same(expected, server.complete(prompt))
    feature = server.status()["features"]["ssd_cache"]
    assert feature["state"] in ("displaced", "applied", "conflict"), feature
    assert server.healthy()


def test_off_means_off(fleet: Fleet, full: Model, seed: int) -> None:
    """THUNDER=0: no route, no line, no folder; the stock server in every respect."""
    server = fleet.stock(full)
    assert server.get("/thunder/status")[0] == 404
    expected = fleet.expected(full, prompt=text_of(100, seed))
    answer = server.complete(text_of(100, seed))
    assert_same(expected, answer)
    assert "context_pilot" not in answer.usage
    assert not server.cache_dir.exists()
    assert not [line for line in server.log().splitlines() if line.startswith("thunder")]


def test_one_feature_off(fleet: Fleet, full: Model, seed: int) -> None:
    """THUNDER_SSD_CACHE=0: the status says who switched it off; the folder stays empty."""
    server = fleet.server(full, env={"THUNDER_SSD_CACHE": "0"})
    prompt = text_of(100, seed)
    for _ in range(2):
        assert_same(fleet.expected(full, prompt=prompt), server.complete(prompt))
    feature = server.status()["features"]["ssd_cache"]
    assert feature["state"] == "off" and "THUNDER_SSD_CACHE" in feature["reason"]
    assert not list(server.cache_dir.glob("v1/blocks/*/*"))
