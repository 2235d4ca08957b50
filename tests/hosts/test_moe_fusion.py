"""Fusion of one SwitchGLU: every quantisation, biases, batches, adapters, and what may go wrong."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gpt_oss
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear

from thunder_patches.moe import fusion
from thunder_patches.moe.halves import arrays, is_half, join, stack

GPT_OSS_ACTIVATION = getattr(gpt_oss, "SwigluOAI", None) or gpt_oss.SwiGLU

DIMS, HIDDEN, EXPERTS, TOP = 128, 96, 16, 4

FORMS: dict[str, dict[str, Any] | None] = {
    "float32": None,
    "affine4": {"group_size": 64, "bits": 4},
    "affine3": {"group_size": 32, "bits": 3},
    "affine2": {"group_size": 128, "bits": 2},
    "affine8": {"group_size": 32, "bits": 8},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}


class Block(nn.Module):
    """What holds a SwitchGLU in a model."""

    def __init__(self, form: str = "affine4", bias: bool = False, dtype: mx.Dtype = mx.float32):
        super().__init__()
        activation = GPT_OSS_ACTIVATION() if bias else SwitchGLU(8, 8, 1).activation
        self.experts = SwitchGLU(DIMS, HIDDEN, EXPERTS, activation=activation, bias=bias)
        for name in ("gate_proj", "up_proj", "down_proj"):
            projection = self.experts[name]
            projection.weight = mx.random.normal(projection.weight.shape) * 0.1
            if bias:
                projection.bias = mx.random.normal(projection.bias.shape)
            quantise = FORMS[form]
            if quantise:
                fits = projection.weight.shape[-1] % quantise["group_size"] == 0
                self.experts[name] = projection.to_quantized(
                    **(quantise if fits else quantise | {"group_size": 32})
                )
        self.norm = nn.RMSNorm(DIMS)
        self.set_dtype(dtype)
        self.eval()
        mx.eval(self.parameters())

    def __call__(self, x: mx.array, routes: mx.array) -> mx.array:
        return self.experts(self.norm(x), routes)


@pytest.fixture(autouse=True)
def seed() -> None:
    mx.random.seed(5)


def batch(rows: int, tokens: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    x = mx.random.normal((rows, tokens, DIMS)).astype(dtype)
    routes = mx.argsort(mx.random.uniform(shape=(rows, tokens, EXPERTS)), axis=-1)[..., :TOP]
    return x, routes.astype(mx.uint32)


BATCHES = {"token": (1, 1), "40": (1, 40), "200": (1, 200), "decode of 3": (3, 1)}


def fuse(block: Block) -> fusion.Report:
    return fusion.fuse(block, any_family=True)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("form", FORMS)
def test_bit_equal(form: str, bias: bool) -> None:
    check_bits(Block(form, bias), training=False, compiled=False)


@pytest.mark.parametrize("form", ["float32", "affine4"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_bit_equal_training_and_compiled(form: str, training: bool, compiled: bool) -> None:
    check_bits(Block(form), training, compiled)


def check_bits(block: Block, training: bool, compiled: bool) -> None:
    block.train(training)
    inputs = [batch(*shape) for shape in BATCHES.values()]
    run = mx.compile(block.__call__) if compiled else block
    expected = [run(*entry) for entry in inputs]
    mx.eval(expected)
    assert fuse(block).fused == 1
    run = mx.compile(block.__call__) if compiled else block
    for name, entry, wanted in zip(BATCHES, inputs, expected, strict=True):
        assert mx.array_equal(run(*entry), wanted), name


@pytest.mark.parametrize("form", ["affine4", "mxfp4"])
def test_half_precision(form: str) -> None:
    """Quantised experts under bfloat16 activations, the usual checkpoint."""
    block = Block(form, dtype=mx.bfloat16)
    entry = batch(1, 40, mx.bfloat16)
    expected = block(*entry)
    assert expected.dtype == mx.bfloat16
    assert fuse(block).fused == 1
    assert mx.array_equal(block(*entry), expected)


@pytest.mark.parametrize("form", ["float32", "affine4"])
def test_swapped_order_is_found_out(form: str) -> None:
    """The control: up above gate gives another answer, and the comparison sees it."""
    block = Block(form)
    entry = batch(1, 40)
    expected = block(*entry)
    gate, up = block.experts.gate_proj, block.experts.up_proj
    join(gate, up, stack(up, gate))
    assert not mx.array_equal(block(*entry), expected)


def test_wrong_bits_keep_the_layer_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that give other bits for the stacked shape, seen at load time."""
    block = Block()
    entry = batch(1, 1)
    expected = block(*entry)
    monkeypatch.setattr(fusion, "stack", lambda gate, up: stack(up, gate))
    report = fuse(block)
    assert report.left_alone == {"experts": "fused, other bits than the host's at 1 tokens"}
    assert type(block.experts.gate_proj) is QuantizedSwitchLinear
    assert mx.array_equal(block(*entry), expected)


