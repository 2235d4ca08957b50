"""A restored cache enters a batch of one as it is.

``KVCache.merge`` copies the keys and values into an exact-size batch cache, and the first decoded token
copies them again to grow it. A restored cache has room already, so a batch of one takes its buffers.
``RotatingKVCache.merge`` puts a ring into temporal order: the sums of the next attention then differ in
their last bits from those of a server that never stopped. A batch of one keeps the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache

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


class RestoredRotatingKVCache(RotatingKVCache):
    """A ``RotatingKVCache`` whose ``merge`` keeps the ring of a single sequence."""

    @classmethod
    def merge(cls, caches: Sequence[RotatingKVCache]) -> BatchRotatingKVCache:
        if len(caches) != 1 or caches[0].keys is None or caches[0].keep:
            return BatchRotatingKVCache.merge(caches)
        (cache,) = caches
        batch = BatchRotatingKVCache(cache.max_size, [0])
        batch.keys, batch.values = cache.keys, cache.values
        batch.offset = mx.array([cache.offset])
        batch._idx, batch._offset = cache._idx, cache.offset
        held = caches[0].keys.shape[2]
        batch.rotated = held == cache.max_size and cache._idx < min(held, cache.offset)
        return batch


_SUBCLASSES = {KVCache: RestoredKVCache, RotatingKVCache: RestoredRotatingKVCache}
for _known, _restored in _SUBCLASSES.items():
    alias(_restored.__name__, of=_known.__name__)


def adopt(caches: list[Any]) -> list[Any]:
    """Make the caches of a restored prompt cache adoptable, in place."""
    for cache in caches:
        if type(cache) in _SUBCLASSES:
            cache.__class__ = _SUBCLASSES[type(cache)]
        elif hasattr(cache, "caches"):
            adopt(list(cache.caches))
    return caches
