"""Calibrating a model: rotary embeddings found and checked, statistics resumed, MLX decoding equal."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from codec_samples import calibration_for, header_of, kv_like, to_bytes
from mlx_lm.models import cache as host_cache
from mlx_lm.models import llama, rope_utils

from thunder_patches.cache.record import TensorSpec
from thunder_patches.codec.kvtc import Kvtc, Numbers
from thunder_patches.codec.numbers import to_float32
from thunder_patches.codec.rotary import Rotary
from thunder_patches.tensors import kvtc_decode
from thunder_patches.tensors.calibrate import TARGETS, Collector, calibrate
from thunder_patches.tensors.rope import UnknownRotary, check, rotary_of

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 512,
    "short_factor": [1.0] * 16,
    "long_factor": list(np.linspace(1, 4, 16)),
}


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 2.0},
        LLAMA3,
        YARN,
        {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    ],
)
def test_every_rotary_is_undone_and_redone(traditional: bool, scaling) -> None:
    module = rope_utils.initialize_rope(32, 10000.0, traditional, scaling, 2048)
    _same_as(module)


def test_longrope_and_partial_rotation() -> None:
    _same_as(rope_utils.initialize_rope(32, 10000.0, False, LONG, 2048))
    _same_as(nn.RoPE(16, base=500.0))


def _same_as(module) -> None:
    rotary, offset = rotary_of(module), 700
    keys = np.random.default_rng(0).normal(0, 1, (3, 9, 32)).astype(np.float32)
    turned = np.array(module(mx.array(keys[None]), offset=offset))[0]
    assert np.abs(rotary.turn(keys, offset) - turned).max() < 2e-3
    assert np.abs(rotary.turn(turned, offset, inverse=True) - keys).max() < 2e-3
    assert np.abs(rotary.turn(turned, offset + 1, inverse=True) - keys).max() > 0.1


def test_a_rotation_that_depends_on_the_length_is_refused() -> None:
    with pytest.raises(UnknownRotary, match="DynamicNTK"):
        rotary_of(rope_utils.DynamicNTKScalingRoPE(32, 512, False, 10000.0, 2.0))


def tiny(scaling=None, **changes) -> llama.Model:
    mx.random.seed(3)
    fields = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 200,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "rope_scaling": scaling,
        **changes,
    }
    model = llama.Model(llama.ModelArgs(**fields))
    mx.eval(model.parameters())
    return model


def texts(n: int = 8, length: int = 128) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 200, length).tolist() for _ in range(n)]


def test_a_wrong_rotary_is_noticed_on_the_keys() -> None:
    collector = Collector(model := tiny(LLAMA3), lambda: host_cache.make_prompt_cache(model))
    caches = host_cache.make_prompt_cache(model)
    model(mx.array([[100] * 48]), cache=caches)
    rows = {"k0": np.concatenate([np.array(c.keys[0, :, :48]) for c in caches])}
    check(collector.rotary, rows)
    plain = Rotary(tuple(10000.0 ** (-np.arange(0, 32, 2) / 32)))
    with pytest.raises(UnknownRotary, match="differ"):
        check({"k0": ((0, 6, plain),)}, rows)


def test_gradients_say_which_errors_matter() -> None:
    """The predicted KL divergence of a small error in the values is the measured one."""
    model = tiny()
    collector = Collector(model, lambda: host_cache.make_prompt_cache(model))
    pieces = texts(12, 128)
    for piece in pieces:
        collector.add(piece)
    assert collector.gradients
    moments = collector.moments["v0"]
    fisher = moments.fisher / moments.gradients
    assert (np.linalg.eigvalsh(fisher) > -1e-9).all()
    rng, measured, predicted = np.random.default_rng(0), 0.0, 0.0
    for piece in pieces[:6]:
        noise = rng.normal(0, 1e-2, (6, 128, 32)).astype(np.float32)
        noise[:, :4] = 0
        predicted += 0.5 * np.einsum("htd,hde,hte->", noise, fisher, noise, optimize=True)
        measured += _divergence(model, piece, noise)
    assert predicted == pytest.approx(measured, rel=0.5)


def _divergence(model, piece: list[int], noise: np.ndarray) -> float:
    logprobs = []
    for added in (np.zeros_like(noise), noise):
        caches = host_cache.make_prompt_cache(model)
        for i, cache in enumerate(caches):
            delta, update = mx.array(added[None, 2 * i : 2 * i + 2]), cache.update_and_fetch
            cache.update_and_fetch = lambda k, v, u=update, d=delta: u(k, v + d)
        logits = model(mx.array([piece]), cache=caches)[0]
        logprobs.append(np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True), np.float64))
    a, b = logprobs
    return float((np.exp(a) * (a - b)).sum())


def test_calibration_end_to_end_and_resumed(tmp_path) -> None:
    model = tiny()
    make_cache = lambda: host_cache.make_prompt_cache(model)  # noqa: E731
    whole = calibrate(model, make_cache, "tiny", texts(), size=128)
    assert list(whole.bases) == ["k0", "v0"] and whole.measured["gradients"]
    assert whole.steps["high"] < whole.steps["balanced"] < whole.steps["small"]
    held = whole.measured["held_out"]
    assert held["high"]["ratio"] < held["balanced"]["ratio"] < held["small"]["ratio"]
    for quality, target in TARGETS.items():
        assert held[quality]["kl"] == pytest.approx(target, rel=0.5)

    class Stop(Exception):
        pass

    def stop_at_one(done: int, total: int, what: str) -> None:
        if done == 1:
            raise Stop

    state, calls = tmp_path / "state", []
    with pytest.raises(Stop):
        calibrate(model, make_cache, "tiny", texts(), progress=stop_at_one, state=state, size=128)
    again = calibrate(
        model,
        make_cache,
        "tiny",
        texts(),
        progress=lambda done, total, what: calls.append((done, what)),
        state=state,
        size=128,
    )
    assert again.measured["tokens"] == whole.measured["tokens"]
    assert again.write(tmp_path).id == whole.write(tmp_path).id, "as if it had not been interrupted"
    again = calibrate(
        model,
        make_cache,
        "tiny",
        texts(),
        progress=lambda done, total, what: calls.append((done, what)),
        state=state,
        size=128,
    )
    assert (0, "statistics") not in calls[-6:], "statistics were taken up again"


def test_two_runs_give_the_same_bytes(tmp_path) -> None:
    """Whatever MLX's random state is, which they leave as it was; the id is a checksum of all."""
    model = tiny()
    make_cache = lambda: host_cache.make_prompt_cache(model)  # noqa: E731
    ids, drawn = [], []
    for i in range(2):
        mx.random.seed(50 + i)
        made = calibrate(model, make_cache, "tiny", texts(), size=128)
        drawn.append(mx.random.uniform().item())
        mx.random.seed(50 + i)
        assert mx.random.uniform().item() == drawn[i]
        ids.append(made.write(tmp_path / str(i)).id)
    assert ids[0] == ids[1] and drawn[0] != drawn[1]
    other = calibrate(model, make_cache, "tiny", texts(7), size=128)
    assert other.write(tmp_path / "other").id != ids[0], "the control: other texts, another id"


