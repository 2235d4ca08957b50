"""Fusion while a checkpoint is loaded: the host's own functions wrapped, memory, adapters, off."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe

from tests.zoo import configs
from thunder_patches import config as settings_module
from thunder_patches.hosts.mlx_lm import moe
from thunder_patches.moe import fusion
from thunder_patches.moe.halves import is_half
from thunder_patches.moe.layers import switch_layers
from thunder_patches.patching import guard, report

CONFIG: dict[str, Any] = (
    configs.BASE
    | configs.MOE
    | {
        "model_type": "qwen3_moe",
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 4,
        "max_position_embeddings": 1024,
    }
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised qwen3_moe of four layers in two shards, 15 MB."""
    folder = tmp_path_factory.mktemp("moe")
    mx.random.seed(3)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(CONFIG))
    model, quantised = mlx_lm.utils.quantize_model(model, dict(CONFIG), 64, 4)
    weights = dict(tree_flatten(model.parameters()))
    names = list(weights)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = folder / f"model-0000{number}-of-00002.safetensors"
        mx.save_safetensors(str(file), {n: weights[n] for n in part}, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(quantised))
    return folder


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv(moe.HOST_SWITCH, raising=False)
    guard.reset()
    report.note("moe_fusion", None)
    yield
    guard.reset()


def load(folder: Path, **kwargs: Any) -> Any:
    return moe.fuse_loaded(mlx_lm.utils.load_model, None, (folder,), kwargs)[0]


TOKENS = mx.array([list(range(40))])


def test_loaded_model_is_fused_and_bit_equal(checkpoint: Path) -> None:
    stock, _ = mlx_lm.utils.load_model(checkpoint)
    model = load(checkpoint)
    assert fusion.report(model).fused == 4
    assert mx.array_equal(model(TOKENS), stock(TOKENS))
    assert mx.array_equal(model(TOKENS[:, :1]), stock(TOKENS[:, :1]))


@pytest.mark.parametrize("how", ["lazy", "host's switch", "guard"])
def test_left_to_the_host(checkpoint: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazily asked for (sharded, converted), oMLX's own switch at 0, or switched off by faults."""
    kwargs = {}
    if how == "lazy":
        kwargs["lazy"] = True
    elif how == "guard":
        guard.turn_off("moe_fusion", "test")
    else:
        monkeypatch.setenv(moe.HOST_SWITCH, "0")
    assert fusion.report(load(checkpoint, **kwargs)).fused == 0


def test_a_fault_of_ours_costs_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fusing breaks in the second layer: the model is there, whole, and right."""
    stock, _ = mlx_lm.utils.load_model(checkpoint)
    calls = []

    def broken(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("injected")
        real(*args)

    real = fusion.join
    monkeypatch.setattr(fusion, "join", broken)
    model = load(checkpoint)
    assert "injected" in guard.faults("moe_fusion").last
    assert mx.array_equal(model(TOKENS), stock(TOKENS))


def test_the_hosts_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path)


def test_adapter_on_experts_takes_the_layers_apart(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint)
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["mlp.switch_mlp.gate_proj"]}
    entry = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(entry))
    mx.random.seed(1)
    weights = {}
    for number in (2, 3):
        prefix = f"model.layers.{number}.mlp.switch_mlp.gate_proj"
        weights[f"{prefix}.lora_a"] = mx.random.normal((32, 4, 256))
        weights[f"{prefix}.lora_b"] = mx.random.normal((32, 256, 4))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), weights)
    adapted = moe.release_adapted(mlx_lm.utils.load_adapters, None, (model, str(tmp_path)), {})
    found = fusion.report(adapted)
    assert found.fused == 2
    assert list(found.reasons()) == [
        "gate_proj is a LoRASwitchLinear: an adapter or another plugin is on it"
    ]
    stock, _ = mlx_lm.utils.load_model(checkpoint)
    stock = mlx_lm.utils.load_adapters(stock, str(tmp_path))
    assert mx.array_equal(adapted.eval()(TOKENS), stock.eval()(TOKENS))
    assert not any(is_half(m) for layer in adapted.layers[2:] for m in layer.modules())


_MEASURE = """
import json, resource, sys
from pathlib import Path
import mlx.core as mx, mlx_lm.utils
from mlx_lm.models import qwen3_moe, switch_layers
from thunder_patches.hosts.mlx_lm import moe
from thunder_patches.moe import fusion
how, folder = sys.argv[1], Path(sys.argv[2])
mx.reset_peak_memory()
if how == "fused":
    model, _ = moe.fuse_loaded(mlx_lm.utils.load_model, None, (folder,), {})
    assert fusion.report(model).fused == 4
else:
    model, _ = mlx_lm.utils.load_model(folder)
if how == "held":
    held = model.parameters()
    fusion.fuse(model)
print(json.dumps({"peak": mx.get_peak_memory(), "active": mx.get_active_memory()}))
"""


def measure(how: str, folder: Path) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, how, str(folder)],
        capture_output=True, text=True, timeout=120, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_peak_memory_at_load(checkpoint: Path) -> None:
    """At most 1.05 of stock, with as few as four layers; the control holds on to the originals."""
    stock, fused, held = (measure(how, checkpoint) for how in ("stock", "fused", "held"))
    assert fused["peak"] <= 1.05 * stock["peak"]
    assert fused["active"] <= 1.01 * stock["active"]
    assert held["peak"] > 1.05 * stock["peak"]


def test_settings_switch() -> None:
    assert settings_module.load({"THUNDER_MOE_FUSION": "0"}).moe_fusion is False
    assert settings_module.load({}).moe_fusion is True


def test_allow_untested_opens_the_whitelist(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "why_not_family", lambda model: "not proven")
    assert fusion.report(load(checkpoint)).fused == 0
    trusting = settings_module.load({"THUNDER_ALLOW_UNTESTED": "1"})
    monkeypatch.setattr(moe, "settings", lambda: trusting)
    model = load(checkpoint)
    assert fusion.report(model).fused == len(list(switch_layers(model))) == 4
