"""The maintainers' command: recording an installed host makes its patches apply."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.standhost import CORE, PATCHES, StandHost, installed
from thunder_patches.patching import catalogue, compat, maintain
from thunder_patches.patching.patch import State


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandHost]:
    with installed(tmp_path, monkeypatch) as stand:
        monkeypatch.setattr(catalogue, "PATCHES", PATCHES)
        yield stand


def applied(stand: StandHost) -> set[str]:
    found = stand.registry()
    found.apply()
    states = {name for name, verdict in found.verdicts.items() if verdict.state is State.APPLIED}
    found.undo()
    return states


def entries() -> list[dict[str, object]]:
    compat.hosts.cache_clear()
    text = (compat.folder() / "hosts.toml").read_text()
    found: list[dict[str, object]] = tomllib.loads(text)["hosts"]["standhost"].get("versions", [])
    return found


def test_a_new_version_is_known_after_recording(stand: StandHost) -> None:
    stand.install(version="1.2", core=CORE.replace("get", "got"))
    assert applied(stand) == set()
    said = maintain.add("standhost", ['a "quoted" fact', "中文"], "git")
    assert said == "standhost 1.2: 3 targets; absent: standhost.core:Handler.do_DELETE"
    assert applied(stand) == {"base", "child", "static", "routes"}
    assert compat.recorded("standhost") == ["1.0", "1.2"]
    assert entries() == [
        {
            "distribution": "standhost",
            "version": "1.2",
            "source": "git",
            "facts": ['a "quoted" fact', "中文"],
        }
    ]


def test_recording_again_changes_nothing(stand: StandHost) -> None:
    maintain.add("standhost", [])
    before = compat.file("standhost", "1.0").read_text()
    compat.hosts.cache_clear()
    maintain.add("standhost", ["later"])
    assert compat.file("standhost", "1.0").read_text() == before
    assert len(entries()) == 1


def test_two_builds_of_one_version_are_both_accepted(stand: StandHost) -> None:
    maintain.add("standhost", [])
    stand.install(core=CORE.replace("serve {value}", "serves {value}"))
    assert "base" not in applied(stand)
    maintain.add("standhost", [])
    assert "base" in applied(stand)
    stand.install()
    assert "base" in applied(stand)


def test_a_fork_is_recorded_under_its_own_name(stand: StandHost) -> None:
    stand.install(name="fork")
    maintain.add("standhost", [])
    assert compat.recorded("fork") == ["1.0"]
    assert len(applied(stand)) == 4


def test_absent_host_is_an_error_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from thunder_patches.patching import host

    if host.find("omlx") is not None:
        pytest.skip("omlx is installed here")
    assert maintain.main(["add", "omlx"]) == 1
    assert capsys.readouterr().err.startswith("maintain: omlx is not installed in ")
