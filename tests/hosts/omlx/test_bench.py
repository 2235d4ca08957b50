"""``thunder bench`` where oMLX is installed: it plays oMLX, and compares texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.models import ModelFactory
from tests.harness.server import INDEX, TRACE
from thunder_patches import cli
from thunder_patches.cli import bench
from thunder_patches.cli._play import duel as play
from thunder_patches.cli._play.server import stock_environment
from thunder_patches.patching.host import find

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def faster_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TRACE))
    monkeypatch.setenv("HARNESS_INDEX", INDEX.name)


def test_the_benchmark_plays_omlx_where_it_is_installed(
    models: ModelFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, picture = models.get("qwen3").path, tmp_path / "bench.svg"
    words = ["--tokens", "600", "--repeat", "1", "--answer", "4", "--svg", str(picture), "--json"]
    assert cli.main(["bench", str(model), *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["conditions"]["host"] == "omlx"
    omlx = find("omlx")
    assert omlx and result["conditions"]["omlx"] == f"{omlx.distribution} {omlx.version}"
    answers = result["answers"]
    assert answers["compared"] == "text" and answers["same"] and answers["tokens"] > 0
    assert answers["stock_differs_from_itself"] == {"answers": 0, "of": answers["requests"]}
    rows = result["workloads"]
    assert list(rows) == list(play.WORKLOADS)
    # Each server has a cache on disk of its own: the stock one skips blocks of 256 tokens.
    for workload in ("repeat", "restart"):
        prompt, row = rows[workload]["prompt_tokens"], rows[workload]
        assert row["patched"]["skipped"] == prompt
        assert prompt - 256 <= row["stock"]["skipped"] < prompt
    assert rows["cold"]["stock"]["skipped"] == 0
    assert "first token in oMLX" in picture.read_text()

    bench._show(result)
    said = capsys.readouterr().out
    assert "first token in oMLX" in said and "by their texts" in said


def test_another_model_behind_the_package_is_found_out(
    models: ModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: other weights answer otherwise, and a server without the package is no proof."""
    monkeypatch.setattr(play, "WORKLOADS", {"cold": play.WORKLOADS["cold"]})
    monkeypatch.setattr(bench, "WORKLOADS", play.WORKLOADS)

    def off(environ: Any, *_: Any, **__: Any) -> dict[str, str]:
        return stock_environment(environ)

    monkeypatch.setattr(play, "patched_environment", off)
    model, other = models.get("qwen3"), models.get("qwen3", seed=1)
    duel = play.Duel(play.Plan(str(model.path), 4, seed=0, repeat=1, host="omlx"), tmp_path)
    link = tmp_path / "patched" / "models" / model.path.name
    link.unlink()
    link.symlink_to(other.path)
    duel.run(128)
    answers = bench.outcome(duel)["answers"]
    assert not answers["same"]
    assert "expected the text" in answers["problems"][0]
    assert "thunder doctor" in answers["problems"][1]
