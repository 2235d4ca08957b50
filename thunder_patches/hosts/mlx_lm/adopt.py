"""A restored KV cache enters a batch of one without being copied.

``KVCache.merge`` copies the keys and values into an exact-size batch cache, and the first decoded token
copies them again to grow it. A restored cache has room already, so a batch of one takes its buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from ...tensors.layers import alias


class RestoredKVCache(KVCache):
    """A ``KVCache`` whose ``merge`` adopts the buffers of a single sequence."""

    @classmethod
    def merge(cls, caches: Sequence[KVCache]) -> BatchKVCache:
        if len(caches) != 1 or caches[0].keys is None:
            return BatchKVCache.merge(caches)
        (cache,) = caches
        batch = BatchKVCache([0])
        batch.keys, batch.values = cache.keys, cache.values
        batch.offset = mx.array([cache.offset])
        batch._idx = cache.offset
        return batch


alias("RestoredKVCache", of="KVCache")


def adopt(caches: list[Any]) -> list[Any]:
    """Make the plain KV caches of a restored prompt cache adoptable, in place."""
    for cache in caches:
        if type(cache) is KVCache:
            cache.__class__ = RestoredKVCache
    return caches
