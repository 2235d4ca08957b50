"""The report: start-up line, status, status file."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.standhost import CORE, StandHost, installed
from thunder_patches import __version__
from thunder_patches.config import Settings, load
from thunder_patches.patching import report
from thunder_patches.patching.patch import State
from thunder_patches.patching.registry import Registry


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandHost]:
    with installed(tmp_path, monkeypatch) as stand:
        yield stand


@pytest.fixture
def published(stand: StandHost, tmp_path: Path) -> Iterator[Registry]:
    found = stand.registry(cache_dir=tmp_path / "cache")
    found.apply()
    report.publish(found)
    yield found
    report.withdraw()
    found.undo()


def test_line_when_all_is_well(stand: StandHost) -> None:
    found = stand.registry()
    found.apply()
    assert report.startup_line(found) == f"thunder {__version__}: 4 of 4 features on"


def test_line_names_what_is_missing_once(stand: StandHost) -> None:
    stand.install(core=CORE.replace("def serve(", "def serve_all("))
    found = stand.registry()
    found.apply()
    assert report.startup_line(found) == (
        f"thunder {__version__}: 2 of 4 features on; base unknown fingerprint "
        "(standhost 1.0 has no standhost.core:serve)"
    )


def test_line_joins_features_with_one_reason(stand: StandHost) -> None:
    stand.install(version="1.9")
    found = stand.registry()
    found.apply()
    assert report.startup_line(found) == (
        f"thunder {__version__}: 0 of 4 features on; base, static, routes unknown version "
        "(standhost 1.9 is not known here (known: 1.0))"
    )


def test_line_when_switched_off_and_with_problems(stand: StandHost) -> None:
    found = stand.registry()
    found.settings = load({"THUNDER": "0"})
    found.apply()
    assert report.startup_line(found) == f"thunder {__version__}: off (THUNDER=0)"
    found = stand.registry()
    found.settings = load({"THUNDER_SSDCACHE": "1"})
    found.apply()
    assert report.startup_line(found).endswith(
        "4 of 4 features on; THUNDER_SSDCACHE is not a setting; did you mean THUNDER_SSD_CACHE?"
    )


def test_status_has_the_promised_form(published: Registry) -> None:
    found = report.status()
    assert found["version"] == __version__
    assert found["host"] == {
        "name": "standhost",
        "distribution": "standhost",
        "version": "1.0",
        "fingerprint": published.fingerprint,
    }
    assert found["features"]["base"] == {"state": "applied", "reason": ""}
    for tier in ("ram", "ssd"):
        assert set(found["cache"][tier]) >= {"bytes", "budget_bytes", "blocks"}
    assert set(found["cache"]["counts"]) >= {
        *("full", "approximate", "partial", "miss", "tokens_skipped", "tokens_computed"),
        *("blocks_written", "blocks_evicted", "writes_dropped", "corrupt", "set_aside"),
    }
    assert set(found["model"]) >= {"identity", "family", "eligible", "reason"}
    json.dumps(found)


def test_sections_and_notes(published: Registry) -> None:
    report.add_section("model", lambda: {"identity": "abc"})
    report.add_section("bad", lambda: 1 / 0)
    report.note("base", State.NOT_ELIGIBLE, "the model has no cache")
    found = report.status()
    assert found["model"] == {"identity": "abc"}
    assert found["bad"] == {"error": "ZeroDivisionError: division by zero"}
    assert found["features"]["base"]["state"] == "not_eligible"
    report.note("base", None)
    assert report.status()["features"]["base"]["state"] == "applied"


def test_status_file_is_private_and_goes_at_the_end(published: Registry, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "run"
    file = folder / f"{os.getpid()}.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [each.name for each in folder.iterdir()] == [file.name]
    [seen] = report.live_processes(published.settings)
    assert seen["process"]["pid"] == os.getpid()
    assert seen["features"] == report.status()["features"]
    report.add_section("more", lambda: 1)
    report.refresh()
    assert report.live_processes(published.settings)[0]["more"] == 1
    report.withdraw()
    assert list(folder.iterdir()) == []


def test_files_of_dead_processes_and_torn_files_are_not_shown(
    published: Registry, tmp_path: Path
) -> None:
    folder = tmp_path / "cache" / "run"
    mine = json.loads((folder / f"{os.getpid()}.json").read_text())
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    # The second has a number that is in use again, by a process that started at another time.
    for pid, started in ((dead.pid, 1.0), (os.getppid(), 1.0)):
        process = {**mine["process"], "pid": pid, "started": started}
        (folder / f"{pid}.json").write_text(json.dumps({**mine, "process": process}))
    (folder / "99999999.json").write_text('{"version": "0.')
    (folder / "0.json").write_text("[]")
    seen = report.live_processes(published.settings)
    assert [each["process"]["pid"] for each in seen] == [os.getpid()]
    assert not (folder / f"{dead.pid}.json").exists()


def test_a_folder_that_can_t_be_written_does_no_harm(stand: StandHost, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    found = stand.registry(cache_dir=blocked / "cache")
    found.apply()
    report.publish(found)
    try:
        assert report.status()["features"]["base"]["state"] == "applied"
        assert report.live_processes(replace(Settings(), cache_dir=blocked / "cache")) == []
    finally:
        report.withdraw()
