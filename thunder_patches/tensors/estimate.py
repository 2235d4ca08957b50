"""KV bytes a token, before a single token has been computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .layers import ROW_CLASSES, CacheObject, flatten, kind


def kv_bytes_per_token(model: Any, fresh: Sequence[CacheObject]) -> float | None:
    """Bytes of keys and values that one more token adds, or None where the model does not say.

    Args:
        model: an mlx-lm model; its ``args`` name heads and dims.
        fresh: its new, empty prompt cache. Only layers that grow count; windows and recurrent state do not.
    """
    growing = sum(kind(cache) in ROW_CLASSES for _, cache in flatten(fresh))
    if not growing:
        return 0.0
    args = getattr(model, "args", None)
    text = getattr(args, "text_config", None)
    said = {**(text if isinstance(text, dict) else {}), **getattr(args, "__dict__", {})}
    if said.get("kv_lora_rank"):
        width = int(said["kv_lora_rank"]) + int(said.get("qk_rope_head_dim") or 0)
    else:
        heads, queries = said.get("num_key_value_heads"), said.get("num_attention_heads")
        dim = said.get("head_dim") or (
            said["hidden_size"] // queries if queries and said.get("hidden_size") else None
        )
        if isinstance(heads, list):
            heads = max(heads)
        if not (dim and (heads or queries)):
            return None
        width = 2 * int(heads or queries or 1) * int(dim)
    return float(growing * width * _activation_size(model))


def _activation_size(model: Any) -> int:
    """Bytes of one activation: the dtype of the weights that are not packed integers."""
    parameters: Any = tree_flatten(model.parameters())
    for _, value in parameters:
        if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
            return int(value.dtype.size)
    return 4
