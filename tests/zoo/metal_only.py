"""Plain operations in place of the parts of mlx-lm that exist as Metal kernels only.

Two architectures can't run on the CPU as they are: bitnet (ternary matrix product) and muse_spark
(fused norms and routing). What they keep in the cache doesn't depend on how these parts are
computed, so the zoo runs them with the ordinary operations below.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten


def replace_bitlinear(model: nn.Module) -> None:
    """Put dense layers in the places of bitnet's ternary ones."""
    dense = [
        (path, nn.Linear(layer.in_features, layer.out_features, bias=layer.get("bias") is not None))
        for path, layer in model.named_modules()
        if type(layer).__name__ == "BitLinear"
    ]
    model.update_modules(tree_unflatten(dense))


def replace_fused(arch: Any) -> None:
    """Put plain operations in the places of the fused kernels that the module `arch` imports."""
    arch.qk_norm = qk_norm
    arch.qk_norm_rope = qk_norm_rope
    arch.rms_norm_sigmoid_gate = rms_norm_sigmoid_gate
    arch.expert_routing = expert_routing
    arch.post_expert_norm_combine = post_expert_norm_combine
    arch.norm_add_norm = norm_add_norm


def qk_norm(
    qkvg: mx.array,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    eps: float,
    query_scale: float,
) -> list[mx.array]:
    """Normed q and k, shape (batch, tokens, heads, head_dim), from the joint projection."""
    split = n_heads * head_dim
    q = qkvg[..., :split].reshape(*qkvg.shape[:-1], n_heads, head_dim)
    k = qkvg[..., split : split + n_kv_heads * head_dim]
    k = k.reshape(*qkvg.shape[:-1], n_kv_heads, head_dim)
    return [mx.fast.rms_norm(q, None, eps) * query_scale, mx.fast.rms_norm(k, None, eps)]


def qk_norm_rope(
    qkvg: mx.array, *, rope_base: float, offset: int | mx.array, **kwargs: Any
) -> list[mx.array]:
    """`qk_norm`, then rotary positions offset, offset + 1, ... on interleaved pairs."""

    def rotate(x: mx.array) -> mx.array:
        rotated = mx.fast.rope(
            x.transpose(0, 2, 1, 3),
            x.shape[-1],
            traditional=True,
            base=rope_base,
            scale=1.0,
            offset=offset,
        )
        return rotated.transpose(0, 2, 1, 3)

    return [rotate(x) for x in qk_norm(qkvg, **kwargs)]


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    """Head-wise norm of x (batch, heads, tokens, dim) times the sigmoid of gate."""
    normed = mx.fast.rms_norm(x, None, eps).transpose(0, 2, 1, 3)
    return normed.reshape(gate.shape) * mx.sigmoid(gate)


def expert_routing(
    logits: mx.array,
    expert_bias: mx.array,
    *,
    top_k: int,
    multiplier: float,
    score_eps: float,
    route_scale: float,
) -> list[mx.array]:
    """Indices and weights of the top_k experts by sigmoid score."""
    scores = mx.sigmoid(logits * multiplier)
    chosen = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    weights = weights / (weights.sum(axis=-1, keepdims=True) + score_eps) * route_scale
    return [chosen, weights]


def post_expert_norm_combine(
    experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float
) -> mx.array:
    """Norm of each expert's scaled output, summed with the routing weights."""
    return (mx.fast.rms_norm(experts * norm_weight, None, eps) * weights[..., None]).sum(axis=-2)


def norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: nn.Module | None,
) -> tuple[mx.array, mx.array | None]:
    """The gated sum of stream and normed branch, and its norm for the next block."""
    if post_weight is not None:
        branch = branch * post_weight
    new_stream = alpha * stream + beta * mx.fast.rms_norm(branch, None, post_eps)
    return new_stream, None if next_norm is None else next_norm(new_stream)
