"""Fused and streamed experts behind the host's own server, over HTTP: the answers of the stock
server to the bit, batched and serial, and what a client sees when experts can't be read."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.harness.client import HttpError, parallel
from tests.harness.compare import assert_same
from tests.harness.fleet import Fleet
from tests.harness.models import Model, ModelFactory, Spec, text_of
from tests.harness.server import Server

EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
STREAMING = {"THUNDER_EXPERT_STREAMING": "1"}
SWITCHES = {
    "fused": {},
    "streamed": STREAMING,
    "streamed unfused": STREAMING | {"THUNDER_MOE_FUSION": "0"},
}
PATHS: dict[str, dict[str, Any]] = {"batched": {}, "serial": {"seed": 5}}


@pytest.fixture(params=[None, 4], ids=["float32", "4-bit"])
def model(request: pytest.FixtureRequest, models: ModelFactory) -> Model:
    return models.make(Spec("qwen3", bits=request.param, config=EXPERTS))


@pytest.mark.parametrize("switches", SWITCHES)
def test_answers_are_those_of_the_stock_server(
    fleet: Fleet, model: Model, switches: str, seed: int
) -> None:
    server = fleet.server(model, env=SWITCHES[switches])
    for number, (path, more) in enumerate(PATHS.items()):
        for words in (3, 150):
            prompt = text_of(words, seed + number)
            expected = fleet.expected(model, prompt=prompt, telling=words > 3, **more)
            assert_same(expected, server.complete(prompt, **more), what=f"{path}, {words} words")
    # Six at once: batch decode, the union of their experts.
    prompts = [text_of(20 + i, seed + 10 + i) for i in range(6)]
    expected = [fleet.expected(model, prompt=prompt, telling=False) for prompt in prompts]
    assert len({answer.tokens for answer in expected}) >= 4
    found = parallel([lambda p=prompt: server.complete(p) for prompt in prompts])
    for want, have in zip(expected, found, strict=True):
        assert_same(want, have, what="one of six at once")
    _check_status(server, switches)


def _check_status(server: Server, switches: str) -> None:
    status = server.status()
    states = {name: entry["state"] for name, entry in status["features"].items()}
    assert states["moe_fusion"] == ("off" if switches.endswith("unfused") else "applied")
    if switches == "fused":
        assert states["expert_streaming"] == "off"
        assert "gate and up fused in 3 of 3 MoE layers" in server.log()
        return
    assert states["expert_streaming"] == "applied"
    told = status["expert_streaming"]
    assert told["layers"] == 3
    assert told["fused_layers"] == (0 if switches.endswith("unfused") else 3)
    for phase in ("prefill", "decode"):
        assert told[phase]["tokens"] > 0
        assert 0 < told[phase]["bytes_a_token"] <= told["expert_bytes"]
        assert told[phase]["page_cache_hit_rate"] in (None, pytest.approx(1.0, abs=1))
        assert told[phase]["seconds_disk"] > 0
    # A token of decode needs 4 of 16 experts.
    assert told["decode"]["bytes_a_token"] <= told["expert_bytes"] * 4 / 16 + 1


def test_a_deleted_file_is_still_read(fleet: Fleet, models: ModelFactory, seed: int) -> None:
    """As when a newer download replaces it: the server goes on with the weights it began with."""
    model = models.copy(models.make(Spec("qwen3", config=EXPERTS)), "deleted")
    prompt = text_of(30, seed)
    expected = fleet.expected(model, prompt=prompt, telling=False)
    server = fleet.server(model, env=STREAMING)
    assert_same(expected, server.complete(prompt))
    (model.path / "model.safetensors").unlink()
    other = text_of(31, seed)
    assert_same(server.complete(other), server.complete(other, seed=1))


@pytest.mark.parametrize("damage", ["truncated", "rewritten"])
def test_damage_fails_the_request_and_not_the_server(
    fleet: Fleet, models: ModelFactory, seed: int, damage: str
) -> None:
    model = models.copy(models.make(Spec("qwen3", config=EXPERTS)), damage)
    file = model.path / "model.safetensors"
    server = fleet.server(model, env=STREAMING)
    server.complete(text_of(30, seed))
    size = file.stat().st_size
    if damage == "truncated":
        os.truncate(file, size // 3)
        said = "the file was cut short"
    else:
        with file.open("r+b") as stream:
            stream.seek(size - 64)
            stream.write(bytes(64))
        said = "changed under the running server"

    for more in (*PATHS.values(), {}):
        with pytest.raises(HttpError) as failed:
            server.complete(text_of(40, seed + 1), **more)
        assert failed.value.status == 500
        error = json.loads(failed.value.body)["error"]
        assert (said in error["message"]) or ("changed under" in error["message"])
        assert "model.safetensors" in error["message"]
        assert server.healthy()
    # In a stream that has begun, the error is the last event.
    events = list(_events(server, text_of(41, seed + 2)))
    assert "model.safetensors" in events[-1]["error"]["message"]
    # Several at once all learn of it.
    calls = [lambda i=i: server.complete(text_of(20 + i, seed + i)) for i in range(4)]
    assert [_status(call) for call in calls] == [500] * 4
    assert parallel([lambda c=call: _status(c) for call in calls]) == [500] * 4
    assert server.healthy()
    assert "Traceback" not in server.log()


def _status(call: Any) -> int:
    try:
        call()
    except HttpError as error:
        return error.status
    return 200


def _events(server: Server, prompt: str) -> Any:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0.0, "stream": True}
    with server._connection(None) as connection:
        for line in server._lines(connection, "/v1/completions", body):
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])