@pytest.mark.parametrize(("mode", "step"), [("steps", 0.4), ("steps", 0.001), ("groups", 0.4)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("numpy", [False, True])
def test_a_batch_is_decoded_as_each_block_is(
    mode: str, step: float, interleaved: bool, numpy: bool
) -> None:
    """All blocks in one batch: the first with sinks, a last one that is shorter.

    The smallest step gives numbers that int8 can't hold.
    """
    heads, dim = 4, 32
    rates = tuple(10000 ** (-np.arange(0, 24, 2) / 24))
    rotary = Rotary(rates, interleaved, scale=1.1)
    spec = TensorSpec("k0", "BF16", (heads, 256, dim))
    known = calibration_for(spec, rotary=rotary)
    known = replace(known, steps={"balanced": step})
    codec = Kvtc(lambda id: known, known, "balanced", mode)
    rows = rotary.turn(kv_like(heads, 600, dim), 0)
    blocks, wanted = [], []
    for start, end in ((0, 256), (256, 512), (512, 545)):
        part = replace_shape(spec, end - start)
        header = header_of(part, start=start)
        coded = codec.encode(part, to_bytes(rows[:, start:end].copy(), "BF16"), header)
        blocks.append(codec.unpack(part, coded, header))
        back = to_float32(codec.decode(part, coded, header), "BF16")
        wanted.append(back.reshape(part.shape))
    assert (step == 0.001) == any(largest(block) > 127 for block in blocks)
    found = kvtc_decode.decode("k0", blocks, mx.bfloat16, numpy)
    mx.eval(found)
    for a, b in zip(found, wanted, strict=True):
        a = np.array(a.astype(mx.float32))
        assert a.shape == b.shape
        assert np.abs(a - b).max() <= np.abs(b).max() / 100
    assert (np.array(found[0].astype(mx.float32))[:, :4] == wanted[0][:, :4]).all()


@pytest.mark.parametrize("numpy", [False, True])
def test_a_block_of_sinks_alone_is_decoded(numpy: bool) -> None:
    spec = TensorSpec("k0", "BF16", (4, 3, 32))
    known = calibration_for(spec)
    codec, header = Kvtc(lambda id: known, known), header_of(spec)
    data = to_bytes(kv_like(4, 3, 32), "BF16")
    block = codec.unpack(spec, codec.encode(spec, data, header), header)
    (rows,) = kvtc_decode.decode("k0", [block], mx.bfloat16, numpy)
    assert rows.shape == spec.shape and np.array(rows.view(mx.uint16)).tobytes() == data


def largest(block: Numbers) -> float:
    numbers = np.zeros((sum(b.rank for b in block.calibration.bases["k0"]), block.tokens))
    block.put(numbers)
    return np.abs(numbers).max()


def replace_shape(spec: TensorSpec, tokens: int) -> TensorSpec:
    return replace(spec, shape=(spec.shape[0], tokens, spec.shape[2]))


def test_a_model_without_attention_is_refused() -> None:
    from thunder_patches.tensors.calibrate import CannotCalibrate

    def model(tokens, cache):
        cache[0][0] = mx.zeros((1, 2, 3))
        cache[0][1] = mx.zeros((1, 2, 3))

    with pytest.raises(CannotCalibrate):
        Collector(SimpleNamespace(layers=[], __call__=model) and _Callable(model), _arrays)


class _Callable:
    layers: tuple = ()

    def __init__(self, function) -> None:
        self._function = function

    def __call__(self, tokens, cache):
        return self._function(tokens, cache)


def _arrays() -> list:
    return [host_cache.ArraysCache(2)]
