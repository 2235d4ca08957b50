"""The index of recent prompts: what it finds, what it keeps on disk, and what it never tells."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from tests.core.test_pilot_explain import AGENT, BASE, edited
from thunder_patches.pilot.explain import Miss
from thunder_patches.pilot.fingerprints import (
    describe,
    message_hash,
    request_print,
    system_prompt_hash,
)
from thunder_patches.pilot.index import Index

SECRET = "the password is swordfish"


def record(index: Index, messages, tokens=range(100), **fields) -> None:
    request = request_print(messages, model=fields.pop("model", "m"), **fields)
    index.record(request, messages, list(tokens), [None] * len(messages))


def find(index: Index, messages, **fields):
    request = request_print(messages, model=fields.pop("model", "m"), **fields)
    return index.find(request, describe(messages[0]))


def test_longest_shared_beginning_wins_and_the_own_model_comes_first() -> None:
    index = Index()
    record(index, BASE[:2])
    record(index, BASE[:4])
    record(index, [BASE[0], BASE[3]])
    assert find(index, BASE).shared == 4
    assert find(index, [BASE[0], BASE[3], BASE[4]]).shared == 2
    record(index, BASE, model="other")
    assert find(index, BASE).entry.request.model == "m"
    assert find(index, BASE, model="new").same_model is False


def test_salts_are_separate() -> None:
    index = Index()
    record(index, BASE, salt="a")
    assert find(index, BASE, salt="b") is None
    assert find(index, BASE) is None
    assert find(index, BASE, salt="a").shared == len(BASE)
    salt = request_print(BASE, model="m", salt="b").salt
    assert index.text(salt, message_hash(BASE[0])) is None
    assert index.recent(salt) == []


def test_bounded() -> None:
    index = Index(entries=5, salts=3, memory_bytes=4000)
    for i in range(40):
        record(index, edited(BASE, 1, content=f"question {i}"), salt=str(i // 10))
    assert len(index) <= 15
    assert index._memory <= 4000
    newest = request_print(BASE, model="m", salt="3").salt
    assert len(index.recent(newest)) == 5
    part = index._parts[newest]
    known = {m.hash for e in part.entries.values() for m in e.messages}
    assert set(part.known) == known
    assert {n for numbers in part._chains.values() for n in numbers} == set(part.entries)
    assert {n for numbers in part._traits.values() for n in numbers} == set(part.entries)


def test_file_is_private_bounded_and_without_text(tmp_path: Path) -> None:
    path = tmp_path / "pilot.jsonl"
    index = Index(path, file_bytes=20_000)
    for i in range(60):
        record(index, edited(BASE, 1, content=f"{SECRET} {i}"), salt="key")
    assert index.save()
    data = path.read_bytes()
    assert len(data) <= 20_000
    assert SECRET.encode() not in data
    assert b"careful coding agent" not in data
    assert b"key" not in data.replace(b"model", b"")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["pilot.jsonl"]
    again = Index(path)
    assert again.problem == ""
    assert 0 < len(again) < 60
    assert find(again, edited(BASE, 1, content=f"{SECRET} 59"), salt="key").shared == len(BASE)


def test_a_miss_is_kept_and_its_texts_only_when_asked_for(tmp_path: Path) -> None:
    detail = {"before": SECRET, "now": SECRET + "?"}
    miss = Miss(7, 0, "system", "text_edited", "system prompt differs", detail)
    assert "now" not in miss.to_json()
    for keep in (False, True):
        path = tmp_path / f"{keep}.jsonl"
        index = Index(path, keep_text=keep)
        request = request_print(BASE, model="m")
        index.record(request, BASE, range(9), [None] * len(BASE), miss=miss.to_json(text=True))
        assert index.recent(request.salt)[0].miss["now"] == SECRET + "?"
        index.save()
        (entry,) = Index(path).recent(request.salt)
        assert entry.miss["reason"] == "system prompt differs"
        assert (SECRET in str(entry.miss)) is keep
        assert (SECRET.encode() in path.read_bytes()) is keep


def test_text_on_disk_only_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "pilot.jsonl"
    index = Index(path, keep_text=True)
    record(index, [{"role": "user", "content": SECRET}])
    assert index.save()
    assert SECRET.encode() in path.read_bytes()
    again = Index(path)
    salt = request_print([], model="m").salt
    assert again.text(salt, message_hash({"role": "user", "content": SECRET})) == SECRET


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"\xff\xfe\x00" * 50,
        lambda data: data.replace(b'"format":1', b'"format":99'),
        lambda data: data.replace(b'"total"', b'"totel"'),
        lambda data: data + b'{"salt": 1, "entry": []}\n',
        lambda data: b"[" * 100_000,
    ],
)
def test_damaged_file_costs_memory_only(tmp_path: Path, damage) -> None:
    path = tmp_path / "pilot.jsonl"
    index = Index(path)
    record(index, BASE)
    index.save()
    path.write_bytes(damage(path.read_bytes()))
    again = Index(path)
    assert "not readable" in again.problem
    record(again, BASE)
    assert again.save()
    assert find(Index(path), BASE).shared == len(BASE)


def test_symlink_is_not_followed_and_a_full_folder_is_said(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text(json.dumps({"format": 1}) + "\n")
    link = tmp_path / "pilot.jsonl"
    link.symlink_to(outside)
    assert "could not read" in Index(link).problem
    index = Index(tmp_path / "missing" / "pilot.jsonl")
    record(index, BASE)
    assert not index.save()
    assert "could not write" in index.problem


def test_threads() -> None:
    index = Index(entries=8, memory_bytes=20_000)
    errors: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for i in range(60):
                messages = edited(BASE, n % 4, content=f"text {i % 7}")
                find(index, messages)
                record(index, messages)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(index) <= 8


def test_hashes() -> None:
    assert system_prompt_hash(BASE[1:]) is None
    assert len(system_prompt_hash(BASE)) == 16
    assert system_prompt_hash(BASE) != system_prompt_hash(edited(BASE, 0, content="x"))
    # Fields are framed: moving text between neighbours changes the hash.
    two = [{"role": "system", "content": "ab"}, {"role": "system", "content": "c"}]
    assert system_prompt_hash(two) != system_prompt_hash(
        [edited(two, 0, content="a")[0], {**two[1], "content": "bc"}]
    )
    assert message_hash(AGENT[2]) != message_hash({**AGENT[2], "tool_calls": []})
