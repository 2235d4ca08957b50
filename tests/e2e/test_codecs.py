"""Codecs on a real server: what hits after a restart, what is exact, and what says that it isn't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.coded import calibrated
from tests.e2e.folder import CacheFolder, wait_for
from tests.e2e.steps import MISS, added, counts, served
from tests.harness.compare import Answer, assert_same, assert_telling
from tests.harness.fleet import Fleet
from tests.harness.models import Model, text_of
from tests.harness.server import Server
from thunder_patches.cache import audit

LOSSY = ("int8", "kvtc")
PLAIN = ("raw", "planes+zstd", "planes+lz4")


def lossy(answer: Answer) -> str | None:
    """What the response says of it."""
    found: str | None = answer.usage["context_pilot"].get("lossy")
    return found


def codecs_of(folder: Path) -> dict[str, set[str]]:
    """The codecs of each tensor name in a folder's records."""
    found: dict[str, set[str]] = {}
    for file in audit.records(folder / "v1"):
        for part in audit.head(folder / "v1", file).parts:
            if part.spec.nbytes:
                found.setdefault(part.spec.name, set()).add(part.codec)
    return found


def settled(server: Server, before: set[Path]) -> None:
    """Wait until what a request stored is on the disk."""
    folder = CacheFolder(server.cache_dir)
    wait_for(lambda: folder.records() - before and not folder.temporary(), "the records")
    wait_for(lambda: not server.status()["cache"]["queue"]["blocks"], "the writers")


@pytest.mark.one_hybrid
@pytest.mark.parametrize("codec", ["auto", "raw", "lossless"])
def test_exact_codecs_hit_and_answer_the_same(
    fleet: Fleet, model: Model, kind: str, seed: int, codec: str
) -> None:
    server = fleet.server(model, env={"THUNDER_CODEC": codec})
    prompt = text_of(200, seed)
    served(fleet, server, model, prompt=prompt, cached=MISS)
    server.restart()
    answer = served(fleet, server, model, prompt=prompt, cached=200)
    served(fleet, server, model, prompt=prompt + text_of(30, seed + 1), cached=range(160, 201))
    assert lossy(answer) is None and server.status()["cache"]["codec"]["mode"] == codec
    used = set.union(*codecs_of(server.cache_dir).values())
    assert used == {"raw"} if codec != "lossless" else "planes+zstd" in used


@pytest.mark.one_hybrid
@pytest.mark.parametrize("codec", LOSSY)
def test_lossy_codecs_hit_after_a_restart_and_say_so(
    fleet: Fleet, model: Model, kind: str, seed: int, tmp_path: Path, codec: str
) -> None:
    """Each kind has layers of full attention, whose rows are coded; all other state stays exact."""
    cache = tmp_path / "cache"
    if codec == "kvtc":
        told = calibrated(fleet, model, cache)
        assert set(told["held_out"]) == {"high", "balanced", "small"}
    server = fleet.server(model, cache_dir=cache, env={"THUNDER_CODEC": codec})
    prompt = text_of(200, seed)
    first = served(fleet, server, model, prompt=prompt, cached=MISS)
    assert lossy(first) is None, "nothing of it came from the store"
    settled(server, set())

    server.restart(kill=True)
    status = server.status()["cache"]["codec"]
    assert status["mode"] == codec and status["quality"] == "balanced"
    again = server.complete(prompt)
    longer = server.complete(prompt + text_of(30, seed + 1))
    assert again.cached_tokens == 200 and longer.cached_tokens in range(160, 201)
    for answer in (again, longer):
        assert_telling(answer)
        assert lossy(answer) == codec
        assert answer.usage["context_pilot"]["source"] == "ssd"

    found = codecs_of(cache)
    rows = {name for name in found if name.rstrip("0123456789") in ("k", "v")}
    assert codec in set.union(*(found[name] for name in rows))
    assert kind == "full" or any(name.startswith("s") for name in found)
    for name in set(found) - rows:
        assert found[name] <= set(PLAIN), f"{name} is stored as {found[name]}"


