"""Fused and streamed experts under a real `omlx serve`, and who steps aside for whom."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from tests.harness.models import Model, ModelFactory, Spec, text_of
from tests.hosts.omlx.serving import omlx
from tests.hosts.test_moe_serving import EXPERTS
from thunder_patches.hosts.mlx_lm import moe
from thunder_patches.patching.host import Host
from thunder_patches.patching.patch import State

PROMPTS = [text_of(3, 1), text_of(150, 2), text_of(60, 3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("models")
    return ModelFactory(folder).make(Spec("qwen3", bits=4, config=EXPERTS))


@pytest.fixture(scope="module")
def expected(model: Model, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    pytest.importorskip("omlx")
    with omlx(model, tmp_path_factory.mktemp("stock"), thunder=False) as server:
        return [server.complete(prompt)[0] for prompt in PROMPTS]


def status(folder: Path) -> dict[str, Any]:
    """What the server's status file says once it is settled."""
    for _ in range(60):
        files = list((folder / "cache" / "run").glob("*.json"))
        if files:
            found = json.loads(files[0].read_text())
            if found["features"]["moe_fusion"]["state"] != "pending":
                return found
        time.sleep(0.1)
    raise AssertionError("no status file")


@pytest.mark.parametrize("streaming", ["0", "1"], ids=["fused", "streamed"])
def test_answers_of_the_host(
    model: Model, expected: list[str], tmp_path: Path, streaming: str
) -> None:
    with omlx(model, tmp_path, THUNDER_EXPERT_STREAMING=streaming) as server:
        assert [server.complete(prompt)[0] for prompt in PROMPTS] == expected
        time.sleep(2.5)  # the status is refreshed every two seconds
        found = status(tmp_path)
    assert found["features"]["moe_fusion"]["state"] == "applied", found["features"]
    if streaming == "1":
        assert found["features"]["expert_streaming"]["state"] == "applied"
        assert found["expert_streaming"]["layers"] == 3
        assert found["expert_streaming"]["decode"]["bytes_read"] > 0


def test_damage_fails_the_request_and_not_the_server(
    model: Model, expected: list[str], tmp_path: Path
) -> None:
    """oMLX itself fails the requests of a step that raises; it has sent its headers by then, and
    breaks the answer off."""
    with omlx(model, tmp_path, THUNDER_EXPERT_STREAMING="1") as server:
        assert server.complete(PROMPTS[0])[0] == expected[0]
        file = tmp_path / "models" / "tiny" / "model.safetensors"
        os.truncate(file, file.stat().st_size // 3)
        for prompt in PROMPTS[1:]:
            with pytest.raises((urllib.error.HTTPError, http.client.IncompleteRead)):
                server.complete(prompt)
            assert server.get("/health")
        assert "model.safetensors" in server.log.read_text()


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
