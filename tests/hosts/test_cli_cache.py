"""``thunder cache`` on a folder: what it says to people, to programs, and where there is no terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_cli import CLI
from tests.core.cache_support import ROOT, blocks, file_of, open_store, snapshot
from thunder_patches import cli, config
from thunder_patches.cache.keys import root_key
from thunder_patches.pilot.fingerprints import request_print
from thunder_patches.pilot.index import Index

SHARED = list(range(12))
OTHER = root_key("another model", "", "", 4)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of three shared blocks, two branches, a snapshot, and a prompt of another model."""
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    store = open_store(tmp_path / "v1")
    now = time.time_ns()
    for age, (root, prompt) in enumerate(
        [(ROOT, [*SHARED, *range(20, 28)]), (ROOT, [*SHARED, *range(30, 38)]), (OTHER, SHARED)]
    ):
        for record in blocks(root, prompt):
            store.put(record, now - 3_600_000_000_000 * age)
    store.put(snapshot(ROOT, [*SHARED, *range(20, 28), 1, 2], 22, end=True), now)
    assert store.flush()
    store.close()
    yield tmp_path / "v1"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """The command, in this process: its exit status and what it says."""
    config.settings.cache_clear()
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    yield
    config.settings.cache_clear()


def told(*words: str) -> dict[str, Any]:
    done = run("cache", *words, "--json")
    assert done.stderr == ""
    return dict(json.loads(done.stdout))


def test_ls_shows_the_tree(folder: Path) -> None:
    found = told("ls")["stretches"]
    assert sorted(one["blocks"] for one in found) == [0, 0, 2, 2, 3, 3]
    done = run("cache", "ls")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 7 and "\x1b" not in done.stdout
    root, shared, *branches = (line.rstrip().rfind(" ") for line in lines[1:5])
    assert root > 0 and set(branches) == {shared + 2}
    assert "3 further prefixes with" in run("cache", "ls", "--limit", "3").stdout


def test_stat_of_all_and_of_one(folder: Path) -> None:
    whole = told("stat")
    assert (whole["blocks"], whole["snapshots"], whole["roots"]) == (10, 1, 2)
    files = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert whole["bytes"] == files
    key = blocks(ROOT, SHARED)[1].header.key.hex()
    one = told("stat", key[:10])
    assert (one["key"], one["first_token"], one["tokens"]) == (key, 4, 4)
    assert one["codecs"] == {"raw": 2} and one["lossy"] is None
    done = run("cache", "stat", "ff00ff")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_verify_finds_a_flipped_bit(folder: Path) -> None:
    good = told("verify")
    assert (good["records"], good["bad"]) == (11, [])
    bad = blocks(ROOT, SHARED)[1].header
    path = file_of(folder, bad)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    done = run("cache", "verify", "--json")
    assert done.returncode == 1
    assert [one["key"] for one in json.loads(done.stdout)["bad"]] == [bad.key.hex()]
    done = run("cache", "verify")
    assert done.returncode == 1 and bad.key.hex() in done.stdout and done.stderr == ""
    assert path.exists()


def test_clear_asks_and_frees(folder: Path) -> None:
    done = run("cache", "clear")
    assert done.returncode == 2 and "--yes" in done.stderr
    assert told("stat")["blocks"] == 10
    freed = told("clear", "--yes")
    assert freed["records"] == 11 and freed["freed_bytes"] > 0
    assert told("stat")["blocks"] == told("verify")["records"] == 0


@pytest.mark.parametrize("answer", ["n", "y"])
def test_on_a_terminal_it_asks_and_shows_how_far_it_is(folder: Path, answer: str) -> None:
    code, shown = on_terminal(f"{answer}\n", "cache", "clear")
    assert "Delete 11 records" in shown
    left = told("stat")["blocks"]
    if answer == "n":
        assert (code, left) == (130, 10) and "stopped" in shown
    else:
        assert (code, left) == (0, 0) and "11/11" in shown
    code, shown = on_terminal("", "cache", "verify")
    assert code == 0 and f"{0 if answer == 'y' else 11}/" in shown


