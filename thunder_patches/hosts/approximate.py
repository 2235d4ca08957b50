"""Approximate skip: one block in the middle differs, the later ones are reused all the same.

Opt-in and lossy: the reused blocks were computed after other text. What differs is recomputed, and so is
the tail after the last reused block; nothing of such a sequence is stored. Only for full-attention
families with rotary positions, and only where all positions stay the same (after the ThunderOMLX paper,
whose implementation zero-filled the differing keys and dropped the newest tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..cache.keys import chain, token_bytes
from ..cache.match import Piece
from ..tensors.restore import RestoreFailed, restore
from .session import Hit
from .session import Sequence as Prompt

FAMILIES = frozenset({"llama", "qwen2", "qwen3", "qwen3_moe", "phi3", "glm4", "olmo2", "smollm3"})
"""Full attention, rotary positions: where this was tried."""
KNOWN = 0.95
"""Share of the prompt's full blocks that must be known."""
_ALTERNATIVES = 8


def approximate(prompt: Prompt, forward: Callable[[list[int], list[Any]], Any]) -> Hit | None:
    """Restore all known blocks of a prompt in which one block differs; None where there is no such.

    Args:
        forward: the model: (tokens, prompt cache) extends the cache by the tokens.
    """
    found = _find(prompt)
    if found is None:
        return None
    differing, later = found
    session, step = prompt.session, prompt.session.block_tokens
    store, capacity = session.runtime.store, prompt.capacity
    gap, end = (differing + 1) * step, later[-1].start + step
    try:
        before = _own_pieces(prompt, differing)
        hit = restore(store, before, session.make_cache(), length=gap - step, capacity=capacity)
        after = restore(store, later, session.make_cache(), length=end, capacity=capacity)
    except RestoreFailed:
        return None
    caches = hit.caches
    forward(prompt.tokens[gap - step : gap].tolist(), caches)
    for cache, reused in zip(caches, after.caches, strict=True):
        cache.keys[..., gap:end, :] = reused.keys[..., gap:end, :]
        cache.values[..., gap:end, :] = reused.values[..., gap:end, :]
        cache.offset = end
    mx.eval([(cache.keys, cache.values) for cache in caches])
    origin = "ssd" if "ssd" in (*hit.sources, *after.sources) else "ram"
    return Hit(caches, end, origin, reused=end - step)


def _find(prompt: Prompt) -> tuple[int, Sequence[Piece]] | None:
    """The block that differs, and the pieces after it that another prompt left behind."""
    session, step = prompt.session, prompt.session.block_tokens
    store, blocks = session.runtime.store, len(prompt.keys)
    differing = store.match(prompt.keys, prompt.root)
    if not 0 < differing < blocks - 1:
        return None
    # The tail is always computed, so the last block stays out where no token follows it.
    limit = (len(prompt) - 1) // step
    rest = prompt.tokens[(differing + 1) * step : limit * step]
    best: Sequence[Piece] = ()
    for other in store.children(prompt.keys[differing - 1])[:_ALTERNATIVES]:
        keys = chain(other, rest, step)
        known = store.match(keys, other)
        if known > len(best):
            best = [
                _piece(prompt, key, parent, differing + 1 + i)
                for i, (key, parent) in enumerate(zip(keys, [other, *keys], strict=False))
            ][:known]
    if not best or (differing + len(best)) / blocks < KNOWN:
        return None
    return differing, best


def _own_pieces(prompt: Prompt, count: int) -> list[Piece]:
    parents = [prompt.root, *prompt.keys]
    return [_piece(prompt, prompt.keys[i], parents[i], i) for i in range(count)]


def _piece(prompt: Prompt, key: bytes, parent: bytes, index: int) -> Piece:
    step = prompt.session.block_tokens
    tokens = token_bytes(prompt.tokens[index * step : (index + 1) * step])
    return Piece("block", key, parent, index * step, tokens, step)
