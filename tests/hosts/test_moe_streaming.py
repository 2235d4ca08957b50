"""Streamed experts: the resident model's bits in every family, memory, and what may go wrong."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from tests.hosts.test_moe_families import build, logits, proven, quantise_experts, same
from tests.hosts.test_moe_load import CONFIG, checkpoint, load
from thunder_patches.hosts.mlx_lm import moe
from thunder_patches.moe import fusion, streaming
from thunder_patches.moe.banks import PAGE, Bank, Part
from thunder_patches.moe.layers import switch_layers
from thunder_patches.moe.reader import StreamingError
from thunder_patches.patching import catalogue, guard, report
from thunder_patches.tensors.identity import code_of

__all__ = ["checkpoint"]


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv(moe.HOST_SWITCH, raising=False)
    guard.reset()
    guard.set_features({"expert_streaming": True, "moe_fusion": True}, {})
    yield
    guard.reset()
    report.note("expert_streaming", None)


def save(model: nn.Module, folder: Path) -> None:
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def stream(folder: Path, **kwargs: Any) -> Any:
    return moe.stream_loaded(mlx_lm.utils.load_model, None, (folder,), kwargs)[0]


@pytest.mark.parametrize("quantised", [False, True], ids=["float32", "quantised"])
@pytest.mark.parametrize("name", proven())
def test_every_family(name: str, quantised: bool, tmp_path: Path) -> None:
    """Where the file holds the experts as the model does, the streamed model's logits are the
    same; where its `sanitize` makes them anew, the layer says so and stays."""
    model = build(name)
    if quantised:
        quantise_experts(model)
    expected = logits(name, model)
    save(model, tmp_path)
    found, streamer = streaming.attach(model, tmp_path)
    assert streamer is not None and found.streamed and not found.left_alone, str(found)
    assert found.fused == found.streamed
    assert not any("gate_proj" in n for n, _ in tree_flatten(model.parameters()) if "switch" in n)
    assert same(logits(name, model), expected)
    assert streamer.decode.experts_read and streamer.prefill.experts_read


TOKENS = mx.array([[(7 * i + 3) % 250 for i in range(200)]])


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_prefill_decode_and_batches(checkpoint: Path, fused: bool) -> None:
    """Two shards. 4 of 32 experts a token: up to 15 rows are few routes, from 16 on many."""
    stock = mlx_lm.utils.load_model(checkpoint)[0]
    guard.set_features({"moe_fusion": fused}, {})
    model = stream(checkpoint)
    streamer = streaming.streamer_of(model)
    assert streamer is not None and streamer.layers == 4
    caches = [make_prompt_cache(m) for m in (stock, model)]
    for start, stop in ((0, 1), (1, 130), (130, 131), (131, 146), (146, 162), (162, 200)):
        part = TOKENS[:, start:stop]
        assert mx.array_equal(stock(part, cache=caches[0]), model(part, cache=caches[1]))
    for rows in (1, 2, 5, 15, 16, 17, 40):
        batch = TOKENS[0, :rows][:, None]
        assert mx.array_equal(stock(batch), model(batch)), rows
    assert {bank.slots for (_, many), bank in streamer._banks.items() if many} == {32}


def test_generated_tokens(checkpoint: Path) -> None:
    def run(model: Any) -> list[tuple[int, float]]:
        steps = generate_step(TOKENS[0, :50], model, max_tokens=12)
        return [(token, probs[token].item()) for token, probs in steps]

    expected = run(mlx_lm.utils.load_model(checkpoint)[0])
    assert run(stream(checkpoint)) == expected
    assert len({logprob for _, logprob in expected}) >= 4


def interleaved(model: Any, number: int = 5) -> list[mx.array]:
    """Outputs of several forwards, none computed before the last one was called."""
    outputs = [model(TOKENS[:, 10 * i : 10 * i + 1 + i % 2]) for i in range(number)]
    mx.eval(outputs)
    return outputs


def test_interleaved_forwards(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bank isn't overwritten while an output still needs it. The control forgets to wait."""
    stock, model = mlx_lm.utils.load_model(checkpoint)[0], stream(checkpoint)
    expected = interleaved(stock)
    assert same(interleaved(model), expected)
    monkeypatch.setattr(Bank, "settle", lambda self: None)
    assert not same(interleaved(model), expected), "the control must be found out"


