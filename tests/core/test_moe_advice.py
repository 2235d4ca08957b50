"""What is said about a model before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from thunder_patches.moe.advice import advise, disk_bandwidth, size_of

LAYERS, COUNT, ROWS, GROUPS = 3, 16, 64, 4


def model(folder: Path, bits: int = 4, *, separate: bool = False, dense: int = 1000) -> Path:
    """A checkpoint of quantised experts, zeros all."""
    arrays: dict[str, np.ndarray] = {"model.embed_tokens.weight": np.zeros(dense, np.uint8)}
    words = GROUPS * 64 * bits // 32
    for layer in range(LAYERS):
        for name in ("gate_proj", "up_proj", "down_proj"):
            prefix = f"model.layers.{layer}.mlp.switch_mlp.{name}"
            if separate:
                prefix = f"model.layers.{layer}.mlp.experts.EXPERT.{name}"
            weight = np.zeros((COUNT, ROWS, words), np.uint32)
            scales = np.zeros((COUNT, ROWS, GROUPS), np.float16)
            for kind, value in (("weight", weight), ("scales", scales), ("biases", scales)):
                if not separate:
                    arrays[f"{prefix}.{kind}"] = value
                    continue
                for expert in range(COUNT):
                    name_one = f"{prefix.replace('EXPERT', str(expert))}.{kind}"
                    arrays[name_one] = value[expert]
    save_file(arrays, str(folder / "model.safetensors"))
    config: dict[str, Any] = {
        "num_experts_per_tok": 4,
        "quantization": {"group_size": 64, "bits": bits},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_sizes(tmp_path: Path, bits: int, separate: bool) -> None:
    size = size_of(model(tmp_path, bits, separate=separate))
    experts = LAYERS * 3 * COUNT * ROWS * (GROUPS * 64 * bits // 8 + 2 * GROUPS * 2)
    assert (size.dense, size.experts) == (1000, experts)
    assert (size.layers, size.count, size.top) == (LAYERS, COUNT, 4)
    assert size.bits == (bits,)
    assert size.a_token == experts // 4
    assert size.streamable is not separate


def said(folder: Path, **kwargs: Any) -> list[tuple[str, str, str]]:
    return [(f.level, f.text, f.advice) for f in advise(folder, **kwargs)]


def test_fits(tmp_path: Path) -> None:
    found = said(model(tmp_path), memory=100_000_000)
    assert found[-1][0] == "ok" and "fits" in found[-1][1]


def test_streaming_helps(tmp_path: Path) -> None:
    size = size_of(model(tmp_path))
    memory = int((size.dense + size.experts) / 2 / 0.9)
    found = said(tmp_path, memory=memory, bandwidth=1e9)
    assert ("note", "THUNDER_EXPERT_STREAMING=1") in [(f[0], f[2]) for f in found]
    # 1 GB/s over the bytes of a token.
    assert f"at most {1e9 / size.a_token:.1f} tokens/s with nothing cached" in found[-1][1]


def test_too_large_even_so(tmp_path: Path) -> None:
    model(tmp_path, dense=5_000_000)
    found = said(tmp_path, memory=4_000_000)
    assert found[-1][0] == "error" and "even with its experts on disk" in found[-1][1]


def test_separate_experts_cannot_be_streamed(tmp_path: Path) -> None:
    found = said(model(tmp_path, separate=True), memory=1_000_000)
    assert found[-1][0] == "error" and "mlx_lm.convert" in found[-1][2]


def test_two_bits_break_tool_calls(tmp_path: Path) -> None:
    assert any(f[0] == "warning" and "tool calls" in f[1] for f in said(model(tmp_path, 2)))
    assert not any(f[0] == "warning" for f in said(model(tmp_path, 4)))


def test_a_model_without_experts(tmp_path: Path) -> None:
    save_file({"w": np.zeros(1000, np.uint8)}, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text("{}")
    assert said(tmp_path, memory=10_000)[0][0] == "ok"
    assert said(tmp_path, memory=1_000)[0][0] == "error"


def test_unreadable(tmp_path: Path) -> None:
    assert said(tmp_path)[0][0] == "error"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    assert "safetensors header" in said(tmp_path)[0][1]


def test_the_disk_is_measured(tmp_path: Path) -> None:
    save_file({"w": np.zeros(8 << 20, np.uint8)}, str(tmp_path / "model.safetensors"))
    speed = disk_bandwidth(tmp_path)
    assert speed is None or speed > 0
    save_file({"w": np.zeros(100, np.uint8)}, str(tmp_path / "model.safetensors"))
    assert disk_bandwidth(tmp_path) is None
