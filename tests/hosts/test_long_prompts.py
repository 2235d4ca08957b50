"""Memory beyond the KV itself stays flat along a prompt, and the answer's bits stay what they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from tests.zoo import models
from thunder_patches.cache.store import CacheStore
from thunder_patches.config import Settings
from thunder_patches.hosts.prefill import Prefill
from thunder_patches.hosts.runtime import Runtime
from thunder_patches.hosts.session import Family, Session
from thunder_patches.hosts.steps import Prefilling
from thunder_patches.observe.counters import Counters

STEP = 512
AHEAD = 4 * STEP
"""Tokens that are prefilled; those before them are there already, so that the test takes seconds."""


@pytest.fixture
def model() -> Any:
    """A llama of two layers, of which prefill computes one's attention, with one head."""
    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=8,
        num_hidden_layers=2,
        intermediate_size=16,
        num_attention_heads=1,
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
        vocab_size=models.VOCAB,
    )
    model = llama.Model(args)
    mx.eval(model.parameters())
    return model


@pytest.fixture
def session(model: Any, tmp_path: Path) -> Iterator[Session]:
    counters = Counters()
    store = CacheStore(
        tmp_path, disk_budget=1 << 30, ram_budget=0, prefetch=False, counters=counters
    )
    runtime = Runtime(Settings(), counters, store)
    yield Session(runtime, "m", Family(), lambda: make_prompt_cache(model))
    store.close()


class Peak:
    """The most that MLX held, whoever resets its own count meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reset, self._most = mx.reset_peak_memory, 0
        monkeypatch.setattr(mx, "reset_peak_memory", self._note)

    def _note(self) -> None:
        self._most = max(self._most, mx.get_peak_memory())
        self._reset()

    def begin(self) -> None:
        self._reset()
        self._most = 0

    def most(self) -> int:
        return max(self._most, mx.get_peak_memory())


def prefilled(
    model: Any, session: Session, prefill: Prefill | None, length: int, peak: Peak
) -> tuple[int, mx.array, list[int]]:
    """Peak bytes beyond what is held at the end, the last token's logits, and the pieces' sizes."""
    held = length - 1 - AHEAD
    mx.random.seed(length)
    cache = make_prompt_cache(model)
    for layer in cache:
        layer.update_and_fetch(*mx.random.normal((2, 1, 1, held, 8)))
    mx.eval([layer.state for layer in cache])
    tokens = models.tokens(length)
    sequence = session.sequence(tokens)
    sequence.keep = 0  # the rows are made up
    pieces: list[int] = []

    class Counted:
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            pieces.append(inputs.shape[1])
            return model(inputs, cache=cache)

    steps = Prefilling(Counted(), sequence, held, prefill)
    peak.begin()
    for start in range(held, length - 1, STEP):
        steps(mx.array([tokens[start : start + STEP]]), cache=cache)
        mx.clear_cache()
    most = peak.most() - mx.get_active_memory()
    logits = steps(mx.array([tokens[-1:]]), cache=cache)[0, -1]
    mx.eval(logits)
    return most, logits, pieces


def test_memory_beyond_the_kv_is_flat_and_the_bits_stay(
    model: Any, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 32K at most 1.1 times that at 16K; the host's own chunks take almost twice as much."""
    peak = Peak(monkeypatch)
    short, long = 1 << 14, 1 << 15
    prefill = Prefill(model, make_prompt_cache(model), STEP, session.block_tokens, True)
    at_short, _, _ = prefilled(model, session, prefill, short, peak)
    at_long, logits, pieces = prefilled(model, session, prefill, long, peak)
    assert at_long <= 1.1 * at_short, (at_long, at_short, pieces)
    assert len(pieces) > AHEAD // STEP + 1
    assert min(pieces[:-1]) >= STEP // 4, pieces

    whole_short, _, _ = prefilled(model, session, None, short, peak)
    whole_long, expected, whole = prefilled(model, session, None, long, peak)
    assert whole_long > 1.5 * whole_short
    assert whole == [STEP] * (AHEAD // STEP) + [1]
    assert mx.array_equal(logits, expected)
