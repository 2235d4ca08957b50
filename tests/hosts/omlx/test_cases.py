"""The cases that `tests/e2e` has for mlx_lm.server, on oMLX: answers, logprobs, model calls counted."""

from __future__ import annotations

import http.client
import json
import random
from pathlib import Path

import pytest

from tests.e2e.folder import CacheFolder, wait_for
from tests.e2e.steps import MISS, added, counts, served
from tests.e2e.test_bad_files import test_a_spoiled_snapshot
from tests.e2e.test_branch import test_a_prompt_cut_short, test_c3_branch, test_c4_growing_chat
from tests.e2e.test_failures import test_c11_killed
from tests.e2e.test_full_hit import test_c1_full_hit, test_c2_repeat
from tests.e2e.test_restart import test_c12_restart, test_c15_at_once
from tests.harness.client import parallel
from tests.harness.compare import assert_same, differences
from tests.harness.fleet import Fleet
from tests.harness.models import Model, text_of
from tests.harness.server import Server
from tests.hosts.omlx.serving import NAME

__all__ = [
    "test_a_prompt_cut_short",
    "test_a_spoiled_snapshot",
    "test_c1_full_hit",
    "test_c2_repeat",
    "test_c3_branch",
    "test_c4_growing_chat",
    "test_c11_killed",
    "test_c12_restart",
    "test_c15_at_once",
]
SMALL_CHUNKS = ("--prefill-step-size", "24")


def test_the_reference_can_fail(fleet: Fleet, model: Model, seed: int) -> None:
    """One word changed at the start, in the middle and at the end moves the answer's logprobs."""
    words = text_of(150, seed).split()
    expected = fleet.expected(model, prompt=" ".join(words))
    for position in (5, 75, 145):
        changed = [*words[:position], "nowhere", *words[position + 1 :]]
        answer = fleet.expected(model, prompt=" ".join(changed), telling=False)
        assert differences(expected, answer), f"word {position} left no trace"


@pytest.mark.parametrize("chunked", [False, True], ids=["one-step", "interleaved"])
def test_c8_failure_inside(fleet: Fleet, model: Model, seed: int, chunked: bool) -> None:
    """Restored prefix, an error in the third chunk; the host lives on; retry, and a third client."""
    settings = {"version": "1.0", "scheduler": {"chunked_prefill": True}} if chunked else None
    server = fleet.server(model, args=SMALL_CHUNKS, settings=settings)
    prefix = text_of(100, seed)
    long = prefix + text_of(150, seed + 1)
    served(fleet, server, model, args=SMALL_CHUNKS, prompt=prefix, cached=MISS)

    server.inject(after=2, error="injected by the test")
    with pytest.raises((OSError, http.client.HTTPException, ValueError)):
        server.complete(long)
    assert "injected by the test" in server.log()

    third = prefix + text_of(60, seed + 2)
    retry = served(fleet, server, model, args=SMALL_CHUNKS, prompt=long, cached=range(99, 250))
    served(fleet, server, model, args=SMALL_CHUNKS, prompt=third, cached=range(99, 104))
    again = served(fleet, server, model, args=SMALL_CHUNKS, prompt=long, cached=250)
    assert_same(retry, again)


def test_c7_cancelled_prefill(fleet: Fleet, full: Model, seed: int) -> None:
    """The client hangs up in the fifth of eleven chunks and asks again: finished ones are reused."""
    server = fleet.server(full, args=SMALL_CHUNKS)
    server.may_fail = True
    served(fleet, server, full, args=SMALL_CHUNKS, prompt=text_of(20, seed + 1))
    prompt = text_of(250, seed)
    server.inject(after=4, sleep=6.0)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    body = {"model": NAME, "prompt": prompt, "stream": True}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    fault = server.trace_file.with_name(server.trace_file.name + ".fault")
    wait_for(lambda: not fault.exists(), "the fifth chunk")
    answer.close()
    connection.close()
    wait_for(lambda: "Prefill interrupted" in server.log(), "the host to notice")
    served(fleet, server, full, args=SMALL_CHUNKS, prompt=prompt, cached=range(90, 200))


def test_c16_parallel(fleet: Fleet, model: Model, seed: int) -> None:
    """Six prompts with a shared prefix at once, RAM for two entries, some clients hang up."""
    server = fleet.server(model, env={"THUNDER_RAM_CACHE_MB": "1"})
    prefix = text_of(100, seed)
    prompts = [prefix + text_of(10 + 7 * i, seed + 1 + i) for i in range(6)]
    expected = [fleet.expected(model, prompt=p, max_tokens=8).text for p in prompts]
    assert len(set(expected)) == 6
    rng = random.Random(seed)
    for _ in range(6):
        leaving = {i for i in range(6) if rng.random() < 0.15}
        answers = parallel(
            [
                (lambda p=prompt: _leave_early(server, p))
                if i in leaving
                else (lambda p=prompt: server.complete(p, max_tokens=8).text)
                for i, prompt in enumerate(prompts)
            ]
        )
        for i, answer in enumerate(answers):
            assert i in leaving or answer == expected[i], f"prompt {i}"
    grown = added({}, counts(server))
    lookups = sum(grown.get(name, 0) for name in ("full", "partial", "miss"))
    assert 20 <= lookups <= 36
    assert grown["full"] > 12
    ram = server.status()["cache"]["ram"]
    assert ram["bytes"] <= ram["budget_bytes"] == 1 << 20
    for prompt in prompts:
        served(fleet, server, model, prompt=prompt, max_tokens=8, telling=False)


def _leave_early(server: Server, prompt: str) -> str:
    """A streaming client that hangs up."""
    return server.stream(prompt=prompt, max_tokens=8, hang_up=lambda keepalives: True).text


def test_one_cache_for_both_hosts(fleet: Fleet, model: Model, seed: int, tmp_path: Path) -> None:
    """What mlx_lm.server stored is a hit under oMLX, to the last token, and the other way round."""
    folder = CacheFolder(tmp_path / "cache")
    env = {"THUNDER_BLOCK_TOKENS": "32"}
    sibling = Server(fleet.python, model.path, tmp_path, cache_dir=folder.root, env=env)
    first, second = text_of(150, seed), text_of(170, seed + 1)
    expected = fleet.expected(model, prompt=first), fleet.expected(model, prompt=second)
    sibling.start()
    try:
        assert_same(expected[0], sibling.complete(first), what="mlx_lm.server's answer")
        wait_for(lambda: len(folder.records()) >= 5, "blocks and a snapshot")
        server = fleet.server(model, cache_dir=folder.root)
        answer = served(fleet, server, model, prompt=first, cached=150)
        assert answer.usage["context_pilot"]["source"] == "ssd"
        before = len(folder.records())
        served(fleet, server, model, prompt=second, cached=MISS)
        wait_for(lambda: len(folder.records()) >= before + 6, "blocks and a snapshot")
        answer = sibling.complete(second)
        assert_same(expected[1], answer, what="mlx_lm.server's answer from oMLX's state")
        assert answer.cached_tokens == 170
    finally:
        sibling.kill()
