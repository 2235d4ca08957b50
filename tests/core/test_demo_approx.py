"""The quality harness of approximate skip, on a tiny model: it must run, and tell good from bad."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from tests.bench.approx_quality import divergence, measure, sound
from tests.bench.shapes import Shape
from thunder_patches.cli._play.client import Scored

pytest.importorskip("mlx_lm")


def scored(best: dict[int, float]) -> Scored:
    return Scored("", (max(best, key=best.__getitem__),), (max(best.values()),), (best,))


def test_divergence_is_zero_for_equals_and_grows() -> None:
    exact = scored({1: -0.5, 2: -1.5, 3: -3.0})
    near, far = scored({1: -0.6, 2: -1.4, 3: -3.0}), scored({4: -0.1, 5: -4.0, 6: -5.0})
    assert divergence(exact, exact) == pytest.approx(0.0, abs=1e-12)
    assert 0 < divergence(exact, near) < 0.1 < 1 < divergence(exact, far)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_approximate_skip_is_nearer_than_ignoring_the_edit(tmp_path: Path) -> None:
    shape = Shape(hidden=64, layers=2, heads=2, kv_heads=1, feed_forward=128)
    result = measure(shape.build(tmp_path / "model"), 5, 720, tmp_path)
    assert {row["skip"] for row in result["cases"]} == {"approximate"}
    assert len({row["block"] for row in result["cases"]}) > 1
    assert sound(result)
    # The control: answers that ignore the edit must not pass, nor one that was computed exactly.
    ignoring = copy.deepcopy(result)
    ignoring["approximate"] = ignoring["control"]
    assert not sound(ignoring)
    result["cases"][2]["skip"] = "none"
    assert not sound(result)
