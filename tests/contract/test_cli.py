"""The command: doctor, status, errors in one line, lazy subcommands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import Environment, make
from tests.contract.standhost import CORE, StandHost, installed
from thunder_patches import __version__, cli
from thunder_patches.cli import doctor
from thunder_patches.config import Settings, load
from thunder_patches.patching import report

CLI = "import sys; from thunder_patches.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandHost]:
    with installed(tmp_path, monkeypatch) as stand:
        yield stand


def settings(tmp_path: Path, **environ: str) -> Settings:
    return load({"THUNDER_CACHE_DIR": str(tmp_path / "cache"), **environ})


def findings(wanted: Settings) -> dict[str, list[doctor.Finding]]:
    found: dict[str, list[doctor.Finding]] = {}
    for finding in doctor.examine(wanted):
        found.setdefault(finding.about.strip(), []).append(finding)
    return found


# doctor


def test_doctor_of_a_sound_environment(from_wheel: Environment) -> None:
    done = from_wheel.run("-c", CLI, "doctor", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["ok"], done.stdout
    by = {each["about"]: each for each in told["findings"]}
    assert by["start"]["level"] == "ok"
    assert by["ssd_cache"]["text"].startswith("pending")
    assert by["  mlx_lm.server:ModelProvider._load"]["level"] == "ok"
    assert by["cache folder"]["level"] == "ok"
    assert "mlx_lm" in by


def test_doctor_does_not_import_the_host(from_wheel: Environment) -> None:
    code = (
        "import sys\nfrom thunder_patches.cli import doctor\n"
        "from thunder_patches.config import settings\nlist(doctor.examine(settings()))\n"
        "print([name for name in ('mlx', 'mlx_lm', 'omlx') if name in sys.modules])"
    )
    assert from_wheel.says(code) == "[]"


def test_doctor_says_that_nothing_starts(from_wheel: Environment) -> None:
    site = str(from_wheel.site)
    done = from_wheel.run(
        "-S", "-c", f"import sys; sys.path += {[site, *sys.path]!r}; {CLI}", "doctor", "--json"
    )
    told = json.loads(done.stdout)
    assert done.returncode == 1 and not told["ok"]
    [start] = [each for each in told["findings"] if each["about"] == "start"]
    assert start["level"] == "error" and "pip install" in start["advice"]


def test_doctor_notices_a_second_copy(
    from_wheel: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copies() -> list[str]:
        return [each.text for each in doctor._copies()]

    monkeypatch.setattr(sys, "path", [str(from_wheel.site)])
    assert copies() == []
    other = tmp_path / "thunder_patches-0.0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Name: thunder-patches\nVersion: 0.0.1\n")
    monkeypatch.setattr(sys, "path", [str(from_wheel.site), str(tmp_path)])
    [text] = copies()
    assert str(tmp_path) in text and str(from_wheel.site) in text


def test_doctor_names_settings_that_are_wrong(tmp_path: Path) -> None:
    wanted = settings(tmp_path, THUNDER_SDD_CACHE="1", THUNDER_CODEC="zip")
    warned = [each.text for each in findings(wanted)["settings"] if each.level == "warning"]
    assert len(warned) == 2
    assert any("did you mean THUNDER_SSD_CACHE?" in text for text in warned)


def test_doctor_says_what_keeps_a_patch_out(
    stand: StandHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.contract.standhost import FEATURES, PATCHES
    from thunder_patches.patching.registry import Registry

    monkeypatch.setattr(
        doctor,
        "Registry",
        lambda name, host, wanted: Registry(name, host, wanted, PATCHES, FEATURES),
    )
    assert {each.level for each in findings(settings(tmp_path))["base"]} == {"ok"}
    stand.install(core=CORE.replace("def serve(", "def serve_all("))
    found = findings(settings(tmp_path))
    assert [each.level for each in found["base"]] == ["error"]
    assert "reinstall" in found["base"][0].advice
    assert found["standhost.core:serve"][0].level == "note"
    assert [each.level for each in found["routes"]] == ["ok"]


def test_doctor_without_a_host(stand: StandHost, tmp_path: Path) -> None:
    [found] = findings(settings(tmp_path))["host"]
    assert found.level == "error" and "pip install it" in found.advice


@pytest.mark.parametrize("kind", ["file in its place", "under a file", "open to others"])
def test_doctor_looks_at_the_cache_folder(tmp_path: Path, kind: str) -> None:
    wanted = settings(tmp_path)
    if kind == "file in its place":
        wanted.cache_dir.write_text("")
    elif kind == "under a file":
        (tmp_path / "file").write_text("")
        wanted = load({"THUNDER_CACHE_DIR": str(tmp_path / "file" / "cache")})
    else:
        wanted.cache_dir.mkdir(mode=0o755)
    worst = findings(wanted)["cache folder"][-1]
    assert worst.level == ("warning" if kind == "open to others" else "error")
    assert worst.advice


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_doctor_and_a_read_only_cache_folder(tmp_path: Path) -> None:
    wanted = settings(tmp_path)
    wanted.cache_dir.mkdir(mode=0o500)
    assert findings(wanted)["cache folder"][0].level == "error"


# status


@pytest.fixture
def server(stand: StandHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process, with the stand-in patched, in the place of a server."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(cache))
    found = stand.registry(cache_dir=cache)
    found.apply()
    report.publish(found)
    yield cache
    report.withdraw()
    found.undo()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(cli.__file__).parents[2])
    environ = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, "-c", CLI, *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)


def test_status_has_the_form_of_the_route(server: Path) -> None:
    done = run("status", "--json")
    told: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 0
    assert told["processes"] == [os.getpid()]
    for key, value in report.status().items():
        assert told[key] == value
    assert told["features"]["base"] == {"state": "applied", "reason": ""}


def test_status_for_people_has_no_colour_when_piped(server: Path) -> None:
    done = run("status")
    assert done.returncode == 0
    assert f"process {os.getpid()}" in done.stdout and "applied" in done.stdout
    assert "\x1b" not in done.stdout


def test_status_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    done = run("status")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1 and "thunder doctor" in done.stderr
    done = run("status", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 1
    assert (told["host"], told["processes"], told["version"]) == (None, [], __version__)


def test_status_shows_text_that_looks_like_colour(
    server: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    told = report.status() | {"process": {"pid": 1, "started": 1.0}, "problems": ["[/red] a"]}
    told["features"] = {"[bold]b": {"state": "failed", "reason": "KeyError: [/c]"}}
    monkeypatch.setattr(report, "live_processes", lambda _: [told])
    assert cli.main(["status"]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("[/red] a", "[bold]b", "KeyError: [/c]"))


def test_status_of_one_process(server: Path) -> None:
    assert json.loads(run("status", "--json", "--pid", str(os.getpid())).stdout)["host"]
    done = run("status", "--pid", "1")
    assert done.returncode == 1 and "no process 1" in done.stderr


# the app


@pytest.mark.parametrize("words", [["nonsense"], ["status", "--nonsense"], ["status", "--pid=x"]])
def test_a_mistake_is_one_line(words: list[str]) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("thunder: ")


def test_an_error_inside_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fails(*_: object) -> None:
        raise OSError("the disk\nis gone")

    monkeypatch.setattr(report, "live_processes", fails)
    assert cli.main(["status"]) == 1
    assert capsys.readouterr().err == "thunder: OSError: the disk is gone\n"


def test_help_lists_the_commands_and_version_is_the_package_s() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "doctor" in done.stdout and "status" in done.stdout
    assert run().stdout == done.stdout
    assert run("--version").stdout == f"thunder {__version__}\n"


def test_only_the_asked_subcommand_is_imported(from_wheel: Environment) -> None:
    code = (
        "import sys; from thunder_patches.cli import COMMANDS, main; main(['status', '--help'])\n"
        "print([n for n in COMMANDS if f'thunder_patches.cli.{n}' in sys.modules])"
    )
    assert "['status']" in from_wheel.says(code)


def test_without_the_extra_it_says_what_to_install(tmp_path: Path, wheel: Path) -> None:
    alone = make(tmp_path / "alone", [str(wheel)])
    (alone.site / "zz_dependencies.pth").unlink()
    done = alone.run("-c", CLI, "doctor")
    assert done.returncode == 1
    assert done.stderr == "thunder: typer is missing; run: pip install 'thunder-patches[cli]'\n"