@pytest.mark.parametrize("codec", LOSSY)
def test_lossy_blocks_never_answer_an_exact_look_up(
    fleet: Fleet, full: Model, seed: int, tmp_path: Path, codec: str
) -> None:
    cache = tmp_path / "cache"
    if codec == "kvtc":
        calibrated(fleet, full, cache)
    server = fleet.server(full, cache_dir=cache, env={"THUNDER_CODEC": codec})
    prompt = text_of(200, seed)
    served(fleet, server, full, prompt=prompt, cached=MISS)
    server.restart(kill=False)
    approximate = server.complete(prompt + text_of(20, seed + 1))
    assert approximate.cached_tokens and lossy(approximate) == codec

    server.restart(THUNDER_CODEC=None)
    longer = prompt + text_of(20, seed + 1)
    exact = served(fleet, server, full, prompt=longer, cached=MISS)
    assert lossy(exact) is None
    assert exact.logprobs != approximate.logprobs, "the control: lossy state gives other numbers"
    server.restart()
    assert lossy(served(fleet, server, full, prompt=longer, cached=220)) is None

    server.restart(THUNDER_CODEC=codec)
    there = server.complete(longer)
    assert there.cached_tokens == 220 and lossy(there) == codec, "and they are still there"


def test_without_calibration_kvtc_is_exact_and_says_so(
    fleet: Fleet, full: Model, seed: int
) -> None:
    server = fleet.server(full, env={"THUNDER_CODEC": "kvtc"})
    prompt = text_of(200, seed)
    served(fleet, server, full, prompt=prompt, cached=MISS)
    server.restart()
    assert lossy(served(fleet, server, full, prompt=prompt, cached=200)) is None
    told = server.status()["cache"]["codec"]
    assert told["lossy"] is None and "thunder calibrate" in told["reason"]
    assert "kvtc" not in set.union(*codecs_of(server.cache_dir).values())


def test_a_lost_calibration_costs_the_hit_only(
    fleet: Fleet, full: Model, seed: int, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    calibrated(fleet, full, cache)
    server = fleet.server(full, cache_dir=cache, env={"THUNDER_CODEC": "kvtc"})
    prompt = text_of(200, seed)
    served(fleet, server, full, prompt=prompt, cached=MISS)
    server.stop()
    for file in (cache / "calibrations").iterdir():
        file.unlink()
    server.restart()
    answer = served(fleet, server, full, prompt=prompt, cached=MISS)
    assert lossy(answer) is None and counts(server)["corrupt"] >= 1
    assert_same(answer, served(fleet, server, full, prompt=prompt, cached=200))


def test_old_blocks_are_re_encoded_while_nothing_runs(fleet: Fleet, full: Model, seed: int) -> None:
    """A folder nearly full; the blocks of the first prompts are exact in fewer bytes, then."""
    server = fleet.server(full, env={"THUNDER_CACHE_MAX_GB": "0.0012"})
    prompts = [text_of(300, seed + i) for i in range(3)]
    for prompt in prompts:
        served(fleet, server, full, prompt=prompt, cached=MISS)
    before = counts(server)
    grown = wait_for(lambda: added(before, counts(server)).get("blocks_reencoded"), "idle time", 40)
    assert grown and "planes+zstd" in set.union(*codecs_of(server.cache_dir).values())
    server.restart()
    served(fleet, server, full, prompt=prompts[-1], cached=300)
    served(fleet, server, full, prompt=prompts[-2], cached=range(256, 301))
    assert counts(server)["corrupt"] == 0


def test_kvtc_calibrates_itself_from_stored_prompts(fleet: Fleet, full: Model, seed: int) -> None:
    """Asked for, it happens while nothing runs; requests meanwhile are answered as ever."""
    env = {"THUNDER_CODEC": "kvtc", "THUNDER_CALIBRATE_AFTER": "3"}
    server = fleet.server(full, env=env)
    for i in range(6):
        served(fleet, server, full, prompt=text_of(750, seed + i), cached=MISS)

    def learnt() -> Any:
        return server.status()["cache"]["codec"]["calibrations"]

    def began() -> bool:
        return "calibrating kvtc" in server.log()

    wait_for(began, "idle time", 30)
    served(fleet, server, full, prompt=text_of(90, seed + 9), cached=MISS)
    (told,) = wait_for(learnt, "the calibration", 120)
    assert told["tokens"] >= 4000 and set(told["held_out"]) == {"high", "balanced", "small"}

    prompt = text_of(200, seed + 10)
    server.complete(prompt)
    server.restart()
    again = server.complete(prompt)
    assert again.cached_tokens == 200 and lossy(again) == "kvtc"
    assert "kvtc" in set.union(*codecs_of(server.cache_dir).values())
