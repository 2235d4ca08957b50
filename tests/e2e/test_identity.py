"""C9: what looks like the same model but is not must miss; switching back hits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.e2e.steps import MISS, served
from tests.harness.fleet import Fleet
from tests.harness.models import ModelFactory, replace_weights, text_of, write_adapter

LENGTH = 100


def test_c9_the_same_path_with_other_content(
    fleet: Fleet, models: ModelFactory, tmp_path: Path, seed: int
) -> None:
    """Weights of the same size, then also of the same date, then another RoPE base."""
    model = models.copy(models.get("qwen3"), f"identity-{seed}")
    original = tmp_path / "original"
    shutil.copytree(model.path, original)
    prompt = text_of(LENGTH, seed)
    server = fleet.server(model)
    served(fleet, server, model, prompt=prompt, cached=MISS)

    def other_base() -> None:
        config = json.loads((original / "config.json").read_text())
        config["rope_theta"] *= 2
        (model.path / "config.json").write_text(json.dumps(config, indent=1))

    for change in (
        lambda: replace_weights(model, seed=1, keep_date=False),
        lambda: replace_weights(model, seed=2, keep_date=True),
        lambda: shutil.copytree(original, model.path, dirs_exist_ok=True),
        other_base,
        lambda: shutil.copytree(original, model.path, dirs_exist_ok=True),
    ):
        change()
        known = model.digest() == _digest_of(models, model.spec)
        server.restart()
        served(fleet, server, model, prompt=prompt, cached=LENGTH if known else MISS)


def test_c9_variants_of_a_model(
    fleet: Fleet, models: ModelFactory, tmp_path: Path, seed: int
) -> None:
    """Adapters, 4 and 8 bit, another RoPE base and a copy elsewhere, in turn on one server."""
    model = models.get("qwen3")
    copy = models.copy(model, f"elsewhere-{seed}")
    adapters = [write_adapter(model, tmp_path / f"adapter-{i}", seed=i) for i in range(2)]
    variants: list[dict[str, Any]] = [
        {"model": str(model.path)},
        {"model": str(model.path), "adapters": str(adapters[0])},
        {"model": str(model.path), "adapters": str(adapters[1])},
        {"model": str(models.get("qwen3", bits=4).path)},
        {"model": str(models.get("qwen3", bits=8).path)},
        {"model": str(models.get("qwen3", config={"rope_theta": 20000.0}).path)},
    ]
    prompt = text_of(LENGTH, seed)
    server = fleet.server(None)
    answers = {
        served(fleet, server, model, prompt=prompt, cached=MISS, **variant).logprobs
        for variant in variants
    }
    assert len(answers) == len(variants), "two variants gave the same answer"
    for variant in variants:
        served(fleet, server, model, prompt=prompt, cached=LENGTH, **variant)
    # Identity is content: the same files under another path are the same model.
    served(fleet, server, model, prompt=prompt, cached=LENGTH, model=str(copy.path))


def _digest_of(models: ModelFactory, spec: Any) -> str:
    return models.make(spec).digest()
