"""Buffers that experts are read into: slots for whole experts, the same ones for every layer.

A bank's arrays are MLX arrays whose bytes can be written through a memoryview, at page-aligned
addresses. That is how one copy, from the page cache to the place where the kernel reads, is all
there is. (Started 16 bytes off a page, where MLX's CPU allocator puts an array, reads into it ran
at a third of the speed on the machine where this was measured.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

PAGE = 16384
"""A multiple of every page size in use."""

DTYPES = {
    "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16,
    "U32": mx.uint32, "I32": mx.int32, "U64": mx.uint64, "I64": mx.int64,
    "F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32,
}  # fmt: skip
"""The dtypes of a safetensors file that an array gets when mlx loads it."""


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a bank: what a slot of it holds for one expert."""

    dtype: str
    """As in safetensors."""
    shape: tuple[int, ...]
    """Of one expert, so the array is [slots, *shape]."""
    nbytes: int
    """Of one expert."""


class Bank:
    """`slots` experts' worth of arrays, and memoryviews that write into them."""

    def __init__(self, parts: Mapping[str, Part], slots: int) -> None:
        self.slots = slots
        self.arrays: dict[str, mx.array] = {}
        self._bytes: dict[str, memoryview] = {}
        self.last: mx.array | None = None
        """The newest output that was computed, or will be, from this bank."""
        starts = {}
        end = 0
        for name, part in parts.items():
            starts[name] = end
            end += -(-part.nbytes * slots // PAGE) * PAGE
        raw = mx.zeros((end + PAGE,), mx.uint8)
        mx.eval(raw)
        alias = np.asarray(raw)
        writable = memoryview(alias)  # type: ignore[arg-type]
        first = -alias.ctypes.data % PAGE
        for name, part in parts.items():
            begin = first + starts[name]
            stop = begin + part.nbytes * slots
            array = raw[begin:stop].view(DTYPES[part.dtype]).reshape(slots, *part.shape)
            self.arrays[name] = array
            self._bytes[name] = writable[begin:stop]
        mx.eval(self.arrays)
        self.nbytes = end
        self._check_aliases(parts)

    def target(self, name: str, slot: int, start: int, stop: int) -> memoryview:
        """Bytes `start` to `stop` of one expert's part, in `slot`."""
        step = len(self._bytes[name]) // self.slots
        return self._bytes[name][slot * step + start : slot * step + stop]

    def settle(self) -> None:
        """Compute what still needs the bytes that are in the bank, before others replace them."""
        if self.last is not None:
            mx.eval(self.last)
            self.last = None

    def _check_aliases(self, parts: Mapping[str, Part]) -> None:
        """Write a mark through each memoryview and look for it in the array.

        Raises:
            RuntimeError: this backend's arrays can't be written to from outside.
        """
        for name, part in parts.items():
            mark = self.target(name, self.slots - 1, part.nbytes - 1, part.nbytes)
            mark[0] = 1
            seen = self.arrays[name][self.slots - 1 :].view(mx.uint8)
            if np.asarray(seen).reshape(-1)[-1] != 1:
                raise RuntimeError("this MLX backend's arrays can't be written to in place")
            mark[0] = 0
