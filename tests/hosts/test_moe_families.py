"""Fusion in every family of mlx-lm that has SwitchGLU layers: every logit equal to the unfused
model's, float32 and quantised, one token, the sorted path, and batch decode.

    python -m tests.hosts.test_moe_families        writes compat/moe_families.toml
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest

from tests.zoo import configs
from tests.zoo import models as zoo
from thunder_patches.moe import families, fusion
from thunder_patches.moe.halves import arrays, is_half
from thunder_patches.moe.layers import switch_layers
from thunder_patches.patching import compat

MOE_TEXT = configs.MOE | {"enable_moe_block": True, "top_k_experts": 2}
CONFIGS = {
    "gemma4": {"text": configs.GEMMA4_TEXT | MOE_TEXT},
    "gemma4_text": configs.GEMMA4_TEXT | MOE_TEXT,
    "qwen3_5": {"text": configs.GATED_DELTA | configs.MOE},
    # Chunks longer than the prompts: decoding past a chunk fails in mlx-lm 0.31.3 itself.
    "llama4": {"text": configs.LLAMA4_TEXT | {"attention_chunk_size": 4096}},
    "mistral3": {"text": configs.CONFIGS.get("mistral4", {}) | {"model_type": "mistral4"}},
}
"""Families whose configuration in the zoo doesn't fit here, most for having no experts."""

LEFT_ALONE = {
    "dbrx": "its experts are separate linear layers, not a SwitchGLU",
    "nemotron_h": "SwitchMLP: one projection before the activation, nothing to put together",
    "phixtral": "SwitchMLP: one projection before the activation, nothing to put together",
}
"""Families with experts that fusion can't do anything for."""


def build(name: str) -> nn.Module:
    """A tiny model of the family, with experts."""
    saved = dict(configs.CONFIGS)
    configs.CONFIGS.update(CONFIGS)
    try:
        return zoo.build(name)
    finally:
        configs.CONFIGS.clear()
        configs.CONFIGS.update(saved)


def quantise_experts(model: nn.Module) -> None:
    """4 bits for gate and up, 8 for down: mixed, as many checkpoints are."""
    for layer in switch_layers(model):
        for name in ("gate_proj", "up_proj", "down_proj"):
            bits = 8 if name == "down_proj" else 4
            layer.glu[name] = layer.glu[name].to_quantized(group_size=32, bits=bits)
    mx.eval(model.parameters())


def logits(name: str, model: nn.Module) -> list[mx.array]:
    """Of a prompt of 1, 40 and 200 tokens, each with a decode step after it, and of three
    one-token rows at once. With two experts a token the sorted path starts at 32 tokens."""
    found = []
    for count in (1, 40, 200):
        cache = zoo.make_cache(name, model)
        prompt = mx.array([zoo.tokens(count)])
        found.append(model(prompt, cache=cache))
        found.append(model(prompt[:, -1:], cache=cache))
    rows = mx.array([[token] for token in zoo.tokens(3)])
    found.append(model(rows, cache=zoo.make_cache(name, model)))
    mx.eval(found)
    return found


def same(ours: list[mx.array], theirs: list[mx.array]) -> bool:
    return all(mx.array_equal(a, b).item() for a, b in zip(ours, theirs, strict=True))


def swap_halves(model: nn.Module) -> None:
    """The control: gate and up the wrong way round in the stacked arrays."""
    for layer in switch_layers(model):
        stacked = layer.glu.gate_proj._thunder.pair.stacked
        rows = layer.glu.gate_proj.output_dims
        for name, value in arrays(stacked).items():
            stacked[name] = mx.concatenate([value[:, rows:], value[:, :rows]], axis=1)


def check(name: str, quantised: bool) -> fusion.Report:
    model = build(name)
    if quantised:
        quantise_experts(model)
    expected = logits(name, model)
    assert len(set(expected[4].argmax(-1).flatten().tolist())) >= 4, "says the same thing always"
    report = fusion.fuse(model, any_family=True)
    assert report.fused and not report.left_alone, str(report)
    assert same(logits(name, model), expected)
    swap_halves(model)
    assert not same(logits(name, model), expected), "the swapped control must be found out"
    fusion.undo(model)
    assert not any(is_half(module) for module in model.modules())
    assert same(logits(name, model), expected)
    return report


def proven() -> list[str]:
    """Whitelisted families that the installed mlx-lm has."""
    installed = set(zoo.modules())
    if "mistral4" not in installed:
        installed.discard("mistral3")  # is dense there
    return [n for n, family in families.families().items() if family.fuse and n in installed]


@pytest.mark.parametrize("quantised", [False, True], ids=["float32", "quantised"])
@pytest.mark.parametrize("name", proven())
def test_family_bit_equal(name: str, quantised: bool) -> None:
    check(name, quantised)


def test_every_family_with_experts_is_listed() -> None:
    known = families.families()
    missing = [name for name in with_experts() if name not in known]
    assert not missing, "run python -m tests.hosts.test_moe_families"


def test_left_alone_has_a_reason() -> None:
    for name, family in families.families().items():
        assert family.fuse or family.reason, name


def test_unlisted_family_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mixtral")
    monkeypatch.setattr(families, "families", dict)
    report = fusion.fuse(model)
    assert report.fused == 0
    assert set(report.left_alone.values()) == {
        "the family mixtral isn't proven (THUNDER_ALLOW_UNTESTED=1 tries it)"
    }
    assert fusion.fuse(model, any_family=True).fused == 3


def with_experts() -> list[str]:
    """Modules of the installed mlx-lm whose code has expert layers."""
    folder = Path(mlx_lm.models.__path__[0])
    sources = {name: (folder / f"{name}.py").read_text() for name in zoo.modules()}
    del sources["switch_layers"]
    found = {name for name, text in sources.items() if re.search(r"SwitchGLU\(|SwitchMLP\(", text)}
    return sorted(found | (LEFT_ALONE.keys() & sources.keys()))


def write() -> None:
    """Prove each family of the installed mlx-lm and write the file, keeping families that only
    other releases have."""
    entries = {name: (family.fuse, family.reason) for name, family in families.families().items()}
    for name in [*zoo.names(), *LEFT_ALONE]:
        if name in LEFT_ALONE:
            entries[name] = (False, LEFT_ALONE[name])
            continue
        model = build(name)
        if not list(switch_layers(model)):
            continue
        try:
            for quantised in (False, True):
                check(name, quantised)
            entries[name] = (True, "")
        except Exception as error:
            first = (str(error) or type(error).__name__).splitlines()[0]
            entries[name] = (False, f"not proven: {first}")
        print(name, *entries[name], file=sys.stderr)
    lines = [
        "# MoE families by the name of their module in mlx_lm/models: whether gate and up may be",
        "# fused. Written by `python -m tests.hosts.test_moe_families`, which compares all logits of",
        "# a small model, float32 and quantised, fused and not; true means bit-equal.",
    ]
    for name, (fuse, reason) in sorted(entries.items()):
        lines += ["", f"[{name}]", f"fuse = {str(fuse).lower()}"]
        if reason:
            lines.append(f"reason = {json.dumps(reason)}")
    text = "\n".join(lines) + "\n"
    (compat.folder() / "moe_families.toml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
