"""C7, C20 and C23: cancelled prefills, slow chunks, prompts that cannot fit."""

from __future__ import annotations

import contextlib
import json

import openai
import pytest

from tests.e2e.steps import MISS, served
from tests.harness.client import HttpError
from tests.harness.fleet import Fleet
from tests.harness.models import Model, text_of

LEFT = (OSError, RuntimeError, KeyError, IndexError, AssertionError)
"""What reading an answer that was left early may end in."""


@pytest.mark.one_hybrid
def test_c7_a_cancelled_prefill_is_kept(fleet: Fleet, model: Model, seed: int) -> None:
    """The client hangs up after three signs; the finished chunks are reused when it comes back.

    Of layers that can't be cut that is the state where prefill stopped, wherever that was.
    """
    args = ("--prefill-step-size", "64")
    server = fleet.server(model, args=args, env={"THUNDER_BLOCK_TOKENS": "64"})
    server.may_fail = True  # the host tells of the broken connection
    prompt = text_of(900, seed)
    with contextlib.suppress(*LEFT):
        server.stream(prompt=prompt, hang_up=lambda signs: signs >= 3)
    server.wait_until_idle()  # the host goes on until it next writes to the client
    answer = served(fleet, server, model, args=args, prompt=prompt, cached=range(64, 901))
    assert answer.cached_tokens is not None and answer.cached_tokens >= 64


def test_c20_signs_of_life_come_from_a_timer(fleet: Fleet, full: Model, seed: int) -> None:
    """One slow chunk: comments arrive meanwhile, and progress events for the client that asks."""
    server = fleet.server(full)
    prompt = text_of(300, seed)
    server.inject(after=0, sleep=7.0)
    answer = server.stream(prompt=prompt)
    # The host itself signs once at the chunk's end.
    assert len(answer.keepalives) >= 3
    assert answer.prompt_tokens == 300

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
    server.inject(after=0, sleep=5.0)
    stream = client.chat.completions.create(
        model="default_model",
        messages=[{"role": "user", "content": text_of(200, seed + 1)}],
        max_tokens=6,
        temperature=0,
        stream=True,
        extra_body={"thunder": {"progress": True}},
    )
    chunks = [json.loads(chunk.model_dump_json()) for chunk in stream]
    progress = [c["thunder"]["progress"] for c in chunks if c.get("thunder")]
    assert len(progress) >= 2
    assert all(0 <= p["tokens_done"] <= p["tokens_total"] for p in progress)
    assert any(c["choices"] for c in chunks)


def test_c23_what_cannot_fit_is_refused(fleet: Fleet, full: Model, seed: int) -> None:
    """A clear refusal with the numbers, whatever max_tokens says; the next small request passes."""
    server = fleet.server(full, env={"THUNDER_MEMORY_LIMIT_GB": "0.02"})
    for max_tokens in (1, 4000):
        with pytest.raises(HttpError) as refused:
            server.complete(text_of(20_000, seed), max_tokens=max_tokens)
        assert refused.value.status == 413
        assert "needs about" in refused.value.body and "tokens" in refused.value.body
    served(fleet, server, full, prompt=text_of(120, seed + 1), cached=MISS)
    assert server.healthy()