@pytest.mark.parametrize(("ratios", "fused"), [((0.9, 0.95), 0), ((0.9, 0.99), 1), ((1.1,), 1)])
def test_a_slower_form_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, ratios: tuple[float, ...], fused: int
) -> None:
    """Slower twice, not once: a single measurement may be off."""
    block = Block()
    found = itertools.cycle(ratios)
    monkeypatch.setattr(fusion, "_ratio", lambda *args: next(found))
    report = fusion.fuse(block, any_family=True, compare_speed=True)
    assert report.fused == fused
    if not fused:
        assert "slower fused on this device: 0.95 of the speed at 1 tokens" in str(report)


def test_second_call_changes_nothing() -> None:
    block = Block()
    assert fuse(block).fused == 1
    stacked = block.experts.gate_proj._thunder.pair.stacked
    assert fuse(block).fused == 1
    assert block.experts.gate_proj._thunder.pair.stacked is stacked
    assert fusion.report(block).fused == 1


def test_undo_restores_the_originals() -> None:
    block = Block(bias=True)
    before = tree_flatten(block.parameters())
    entry = batch(1, 40)
    expected = block(*entry)
    fuse(block)
    assert fusion.undo(block) == 1
    after = tree_flatten(block.parameters())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(mx.array_equal(a, b) for (_, a), (_, b) in zip(after, before, strict=True))
    assert type(block.experts.gate_proj) is type(block.experts.up_proj) is QuantizedSwitchLinear
    assert vars(block.experts.gate_proj).keys() == vars(block.experts.down_proj).keys()
    assert mx.array_equal(block(*entry), expected)
    assert fusion.undo(block) == 0


def test_the_parameter_tree_stays(tmp_path: Any) -> None:
    """Names, shapes, values and saved files are those of the unfused model."""
    block = Block(bias=True)
    before = dict(tree_flatten(block.parameters()))
    mx.save_safetensors(str(tmp_path / "before.safetensors"), before)
    fuse(block)
    after = dict(tree_flatten(block.parameters()))
    assert list(after) == list(before)
    assert all(mx.array_equal(after[name], before[name]) for name in before)
    block.save_weights(str(tmp_path / "after.safetensors"))
    saved = mx.load(str(tmp_path / "after.safetensors"))
    assert all(mx.array_equal(saved[name], before[name]) for name in before)
    assert (tmp_path / "after.safetensors").stat().st_size == pytest.approx(
        (tmp_path / "before.safetensors").stat().st_size, abs=64
    )


def test_one_copy_in_memory() -> None:
    block = Block("float32")
    mx.clear_cache()
    before = mx.get_active_memory()
    fuse(block)
    assert mx.get_active_memory() <= before * 1.01


def test_weights_put_in_later_are_used() -> None:
    """Fused, then other weights are loaded into it: the answer is that of the new weights."""
    block, other = Block("float32"), Block("float32")
    entry = batch(1, 40)
    fuse(block)
    block.load_weights(tree_flatten(other.parameters()))
    assert mx.array_equal(block(*entry), other(*entry))
    # Only one of the two.
    block = Block("float32")
    reference = copy.deepcopy(block)
    fuse(block)
    weight = mx.random.normal(block.experts.up_proj.weight.shape)
    block.experts.up_proj.weight = reference.experts.up_proj.weight = weight
    assert mx.array_equal(block(*entry), reference(*entry))


def test_gradients_are_those_of_the_unfused_layer() -> None:
    block = Block("float32")
    x, routes = batch(1, 8)

    def gradient(layer: Block) -> Any:
        return nn.value_and_grad(layer, lambda x: layer(x, routes).square().sum())(x)

    value, grads = gradient(block)
    fuse(block)
    fused_value, fused_grads = gradient(block)
    assert mx.array_equal(value, fused_value)
    flat = dict(tree_flatten(fused_grads))
    for name, wanted in tree_flatten(grads):
        assert mx.array_equal(flat[name], wanted), name


