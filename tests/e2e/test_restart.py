"""C12, C14 and C15: hits after a restart, from threads, and while the writer is still at it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.folder import CacheFolder
from tests.e2e.steps import MISS, added, counts, served
from tests.harness.client import parallel
from tests.harness.compare import assert_same
from tests.harness.fleet import Fleet
from tests.harness.models import Model, text_of


@pytest.mark.one_hybrid
def test_c12_restart(fleet: Fleet, model: Model, kind: str, seed: int) -> None:
    """Warm, stop, a new process with another PYTHONHASHSEED, the same prompts."""
    server = fleet.server(model, env={"PYTHONHASHSEED": "1"})
    prompt = text_of(300, seed)
    messages = [
        {"role": "system", "content": text_of(80, seed + 1)},
        {"role": "user", "content": text_of(40, seed + 2)},
    ]
    longer = [*messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go"}]
    served(fleet, server, model, prompt=prompt, cached=MISS)
    served(fleet, server, model, messages=messages, cached=MISS)
    length = len(model.tokens(model.chat(messages)))

    server.restart(PYTHONHASHSEED="2")
    assert server.status()["cache"]["ssd"]["blocks"] > 0
    served(fleet, server, model, prompt=prompt, cached=300)
    served(fleet, server, model, messages=messages, cached=length)
    served(fleet, server, model, messages=longer, cached=range(100, length))
    ending = text_of(30, seed + 3)
    served(fleet, server, model, prompt=prompt + ending, cached=range(256, 301))
    grown = added({}, counts(server))
    assert (grown["full"], grown["partial"], grown.get("miss", 0)) == (2, 2, 0)


def test_c12_killed_after_the_writes(fleet: Fleet, full: Model, seed: int, tmp_path: Path) -> None:
    """No clean-up at all at the end: what was written serves all the same."""
    from tests.e2e.folder import wait_for

    folder = CacheFolder(tmp_path / "cache")
    server = fleet.server(full, cache_dir=folder.root)
    prompt = text_of(300, seed)
    served(fleet, server, full, prompt=prompt, cached=MISS)
    wait_for(lambda: len(folder.records()) >= 10, "nine blocks and a snapshot")
    server.restart(kill=True)
    served(fleet, server, full, prompt=prompt, cached=300)


@pytest.mark.parametrize("stop", ["terminate", "interrupt"])
def test_a_stop_writes_what_is_queued(fleet: Fleet, full: Model, seed: int, stop: str) -> None:
    """The stock server cleans up nothing on SIGTERM; the queue must reach the disk all the same."""
    server = fleet.server(full, env={"HARNESS_SLOW_WRITES": "0.05"})
    prompt = text_of(300, seed)
    fleet.expected(full, prompt=prompt)
    served(fleet, server, full, prompt=prompt, cached=MISS)
    if stop == "interrupt":
        server.interrupt()
    server.restart(HARNESS_SLOW_WRITES=None)
    served(fleet, server, full, prompt=prompt, cached=300)


@pytest.mark.one_hybrid
def test_c14_threads(fleet: Fleet, model: Model, seed: int, batch_tolerance: float) -> None:
    """Restores for several requests at once while writes go on; no stream error, right answers."""
    server = fleet.server(model, env={"HARNESS_SLOW_WRITES": "0.02"})
    prompts = [text_of(150 + 9 * i, seed + i) for i in range(4)]
    for prompt in prompts:
        served(fleet, server, model, prompt=prompt, cached=MISS)
    server.restart()
    requests = [{"prompt": p + text_of(20, seed + 10 + i)} for i, p in enumerate(prompts)]
    expected = [fleet.expected(model, **request) for request in requests]
    answers = parallel(
        [
            *(lambda r=request: server.complete(**r) for request in requests),
            *(lambda i=i: server.complete(text_of(90, seed + 50 + i)) for i in range(2)),
        ]
    )
    for want, answer in zip(expected, answers, strict=False):
        assert_same(want, answer, batch_tolerance)
        assert answer.cached_tokens
    # What was written meanwhile is sound: the same once more, in a new process.
    server.restart()
    for request in requests:
        answer = served(fleet, server, model, **request)
        assert answer.cached_tokens == answer.prompt_tokens


@pytest.mark.one_hybrid
def test_c15_at_once(fleet: Fleet, model: Model, seed: int) -> None:
    """The second request 0 ms after the first, a slowed writer, room for one entry in RAM."""
    server = fleet.shared(model, env={"HARNESS_SLOW_WRITES": "1.0", "THUNDER_RAM_CACHE_MB": "1"})
    for number, extra in enumerate[dict[str, Any]]([{}, {"seed": 1}]):
        prompt = text_of(300, seed + number)
        expected = fleet.expected(model, prompt=prompt, **extra)
        first = server.complete(prompt, **extra)
        second = server.complete(prompt, **extra)
        assert_same(expected, first)
        assert_same(expected, second)
        assert second.cached_tokens == 300
