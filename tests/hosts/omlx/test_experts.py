"""Fused and streamed experts under a real `omlx serve`, and who steps aside for whom."""

from __future__ import annotations

import http.client
import os
from pathlib import Path

import pytest

from tests.harness.client import HttpError
from tests.harness.fleet import Fleet
from tests.harness.models import Model, ModelFactory, Spec, text_of
from tests.hosts.test_moe_serving import EXPERTS
from thunder_patches.hosts.mlx_lm import moe
from thunder_patches.patching.host import Host
from thunder_patches.patching.patch import State

UNWATCHED: dict[str, str | None] = {"HARNESS_TRACE": None}
"""The harness's own hook on the loading of models would be taken for another plugin's."""
PROMPTS = [text_of(3, 1), text_of(150, 2), text_of(60, 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("models")
    return ModelFactory(folder).make(Spec("qwen3", bits=4, config=EXPERTS))


@pytest.mark.parametrize("streaming", ["0", "1"], ids=["fused", "streamed"])
def test_answers_of_the_host(fleet: Fleet, model: Model, streaming: str) -> None:
    server = fleet.server(model, env={**UNWATCHED, "THUNDER_EXPERT_STREAMING": streaming})
    for prompt in PROMPTS:
        expected = fleet.expected(model, prompt=prompt, telling=False)
        assert server.complete(prompt).text == expected.text
    found = server.status()
    assert found["features"]["moe_fusion"]["state"] == "applied", found["features"]
    if streaming == "1":
        assert found["features"]["expert_streaming"]["state"] == "applied"
        assert found["expert_streaming"]["layers"] == 3
        assert found["expert_streaming"]["decode"]["bytes_read"] > 0


def test_damage_fails_the_request_and_not_the_server(
    fleet: Fleet, models: ModelFactory, model: Model
) -> None:
    """oMLX itself fails the requests of a step that raises; it has sent its headers by then, and
    breaks the answer off."""
    damaged = models.copy(model, "damaged")
    server = fleet.server(damaged, env={**UNWATCHED, "THUNDER_EXPERT_STREAMING": "1"})
    server.may_fail = True
    server.complete(PROMPTS[0])
    file = damaged.path / "model.safetensors"
    os.truncate(file, file.stat().st_size // 3)
    for prompt in PROMPTS[1:]:
        with pytest.raises((HttpError, http.client.IncompleteRead)):
            server.complete(prompt)
        assert server.healthy()
    assert "model.safetensors" in server.log()


@pytest.mark.parametrize("what", ["fuses", "streams"])
def test_newer_omlx_does_it_itself(tmp_path: Path, what: str) -> None:
    """Told by its modules: no version number says it."""
    asks, module = {
        "fuses": (moe.omlx_fuses, "qwen35_moe_gate_up.py"),
        "streams": (moe.omlx_streams, "expert_streaming/__init__.py"),
    }[what]
    host = Host("omlx", "omlx", "9.9", tmp_path)
    assert asks(host) is None
    file = tmp_path / "omlx" / "patches" / module
    file.parent.mkdir(parents=True)
    file.write_text("")
    verdict = asks(host)
    assert verdict is not None and verdict.state is State.HOST_HAS_IT
    assert f"omlx 9.9 {what}" in verdict.reason
