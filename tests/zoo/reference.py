"""The smallest correct way to store a prompt cache and to bring it back: a yardstick for the tests.

It knows cache objects only by their attributes: arrays go out as bytes, everything else as Python
values, and a new object gets them in again. Nothing is shared between the two sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class RawArray:
    """One array as bytes: MLX dtype, shape in elements, C-contiguous payload."""

    dtype: mx.Dtype
    shape: tuple[int, ...]
    payload: bytes

    @classmethod
    def of(cls, array: mx.array) -> RawArray:
        flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
        return cls(array.dtype, tuple(array.shape), np.array(flat).tobytes())

    def array(self) -> mx.array:
        flat = mx.array(np.frombuffer(self.payload, dtype=np.uint8))
        return flat.view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class RawObject:
    """One cache object: its class and the contents of its attributes."""

    cls: Any
    attributes: dict[str, Any]


def dump(value: Any) -> Any:
    """`value` with every array as `RawArray` and every cache object as `RawObject`."""
    if isinstance(value, mx.array):
        return RawArray.of(value)
    if isinstance(value, list):
        return [dump(item) for item in value]
    if isinstance(value, tuple):
        return tuple(dump(item) for item in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return RawObject(type(value), {name: dump(item) for name, item in vars(value).items()})


def load(raw: Any) -> Any:
    """The inverse of `dump`: new arrays in new objects."""
    if isinstance(raw, RawArray):
        return raw.array()
    if isinstance(raw, list):
        return [load(item) for item in raw]
    if isinstance(raw, tuple):
        return tuple(load(item) for item in raw)
    if isinstance(raw, RawObject):
        new = raw.cls.__new__(raw.cls)
        for name, item in raw.attributes.items():
            setattr(new, name, load(item))
        return new
    return raw


def leaves(cache: Any) -> list[Any]:
    """The cache objects in `cache` (an object or a list) that hold arrays, in order."""
    if isinstance(cache, list | tuple):
        return [leaf for item in cache for leaf in leaves(item)]
    if hasattr(cache, "caches"):
        return leaves(list(cache.caches))
    return [cache]


def describe(cache: Any) -> str:
    """The class of one layer's cache, with its members or its number of state arrays."""
    name = type(cache).__name__
    if hasattr(cache, "caches"):
        return f"{name}({', '.join(describe(member) for member in cache.caches)})"
    if isinstance(getattr(cache, "cache", None), list):
        return f"{name}({len(cache.cache)})"
    return name
