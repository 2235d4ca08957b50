"""C16 and C17: many requests at once and one after the other; budgets kept, answers right."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from tests.e2e.folder import CacheFolder
from tests.e2e.steps import added, counts, served
from tests.harness.client import parallel
from tests.harness.compare import assert_same
from tests.harness.fleet import Fleet
from tests.harness.models import Model, ModelFactory, text_of
from tests.harness.server import Server

ROUNDS = {"full": 50, "hybrid-next": 10, "hybrid-3.5": 10, "sliding": 10}
RAM_MB = 1


@pytest.mark.one_hybrid
def test_c16_parallel(
    fleet: Fleet, model: Model, kind: str, seed: int, batch_tolerance: float
) -> None:
    """Six prompts with a shared prefix at once, RAM for two entries, some clients hang up."""
    server = fleet.server(model, env={"THUNDER_RAM_CACHE_MB": str(RAM_MB)})
    prefix = text_of(100, seed)
    prompts = [prefix + text_of(10 + 7 * i, seed + 1 + i) for i in range(6)]
    expected = [fleet.expected(model, prompt=prompt, max_tokens=8) for prompt in prompts]
    rng = random.Random(seed)
    before = counts(server)
    finished = 0
    for _ in range(ROUNDS[kind]):
        leaving = {i for i in range(6) if rng.random() < 0.15}
        answers = parallel(
            [
                (lambda p=prompt: _leave_early(server, p))
                if i in leaving
                else (lambda p=prompt: server.complete(p, max_tokens=8))
                for i, prompt in enumerate(prompts)
            ]
        )
        for i, answer in enumerate(answers):
            if i not in leaving:
                assert_same(expected[i], answer, batch_tolerance, what=f"prompt {i}")
        finished += 6
    server.may_fail = True  # the host logs a stack trace for each client that has left
    assert "There is no Stream" not in server.log()
    assert "the request goes on without it" not in server.log()
    grown = added(before, counts(server))
    lookups = sum(grown.get(name, 0) for name in ("full", "partial", "miss", "approximate"))
    assert lookups == finished
    lengths = sum(len(model.tokens(prompt)) for prompt in prompts) * ROUNDS[kind]
    assert grown["tokens_skipped"] + grown["tokens_computed"] == lengths
    assert grown["full"] > finished // 2
    ram = server.status()["cache"]["ram"]
    assert ram["bytes"] <= ram["budget_bytes"] == RAM_MB << 20
    assert server.healthy()


@pytest.mark.parametrize(
    "extra", [pytest.param({}, id="batched"), pytest.param({"seed": 1}, id="serial")]
)
def test_c17_budgets(fleet: Fleet, models: ModelFactory, seed: int, extra: dict[str, Any]) -> None:
    """50 requests of a hybrid model: RAM, disk and the host's cache stay small, memory flat."""
    # Large rows, so that the host's cache shows in its log, which counts in 10 MB.
    model = models.get("qwen3_next", config={"head_dim": 128, "num_key_value_heads": 4})
    server = fleet.server(
        model,
        host_cache=True,
        args=["--prompt-cache-size", "1000", "--prompt-cache-bytes", "20MB"],
        env={"THUNDER_RAM_CACHE_MB": "4", "THUNDER_CACHE_MAX_GB": "0.008"},
    )
    folder = CacheFolder(server.cache_dir)
    biggest = 0
    memory: list[int] = []
    for number in range(50):
        prompt = text_of(120, seed + number)
        if number % 10 == 0:
            served(fleet, server, model, prompt=prompt, **extra)
        else:
            server.complete(prompt, max_tokens=4, **extra)
        biggest = max(biggest, folder.bytes())
        ram = server.status()["cache"]["ram"]
        assert ram["bytes"] <= ram["budget_bytes"] == 4 << 20
        memory.append(server.rss())
    ssd = server.status()["cache"]["ssd"]
    assert ssd["budget_bytes"] == int(0.008 * (1 << 30))
    assert biggest <= ssd["budget_bytes"] + (2 << 20)
    assert counts(server)["blocks_evicted"] > 0
    held = [
        float(size)
        for size in re.findall(r"Prompt Cache: \d+ sequences, ([\d.]+) GB", server.log())
    ]
    assert max(held) <= 0.03
    growth = max(memory[40:]) - max(memory[15:25])
    assert growth < 24 << 20, f"grew by {growth >> 20} MiB in 25 requests"


def _leave_early(server: Server, prompt: str) -> None:
    """A streaming client that hangs up at the first sign of life."""
    server.stream(prompt=prompt, max_tokens=8, hang_up=lambda keepalives: True)