def on_terminal(typed: str, *words: str) -> tuple[int, str]:
    """Run the command on a terminal of its own; exit status and all that it showed."""
    mine, its = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2]), "TERM": "xterm"}
    command = [sys.executable, "-c", CLI, *words]
    process = subprocess.Popen(command, env=environ, stdin=its, stdout=its, stderr=its)
    os.close(its)
    os.write(mine, typed.encode())
    shown = b""
    while True:
        try:
            part = os.read(mine, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(mine)
    return process.wait(60), shown.decode()


def test_an_empty_folder_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path / "nothing"))
    for words in (["ls"], ["stat"], ["verify"], ["clear", "--yes"], ["explain"]):
        assert run("cache", *words).returncode == 0
        assert run("cache", *words, "--json").returncode == 0
    assert not (tmp_path / "nothing").exists()


# explain

NONCE = "Session id: 3f0a{:04d}-1111-4222-8333-444455556666\nYou are a helpful engine."


def remember(folder: Path, *, keep_text: bool) -> None:
    """Two prompts of one user whose system prompts differ in a nonce, and one with a hostile text."""
    index = Index(folder / "prompts.jsonl", keep_text=keep_text)
    for number, system in enumerate([NONCE.format(1), NONCE.format(2)]):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}]
        miss = None
        if number:
            miss = {"token": 7, "message": 0, "role": "system", "code": "uuid", "reason": "a UUID"}
            miss |= {"before": "[red]\x1b[31m3f0a0001", "now": "3f0a0002"}
        seen = request_print(messages, model="m")
        index.record(seen, messages, list(range(40)), (20, 30), miss=miss, now=time.time() - 9)
    assert index.save()


@pytest.mark.parametrize("keep_text", [True, False])
def test_explain_shows_misses_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_text: bool
) -> None:
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    remember(tmp_path, keep_text=keep_text)
    found = told("explain")
    [row] = found["misses"]
    assert (found["prompts"], row["token"], row["reason"]) == (2, 7, "a UUID")
    assert "before" not in row and "stabiliser" not in row
    assert len(told("explain", "--all")["misses"]) == 2
    plain, texts = run("cache", "explain").stdout, run("cache", "explain", "--text").stdout
    assert "a UUID" in plain and "3f0a" not in plain
    assert ("3f0a0002" in texts) is keep_text
    assert ("THUNDER_SHOW_TEXT" in texts) is not keep_text
    assert "\x1b" not in texts and ("[red]" in texts) is keep_text


def test_explain_says_what_the_stabiliser_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    remember(tmp_path, keep_text=False)
    assert "perhaps" in told("explain", "--with-stabiliser")["misses"][0]["stabiliser"]
    remember(tmp_path, keep_text=True)
    said = told("explain", "--with-stabiliser")["misses"][0]["stabiliser"]
    assert said.startswith("reused further: ")
    assert "reused further" in run("cache", "explain", "--with-stabiliser").stdout


# the app


@pytest.mark.parametrize(
    ("line", "expected", "not_expected"),
    [
        ("thunder ca", {"cache", "calibrate"}, "status"),
        ("thunder cache ver", {"verify"}, "clear"),
        ("thunder cache ls --", {"--limit", "--json"}, "--yes"),
    ],
)
def test_the_shell_completes(line: str, expected: set[str], not_expected: str) -> None:
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    environ = {**os.environ, **words, "_THUNDER_COMPLETE": "complete_bash"}
    environ["PYTHONPATH"] = str(Path(cli.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", CLI], env=environ, capture_output=True, text=True, timeout=60
    )
    found = set(done.stdout.split())
    assert expected <= found and not_expected not in found


def test_every_command_has_json_and_one_line_for_a_mistake() -> None:
    for words in (["doctor"], ["status"], ["calibrate"], ["bench"], ["demo"]):
        assert "--json" in run(*words, "--help").stdout
    for name in ("ls", "stat", "verify", "clear", "explain"):
        assert "--json" in run("cache", name, "--help").stdout
        done = run("cache", name, "--nonsense")
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
