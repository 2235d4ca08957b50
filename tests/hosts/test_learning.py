"""Calibration from the user's own prompts: only when asked for, only while nothing runs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as host_cache
from mlx_lm.models import llama

from tests.core.cache_support import ROOT, blocks, open_store
from thunder_patches.codec.calibration import Shelf
from thunder_patches.codec.policy import Policy
from thunder_patches.config import Settings
from thunder_patches.hosts import learning
from thunder_patches.hosts.learning import Learner, own_tokens
from thunder_patches.observe.counters import Counters


def put(store, prompt: list[int], stamp: int) -> None:
    for one in blocks(ROOT, prompt):
        store.put(one, stamp)


def test_each_block_is_read_once_in_the_order_of_its_text() -> None:
    store = open_store(None, ram_budget=1 << 24)
    put(store, [*range(12), *range(100, 108)], 1)
    put(store, [*range(12), *range(200, 204)], 2)
    put(store, [*range(50, 58)], 3)
    texts = own_tokens(store, ROOT, 1000)
    assert sorted(t for text in texts for t in text) == sorted(
        [*range(12), *range(100, 108), *range(200, 204), *range(50, 58)]
    )
    whole = next(text for text in texts if 0 in text)
    assert whole[:12] == list(range(12)) and len(whole) > 12
    assert own_tokens(store, b"?" * 16, 1000) == []
    some = own_tokens(store, ROOT, 8)
    assert 8 <= sum(map(len, some)) < 16


def test_a_text_ends_at_an_image() -> None:
    store = open_store(None, ram_budget=1 << 24)
    put(store, [1, 2, 3, 4, -5, -5, -5, 8, 9, 10, 11, 12], 1)
    assert own_tokens(store, ROOT, 1000) == [[1, 2, 3, 4]]


@pytest.fixture
def parts(tmp_path, monkeypatch) -> Any:
    """A runtime, a session and a model, small enough for a few seconds; 700 tokens are stored."""
    monkeypatch.setattr(learning, "PIECE", 64)
    monkeypatch.setattr(learning, "LEAST_TOKENS", 600)
    store = open_store(None, ram_budget=1 << 24)
    rng = np.random.default_rng(0)
    for i in range(7):
        put(store, rng.integers(0, 200, 100).tolist(), i)
    mx.random.seed(0)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=2,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=200,
            head_dim=32,
        )
    )
    codec = Policy("kvtc", shelf=Shelf(tmp_path / "calibrations"))
    codec.use_model("a model")
    runtime = SimpleNamespace(
        settings=replace(Settings(), calibrate_after=2, codec="kvtc"),
        counters=Counters(),
        store=store,
        codec=codec,
        activity=SimpleNamespace(quiet=lambda: 3600.0),
    )
    session = SimpleNamespace(
        identity="a model",
        root=lambda salt: ROOT,
        make_cache=lambda: host_cache.make_prompt_cache(model),
    )
    return SimpleNamespace(runtime=runtime, session=session, model=model)


def steps(parts: Any, learner: Learner, most: int = 400) -> int:
    for i in range(most):
        learner.step(parts.session, parts.model)
        if learner._finished:
            return i
    return most


def test_learns_after_so_many_requests_and_encodes_with_it_at_once(parts) -> None:
    learner = Learner(parts.runtime)
    assert steps(parts, learner, 5) == 5 and learner._steps is None
    parts.runtime.counters.add("miss", 2)
    assert 10 < steps(parts, learner) < 400
    codec = parts.runtime.codec
    assert codec.is_calibrated("a model") and codec.lossy == "kvtc"
    assert codec.describe()["calibrations"][0]["tokens"] > 500
    assert steps(parts, Learner(parts.runtime), 3) == 0, "once is enough"


def test_waits_while_anything_runs_and_for_enough_text(parts, monkeypatch) -> None:
    parts.runtime.counters.add("miss", 2)
    learner = Learner(parts.runtime)
    monkeypatch.setattr(parts.runtime.activity, "quiet", lambda: 0.0)
    assert steps(parts, learner, 5) == 5 and learner._steps is None
    monkeypatch.setattr(parts.runtime.activity, "quiet", lambda: 3600.0)
    monkeypatch.setattr(learning, "LEAST_TOKENS", 10_000)
    assert steps(parts, learner, 5) == 5 and learner._steps is None
    monkeypatch.setattr(learning, "LEAST_TOKENS", 600)
    assert steps(parts, learner, 5) == 5 and learner._steps is None, "it looks again later"
    parts.runtime.counters.add("full", 2)
    learner.step(parts.session, parts.model)
    assert learner._steps is not None


@pytest.mark.parametrize("mode", ["auto", "int8"])
def test_does_nothing_for_other_codecs(parts, mode: str) -> None:
    parts.runtime.codec = Policy(mode)  # type: ignore[arg-type]
    parts.runtime.counters.add("miss", 2)
    assert steps(parts, Learner(parts.runtime), 3) == 0


def test_a_model_that_can_not_be_calibrated_is_left_alone(parts) -> None:
    parts.session.make_cache = lambda: [host_cache.ArraysCache(2)]

    class Recurrent:
        layers = ()

        def __call__(self, tokens, cache):
            cache[0][0] = cache[0][1] = mx.zeros((1, 2, 3))

    parts.model = Recurrent()
    parts.runtime.counters.add("miss", 2)
    assert steps(parts, Learner(parts.runtime), 5) < 5
    assert not parts.runtime.codec.is_calibrated("a model")
