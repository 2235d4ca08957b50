"""Prompts somewhat longer than what is stored, and look-ups that may reach only so far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.zoo import models
from tests.zoo.facts import difference
from thunder_patches.cache.store import CacheStore
from thunder_patches.config import Settings
from thunder_patches.hosts.runtime import Runtime
from thunder_patches.hosts.session import Family, Hit, Session
from thunder_patches.observe.counters import Counters

BLOCK, KNOWN = 32, 110
"""The stored prompt has three blocks and a tail of 14 tokens."""

# Full attention, absorbed latent attention (cuttable, but decoded rows differ), rings, recurrent state.
NAMES = ("llama", "deepseek_v3", "glm4_moe_lite", "gemma3_text", "qwen3_next")


class Stored:
    """A model and a store that knows the first `KNOWN` tokens, as a served prompt leaves them."""

    def __init__(self, name: str, folder: Path, ram: int) -> None:
        mx.set_default_device(mx.cpu)
        self.name, self.model = name, models.build(name)
        self.ids = models.tokens(KNOWN + 8)
        counters = Counters()
        self.store = CacheStore(
            folder, disk_budget=1 << 30, ram_budget=ram, prefetch=False, counters=counters
        )
        settings = Settings(block_tokens=BLOCK, snapshot_stride=1)
        self.session = Session(
            Runtime(settings, counters, self.store), "m", Family.named(name), self.fresh
        )
        sequence, cache = self.session.sequence(self.ids[:KNOWN]), self.fresh()
        position = 0
        for stop in sorted({*sequence.due(0, KNOWN - 1), KNOWN - 1}):
            mx.eval(self.model(mx.array([self.ids[position:stop]]), cache=cache))
            sequence.store(cache, stop, snapshot=True)
            position = stop
        logits = self.model(mx.array([self.ids[KNOWN - 1 : KNOWN]]), cache=cache)[0, -1]
        sequence.store(cache, KNOWN, snapshot=True, logits=logits)
        assert self.store.flush(20)

    def fresh(self) -> list[Any]:
        return models.make_cache(self.name, self.model)

    def last(self, cache: list[Any], held: int, length: int) -> mx.array:
        """Logits of the last of `length` tokens: the rest in one piece, it alone, as hosts do."""
        if held < length - 1:
            mx.eval(self.model(mx.array([self.ids[held : length - 1]]), cache=cache))
        return self.model(mx.array([self.ids[length - 1 : length]]), cache=cache)[0]

    def off(self, hit: Hit, length: int) -> float:
        """Difference of the logits from a cold run's."""
        cold = self.last(self.fresh(), 0, length)
        return difference(self.last(hit.caches, hit.length, length), cold)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    if request.param not in models.names():
        pytest.skip("not in this mlx-lm")
    return str(request.param)


@pytest.mark.parametrize("ram", [0, 1 << 28], ids=["disk", "ram"])
@pytest.mark.parametrize("more", [1, 2, 3, 7])
def test_a_longer_prompt(name: str, ram: int, more: int, tmp_path: Path) -> None:
    """Resumed to the bit, and never where the host would run one prompt token alone."""
    stored = Stored(name, tmp_path, ram)
    length = KNOWN + more
    hit = stored.session.sequence(stored.ids[:length]).lookup(longer_than=0, full=True)
    assert hit is not None and hit.length >= 2 * BLOCK
    assert stored.session.exact_decode or hit.length != length - 2
    assert stored.off(hit, length) == 0.0


@pytest.mark.parametrize("ram", [0, 1 << 28], ids=["disk", "ram"])
@pytest.mark.parametrize("limit", [BLOCK, 75, 97, 103, KNOWN])
def test_a_limited_look_up(name: str, ram: int, limit: int, tmp_path: Path) -> None:
    """At most so many tokens, also where that is inside a block or the tail."""
    stored = Stored(name, tmp_path, ram)
    length = KNOWN + 5
    sequence = stored.session.sequence(stored.ids[:length])
    hit = sequence.lookup(longer_than=0, full=False, limit=limit)
    assert hit is not None and 0 < hit.length <= limit
    if stored.session.cuttable and stored.session.exact_decode:
        assert hit.length == limit
    assert stored.off(hit, length) == 0.0


def test_one_token_off_is_seen(name: str, tmp_path: Path) -> None:
    """The comparison itself: the same state, gone on from one token later."""
    stored = Stored(name, tmp_path, 0)
    length = KNOWN + 7
    hit = stored.session.sequence(stored.ids[:length]).lookup(longer_than=0, full=False)
    assert hit is not None
    wrong = Hit(hit.caches, hit.length + 1, hit.source)
    assert stored.off(wrong, length) > 1e-3