def test_swapped_experts_are_found_out(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control for all comparisons here: one routed expert's neighbour read in its place."""
    stock, model = mlx_lm.utils.load_model(checkpoint)[0], stream(checkpoint)
    reads = streaming.StreamedLayer._reads

    def wrong(self: Any, bank: Bank, experts: list[int], slots: list[int]) -> Any:
        experts = [experts[0] ^ 1, *experts[1:]]
        return reads(self, bank, experts, slots)

    monkeypatch.setattr(streaming.StreamedLayer, "_reads", wrong)
    assert not mx.array_equal(stock(TOKENS[:, :1]), model(TOKENS[:, :1]))


def test_each_expert_is_read_once_a_call(checkpoint: Path) -> None:
    model = stream(checkpoint)
    streamer = streaming.streamer_of(model)
    assert streamer is not None
    of_one = sum(part.nbytes for part in _layer(model).parts.values())
    mx.eval(model(TOKENS))
    assert streamer.prefill.experts_read <= 4 * 32
    assert streamer.prefill.bytes_read == streamer.prefill.experts_read * of_one
    assert streamer.prefill.tokens == 200
    mx.eval(model(TOKENS[:, :1]))
    assert streamer.decode.experts_read == 4 * 4
    told = streamer.told()
    assert told["decode"]["bytes_a_token"] == 4 * 4 * of_one
    assert json.loads(json.dumps(told)) == told


def _layer(model: Any) -> streaming.StreamedLayer:
    layer = streaming.streamed_of(next(switch_layers(model)).glu)
    assert layer is not None
    return layer


def test_two_forms_in_one_model(tmp_path: Path) -> None:
    """Layers of different bits have banks of their own."""
    model = build("qwen3_moe")
    glu = next(switch_layers(model)).glu
    for name in ("gate_proj", "up_proj", "down_proj"):
        glu[name] = glu[name].to_quantized(group_size=32, bits=4)
    expected = logits("qwen3_moe", model)
    save(model, tmp_path)
    _, streamer = streaming.attach(model, tmp_path)
    assert same(logits("qwen3_moe", model), expected)
    assert streamer is not None and len(streamer._banks) == 4


def test_experts_that_sanitize_makes_anew_stay(tmp_path: Path) -> None:
    """A checkpoint with one tensor an expert, as on the Hub: resident, fused, said so."""
    stock = build("qwen3_moe")
    weights: dict[str, mx.array] = {}
    for name, value in tree_flatten(stock.parameters()):
        if "switch_mlp" in name:
            for expert in range(value.shape[0]):
                weights[name.replace("switch_mlp", f"experts.{expert}")] = value[expert]
        else:
            weights[name] = value
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    from tests.zoo.models import config

    (tmp_path / "config.json").write_text(json.dumps(config("qwen3_moe")))
    model = stream(tmp_path)
    assert streaming.streamer_of(model) is None
    assert fusion.report(model).fused == 3
    assert same(logits("qwen3_moe", model), logits("qwen3_moe", stock))
    assert "mlx_lm.convert" in str(report._notes["expert_streaming"].reason)


@pytest.mark.parametrize("how", ["lazy", "off"])
def test_left_to_the_host(checkpoint: Path, how: str) -> None:
    if how == "off":
        guard.turn_off("expert_streaming", "test")
    model = stream(checkpoint, lazy=how == "lazy")
    assert streaming.streamer_of(model) is None


def test_both_wrappers_together(checkpoint: Path) -> None:
    """Streaming around fusion around the host, as the catalogue orders them."""

    def fusing(model_path: Path, lazy: bool = False) -> Any:
        return moe.fuse_loaded(mlx_lm.utils.load_model, None, (model_path,), {"lazy": lazy})

    model = moe.stream_loaded(fusing, None, (checkpoint,), {})[0]
    assert streaming.streamer_of(model) is not None
    assert fusion.report(model).fused == 0
    order = [patch.feature for patch in catalogue.PATCHES if patch.attribute == "load_model"]
    assert order == ["moe_fusion", "expert_streaming"] * 2
    names = [feature.name for feature in catalogue.FEATURES]
    assert names.index("moe_fusion") < names.index("expert_streaming")


def test_a_fault_of_ours_costs_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = mlx_lm.utils.load_model(checkpoint)[0]

    def broken(*args: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(streaming, "_plan", broken)
    model = stream(checkpoint)
    assert "injected" in guard.faults("expert_streaming").last
    assert streaming.streamer_of(model) is None
    assert mx.array_equal(model(TOKENS), stock(TOKENS))


def test_malformed_checkpoint(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that doesn't hold is found before anything is swapped."""
    model = mlx_lm.utils.load_model(checkpoint)[0]

    def lying(folder: Path) -> Any:
        raise streaming.CheckpointError("overlap")

    monkeypatch.setattr(streaming, "tensors", lying)
    with pytest.raises(streaming.CheckpointError):
        streaming.attach(model, checkpoint)
    assert model(TOKENS) is not None


def test_detach(checkpoint: Path) -> None:
    stock, model = mlx_lm.utils.load_model(checkpoint)[0], stream(checkpoint)
    first = model(TOKENS)
    assert len(streaming.detach(model, {"model.layers.1.mlp.switch_mlp"})) == 1
    assert mx.array_equal(model(TOKENS), first)
    assert len(streaming.detach(model)) == 3
    assert streaming.detach(model) == []
    assert mx.array_equal(model(TOKENS), first)
    ours, theirs = (dict(tree_flatten(m.parameters())) for m in (model, stock))
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) for name in ours)


def test_adapter_on_experts_brings_them_in(checkpoint: Path, tmp_path: Path) -> None:
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
    host = mlx_lm.utils.load_adapters
    stock = host(mlx_lm.utils.load_model(checkpoint)[0], str(tmp_path)).eval()
    model = moe.bring_in_adapted(host, None, (stream(checkpoint), str(tmp_path)), {}).eval()
    assert len([la for la in switch_layers(model) if streaming.streamed_of(la.glu)]) == 2
    assert mx.array_equal(model(TOKENS), stock(TOKENS))
    # The control: without our wrapper the host refuses the adapter, or, before 0.32, leaves that
    # part of it out without a word.
    try:
        ignored = host(stream(checkpoint), str(tmp_path)).eval()
    except ValueError as refused:
        assert "incompatible" in str(refused)
    else:
        assert not mx.array_equal(ignored(TOKENS), stock(TOKENS))


def test_traced_by_mlx(checkpoint: Path) -> None:
    model = stream(checkpoint)
    with pytest.raises(StreamingError, match="traces the model"):
        mx.compile(model.__call__)(TOKENS)
    assert model(TOKENS[:, :1]).shape == (1, 1, CONFIG["vocab_size"])


def test_file_cut_short(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model = stream(tmp_path)
    mx.eval(model(TOKENS[:, :1]))
    shard = tmp_path / "model-00001-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size // 4)
    for tokens in (TOKENS, TOKENS[:, :1]):
        with pytest.raises(StreamingError, match="model-00001-of-00002"):
            mx.eval(model(tokens))


def test_the_models_identity_stays(checkpoint: Path) -> None:
    """What was cached for the stock model is found for the fused and the streamed one: the files
    are the same, and so is the host's code that computes."""
    stock = mlx_lm.utils.load_model(checkpoint)[0]
    expected = code_of(stock, "mlx_lm.models.")
    assert expected == code_of(load(checkpoint), "mlx_lm.models.")
    assert expected == code_of(stream(checkpoint), "mlx_lm.models.")
    assert any("class SwitchGLU" in text for text in expected)


def test_copies_share_the_stream(checkpoint: Path) -> None:
    model = stream(checkpoint)
    twin = copy.deepcopy(model)
    assert mx.array_equal(model(TOKENS), twin(TOKENS))


def test_bank_is_aligned_and_written_in_place() -> None:
    parts = {"a": Part("BF16", (3, 5), 30), "b": Part("U32", (7,), 28), "c": Part("F32", (), 4)}
    bank = Bank(parts, 6)
    for name, part in parts.items():
        assert bank.arrays[name].shape == (6, *part.shape)
        address = np.frombuffer(bank.target(name, 0, 0, part.nbytes), np.uint8).ctypes.data
        assert address % PAGE == 0
    bank.target("b", 4, 4, 12)[:] = (5).to_bytes(4, "little") + (6).to_bytes(4, "little")
    assert bank.arrays["b"].tolist() == [*[[0] * 7] * 4, [0, 5, 6, 0, 0, 0, 0], [0] * 7]
    bank.target("c", 1, 0, 4)[:] = np.float32(2.5).tobytes()
    assert bank.arrays["c"].tolist() == [0, 2.5, 0, 0, 0, 0]


_MEASURE = """
import json, sys
from pathlib import Path
import mlx.core as mx, mlx_lm.utils
from mlx_lm.models import qwen3_moe, switch_layers
from thunder_patches.hosts.mlx_lm import moe
from thunder_patches.moe import streaming
from thunder_patches.patching import guard
guard.set_features({"expert_streaming": sys.argv[1] == "streamed", "moe_fusion": False}, {})
mx.reset_peak_memory()
model, _ = moe.stream_loaded(mlx_lm.utils.load_model, None, (Path(sys.argv[2]),), {})
assert (streaming.streamer_of(model) is not None) == (sys.argv[1] == "streamed")
print(json.dumps({"peak": mx.get_peak_memory(), "active": mx.get_active_memory()}))
"""


def test_experts_are_never_in_memory(checkpoint: Path) -> None:
    """Peak memory at load: the dense part alone."""

    def measure(how: str) -> dict[str, int]:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, how, str(checkpoint)],
            capture_output=True, text=True, timeout=120, check=True,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1])

    streamed, resident = measure("streamed"), measure("resident")
    stock = load(checkpoint)
    dense = sum(v.nbytes for n, v in tree_flatten(stock.parameters()) if "switch_mlp" not in n)
    assert streamed["active"] <= dense * 1.02
    assert streamed["peak"] <= dense * 1.05
    assert resident["peak"] > 2 * dense, "the control: the resident model is much larger"
