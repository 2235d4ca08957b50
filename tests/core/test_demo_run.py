"""``thunder demo`` and ``thunder bench`` from end to end, with a tiny model instead of the real one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.shapes import Shape, counter
from tests.harness.server import INDEX, TRACE
from thunder_patches import cli
from thunder_patches.cli import bench, demo
from thunder_patches.cli._play import server as servers
from thunder_patches.cli._play.duel import WORKLOADS, Duel, Plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
pytest.importorskip("mlx_lm")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(hidden=64, layers=2, heads=2, kv_heads=1, feed_forward=128)
    return shape.build(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(autouse=True)
def faster_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TRACE))
    monkeypatch.setenv("HARNESS_INDEX", INDEX.name)


@pytest.fixture
def stage(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> demo.Stage:
    monkeypatch.setattr(demo, "_sizes", lambda *_: demo.Sizes(system=150, answer=4, block=32))
    return demo.Stage(tiny, "float32", None, "cpu", counter(tiny))


def test_the_morning_is_the_same_and_skips_more(stage: demo.Stage, tmp_path: Path) -> None:
    result = demo._play(stage, tmp_path, minutes=1)
    json.dumps(result)
    answers = result["answers"]
    assert answers["same"], answers["problems"]
    assert answers["requests"] == demo.AGENTS * demo.TURNS and answers["tokens"] > 0
    restarted = result["turns"][demo.RESTART_BEFORE]
    assert restarted["after_restart"]
    # The stock server begins anew; the patched one computes no more than the turn's own part.
    assert restarted["stock"]["skipped"] < 20
    assert restarted["patched"]["skipped"] > restarted["prompt_tokens"] - 100
    assert result["bytes_on_disk"] > 0


def test_a_demo_without_the_package_fails(
    stage: demo.Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: two stock servers agree, and still that is no proof of anything."""

    def off(environ: Any, *_: Any, **__: Any) -> dict[str, str]:
        return servers.stock_environment(environ)

    monkeypatch.setattr(demo, "patched_environment", off)
    answers = demo._play(stage, tmp_path, minutes=1)["answers"]
    assert not answers["same"] and "thunder doctor" in answers["problems"][0]


@pytest.mark.parametrize("words", [["/nowhere/model"], [".", "--svg", "/nowhere/at/all.svg"]])
def test_a_benchmark_that_cannot_be_is_refused_at_once(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert "/nowhere" in said and len(said.splitlines()) == 1


def test_a_host_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", ".", "--host", "vllm"]) == 2
    said = capsys.readouterr().err
    assert "expected mlx_lm or omlx, found 'vllm'" in said and len(said.splitlines()) == 1


@pytest.mark.skipif(importlib.util.find_spec("omlx") is not None, reason="omlx is here")
def test_a_host_that_is_not_here_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert servers.installed_host(None) == "mlx_lm"
    assert cli.main(["bench", ".", "--host", "omlx"]) == 2
    said = capsys.readouterr().err
    assert "expected omlx beside" in said and "found mlx_lm" in said
    assert len(said.splitlines()) == 1


def test_the_benchmark_plays_every_workload(tiny: Path, tmp_path: Path) -> None:
    duel = Duel(Plan(str(tiny), answer=4, seed=3, repeat=1), tmp_path)
    duel.run(600)
    result = bench.outcome(duel)
    assert result["answers"]["same"], result["answers"]["problems"]
    assert result["answers"]["compared"] == "logprobs"
    assert result["conditions"]["host"] == "mlx_lm" and result["conditions"]["omlx"] is None
    rows = result["workloads"]
    assert list(rows) == list(WORKLOADS)
    assert rows["repeat"]["patched"]["skipped"] >= rows["repeat"]["prompt_tokens"] - 1
    assert rows["restart"]["stock"]["skipped"] < 30
    assert rows["restart"]["patched"]["skipped"] >= rows["restart"]["prompt_tokens"] - 1
    assert "<svg" in bench._picture(json.loads(json.dumps(result)))
