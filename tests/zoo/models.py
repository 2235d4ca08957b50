"""Builds the tiny models: random float32 weights from a seed, large enough that logits vary."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from tests.zoo import metal_only
from tests.zoo.configs import BASE, CONFIGS, MAX_KV_SIZE, NOT_MODELS, VARIANTS, VOCAB


def modules() -> list[str]:
    """Every module of the installed mlx_lm/models, models and helpers."""
    return sorted(name for _, name, _ in pkgutil.iter_modules(mlx_lm.models.__path__))


def names() -> list[str]:
    """Architectures of the installed mlx-lm that have a configuration here."""
    return [name for name in modules() if name in CONFIGS]


def variants() -> list[str]:
    """Further configurations ("module+what") of architectures that are installed."""
    installed = set(names())
    return [name for name, (module, _) in VARIANTS.items() if module in installed]


def unknown() -> list[str]:
    """Modules of the installed mlx-lm that are neither configured nor listed as helpers."""
    return [name for name in modules() if name not in CONFIGS and name not in NOT_MODELS]


def module_of(name: str) -> str:
    return VARIANTS[name][0] if name in VARIANTS else name


def config(name: str) -> dict[str, Any]:
    """The configuration of `name`, as a checkpoint's config.json would hold it."""
    module = module_of(name)
    entry = dict(CONFIGS[module])
    if name in VARIANTS:
        entry = _merged(entry, VARIANTS[name][1])
    text = entry.pop("text", None)
    result = BASE | {"model_type": module} | entry
    if text is not None:
        result["text_config"] = BASE | {"model_type": module} | text
    return result


def build(name: str, seed: int = 0) -> nn.Module:
    """A model of architecture `name`; the same seed gives the same weights."""
    module = module_of(name)
    if module == "olmo":
        # Its import stops the process without this package, which it doesn't use.
        sys.modules.setdefault("hf_olmo", types.ModuleType("hf_olmo"))
    arch = importlib.import_module(f"mlx_lm.models.{module}")
    if module == "muse_spark":
        metal_only.replace_fused(arch)
    mx.random.seed(seed)
    model: nn.Module = arch.Model(arch.ModelArgs.from_dict(config(name)))
    if module == "bitnet":
        metal_only.replace_bitlinear(model)
    if module == "phi3small":
        # It masks fixed ids of a vocabulary of 100,352.
        model._dummy_tokenizer_ids = mx.array([], dtype=mx.int32)
    _randomise(model)
    model.eval()
    mx.eval(model.parameters())
    return model


def make_cache(name: str, model: nn.Module) -> list[Any]:
    """A fresh prompt cache, as the host would make it for `name`."""
    return make_prompt_cache(model, MAX_KV_SIZE.get(name))


def tokens(count: int, seed: int = 1) -> list[int]:
    """`count` token ids below the smallest vocabulary of the zoo."""
    mx.random.seed(seed)
    return cast(list[int], mx.random.randint(2, VOCAB - 2, (count,)).tolist())


def _merged(entry: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    result = dict(entry)
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            value = _merged(result[key], value)
        result[key] = value
    return result


def _randomise(model: nn.Module) -> None:
    """Add noise to every parameter, so that zero-filled ones take part too.

    Matrices get a deviation of 1/sqrt(fan in), vectors one of 0.1; packed integers get random bits.
    """
    changed = []
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    for path, value in parameters:
        if mx.issubdtype(value.dtype, mx.floating):
            value = value.astype(mx.float32) if value.dtype != mx.float16 else value
            deviation = 0.1 if value.ndim < 2 else value.shape[-1] ** -0.5
            noise = deviation * mx.random.normal(value.shape)
            changed.append((path, (value + noise).astype(value.dtype)))
        elif value.dtype == mx.uint32:
            changed.append((path, mx.random.randint(0, 2**31, value.shape).astype(mx.uint32)))
    model.update(tree_unflatten(changed))
