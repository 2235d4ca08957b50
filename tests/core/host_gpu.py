"""What stands in for a GPU's copies where there is none."""

from __future__ import annotations

import ctypes
from threading import Lock

import mlx.core as mx
import numpy as np

from thunder_patches.tensors.cuda import Landing


class HostGpu:
    """`tensors.cuda.Gpu` on the processor. Nothing is copied before `wait`, as late as a GPU may be."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.fetched = 0
        self._landing: Landing | None = None
        self._begun: list[tuple[int, int]] = []

    def landing(self, size: int) -> Landing:
        if self._landing is None or self._landing.array.nbytes < size:
            array = mx.full((size,), 99, mx.uint8)
            mx.eval(array)
            address = np.asarray(array).ctypes.data
            self._landing = Landing(memoryview(bytearray(size)), array, address)
        return self._landing

    def fetch(self, landing: Landing, at: int, size: int) -> None:
        assert at + size <= landing.array.nbytes, "past the end"
        self._begun.append((at, size))

    def wait(self) -> None:
        assert self._landing is not None
        for at, size in self._begun:
            ctypes.memmove(
                self._landing.address + at, bytes(self._landing.pinned[at : at + size]), size
            )
            # What is read next must not reach the array by way of this side.
            self._landing.pinned[at : at + size] = bytes(size)
            self.fetched += size
        self._begun = []