def test_deepcopy_and_requantising_work() -> None:
    block = Block("float32")
    reference = copy.deepcopy(block)
    entry = batch(1, 40)
    fuse(block)
    twin = copy.deepcopy(block)
    assert mx.array_equal(twin(*entry), reference(*entry))
    for layer in (block, reference):
        nn.quantize(layer, 32, 4, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    assert type(block.experts.gate_proj) is QuantizedSwitchLinear
    assert mx.array_equal(block(*entry), reference(*entry))
    assert mx.array_equal(twin(*entry), twin(*entry))


def test_projections_called_on_their_own() -> None:
    """As mlx-vlm's target-verify helper does: up first, gate second, the same arguments; and once
    only one of them, with other arguments in between."""
    block = Block()
    glu = copy.deepcopy(block.experts)
    fuse(block)
    x, routes = batch(1, 5)
    x, y = mx.expand_dims(x, (-2, -3)), mx.expand_dims(x + 1, (-2, -3))
    for name, value in (
        ("up_proj", x), ("gate_proj", x), ("gate_proj", x), ("gate_proj", y), ("up_proj", x),
        ("up_proj", y), ("gate_proj", y),
    ):  # fmt: skip
        ours = block.experts[name](value, routes)
        assert mx.array_equal(ours, glu[name](value, routes)), name


def test_target_verify_of_mlx_vlm() -> None:
    """The helper that mlx-vlm checks drafted tokens with calls both projections itself."""
    language = pytest.importorskip("mlx_vlm.models.qwen3_5_moe.language")
    block = Block()
    x, routes = batch(1, 5)
    expected = language._target_verify_switch_glu(block.experts, x, routes, True)
    fuse(block)
    assert mx.array_equal(
        language._target_verify_switch_glu(block.experts, x, routes, True), expected
    )


def lora(block: Block) -> None:
    block.experts.gate_proj = LoRASwitchLinear.from_base(block.experts.gate_proj, r=4)


def other_bits(block: Block) -> None:
    block.experts.up_proj = SwitchLinear(DIMS, HIDDEN, EXPERTS, bias=False).to_quantized(64, 8)


def one_bias(block: Block) -> None:
    block.experts.up_proj.bias = mx.zeros((EXPERTS, HIDDEN))


def half_scales(block: Block) -> None:
    for name in ("scales", "biases"):
        block.experts.up_proj[name] = block.experts.up_proj[name].astype(mx.float16)


def subclass(block: Block) -> None:
    class Other(SwitchGLU):
        pass

    block.experts.__class__ = Other


def host_fused(block: Block) -> None:
    block.experts.gate_up_proj = block.experts.gate_proj
    del block.experts["gate_proj"], block.experts["up_proj"]


def sharded(block: Block) -> None:
    block.sharding_group = object()


def global_scales(block: Block) -> None:
    block.experts.gate_proj.global_scale = mx.ones((EXPERTS,))
    block.experts.up_proj.global_scale = mx.full((EXPERTS,), 2.0)


REASONS = {
    lora: "gate_proj is a LoRASwitchLinear: an adapter or another plugin is on it",
    other_bits: "gate_proj has bits 4, up_proj 8",
    one_bias: "only one of gate_proj and up_proj has bias",
    half_scales: "scales of gate_proj is mlx.core.float32",
    subclass: "isn't mlx-lm's own SwitchGLU",
    host_fused: "fused or replaced by the host",
    sharded: "sharded over several machines",
    global_scales: "differ in global_scale, which has one value an expert",
}


@pytest.mark.parametrize("change", REASONS, ids=lambda change: change.__name__)
def test_left_alone_with_a_reason(change: Any) -> None:
    block = Block()
    change(block)
    before = {name: id(value) for name, value in tree_flatten(block.parameters())}
    report = fuse(block)
    assert report.fused == 0
    assert REASONS[change] in report.left_alone["experts"]
    assert REASONS[change] in str(report)
    assert {name: id(value) for name, value in tree_flatten(block.parameters())} == before


def test_adapter_put_on_later() -> None:
    """LoRA on a fused layer: right as it is, and `undo_adapted` takes the layer apart."""
    block = Block()
    reference = copy.deepcopy(block)
    entry = batch(1, 40)
    fuse(block)
    for layer in (block, reference):
        lora(layer)
        mx.random.seed(1)
        adapter = layer.experts.gate_proj
        adapter.lora_a = mx.random.normal(adapter.lora_a.shape)
        adapter.lora_b = mx.random.normal(adapter.lora_b.shape)
        layer.eval()
    expected = reference(*entry)
    assert mx.array_equal(block(*entry), expected)
    assert fusion.undo_adapted(block) == 1
    assert not any(is_half(module) for module in block.modules())
    assert mx.array_equal(block(*entry), expected)
    assert fusion.report(block).left_alone


def test_mixed_model_reports_each_layer() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [Block(), Block("mxfp4"), Block("affine8")]

    model = Model()
    other_bits(model.layers[1])
    report = fusion.fuse(model, any_family=True)
    assert report.fused == 2
    assert list(report.left_alone) == ["layers.1.experts"]
    assert str(report).startswith("gate and up fused in 2 of 3 MoE layers; 1: ")


def test_model_without_experts() -> None:
    report = fusion.fuse(nn.Linear(4, 4))
    assert (report.fused, report.left_alone) == (0, {})
    assert str(report) == "the model has no SwitchGLU layers"


def test_random_state_is_not_touched() -> None:
    mx.random.seed(9)
    expected = mx.random.normal((4,))
    block = Block()
    mx.random.seed(9)
    fuse(block)
    assert mx.array_equal(mx.random.normal((4,)), expected)
    assert arrays(block.experts.gate_proj)
