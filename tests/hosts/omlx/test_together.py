"""oMLX changes mlx-lm itself, when it is imported and when a model is loaded: both live together."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.steps import MISS, served
from tests.harness.fleet import Fleet
from tests.harness.hosts import run
from tests.harness.models import Model, ModelFactory, text_of
from thunder_patches.hosts.threads import has_own_thread
from thunder_patches.patching import host
from thunder_patches.patching.patch import State


def test_a_model_whose_loading_wraps_what_is_patched(
    fleet: Fleet, models: ModelFactory, full: Model, seed: int
) -> None:
    """For a model that declares a multi-token head oMLX wraps `GenerationBatch` once more, from then
    on and for every model: that is noticed, ours runs inside, hits go on."""
    plain = models.get("qwen3_5_moe")
    model = models.copy(plain, "with-a-head")
    config = json.loads((model.path / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (model.path / "config.json").write_text(json.dumps(config))
    server = fleet.server(model)
    prompt = text_of(150, seed)
    served(fleet, server, model, prompt=prompt, cached=MISS)
    served(fleet, server, model, prompt=prompt, cached=150)
    served(fleet, server, model, prompt=prompt + text_of(30, seed + 1), cached=range(128, 151))
    found = server.status()["features"]["ssd_cache"]
    assert found["state"] == "displaced", found
    assert re.search(r"GenerationBatch\.\w+ was wrapped again by omlx\.", found["reason"])
    assert "still runs inside" in found["reason"]


IMPORTS = {
    "ours-first": "",
    "scheduler-first": "import omlx.scheduler",
    "mlx-lm-first": "import mlx_lm.generate, mlx_lm.server",
    "heads-first": "import omlx.patches.mlx_lm_mtp as mtp; mtp.apply_mlx_lm_mtp_patch()",
}


@pytest.mark.parametrize("first", IMPORTS)
def test_any_order(fleet: Fleet, tmp_path: Path, first: str) -> None:
    """Whoever comes first, oMLX's own changes and ours are both in force, also after later ones."""
    program = f"""
{IMPORTS[first]}
from thunder_patches.patching import registry
found = registry.activate("omlx")
import importlib, json, omlx.server, omlx.patches.mlx_lm_mtp as mtp
batch = importlib.import_module("mlx_lm.generate").GenerationBatch
told = [found.current()["ssd_cache"].state]
mtp.apply_mlx_lm_mtp_patch()
found.check()
told.append(found.current()["ssd_cache"].state)
found.undo()
print(json.dumps([told, batch._step.__module__, batch.next.__module__]))
"""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "THUNDER_CACHE_DIR": str(tmp_path / "c")}
    output = run([str(fleet.python), "-c", program], cwd=tmp_path, env=env)
    told, step, following = json.loads(output.splitlines()[-1])
    assert told == ["applied", "applied" if first == "heads-first" else "displaced"]
    assert step == "omlx.scheduler"
    assert following == "omlx.patches.mlx_lm_mtp.batch_generator"


def test_the_engine_has_its_own_thread(tmp_path: Path) -> None:
    """Told by the host's source, and not of a build that shares its threads."""
    known = host.find("omlx")
    assert known is not None
    verdict = has_own_thread(known)
    assert verdict is not None and verdict.state is State.HOST_HAS_IT
    (tmp_path / "omlx").mkdir()
    shared = "class EngineCore:\n    def step(self):\n        return get_executor().submit(1)\n"
    (tmp_path / "omlx" / "engine_core.py").write_text(shared)
    verdict = has_own_thread(host.Host("omlx", "omlx", "9.9", tmp_path))
    assert verdict is not None and verdict.state is State.NOT_ELIGIBLE
