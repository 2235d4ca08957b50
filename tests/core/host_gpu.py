"""What stands in for a GPU's copies where there is none."""

from __future__ import annotations

import ctypes

from thunder_patches.tensors.cuda import CudaError, Gpu


class HostCopier:
    """`tensors.cuda.Driver` on the processor. Nothing is copied before `wait`, as late as a GPU may be.

    Args:
        refuses: names of methods that fail.
    """

    def __init__(self) -> None:
        self.refuses: set[str] = set()
        self.fetched = self.sent = 0
        self._pinned: dict[int, ctypes.Array] = {}
        self._begun: list[tuple[int, int, int]] = []

    def pin(self, size: int) -> int:
        self._check("pin")
        memory = (ctypes.c_ubyte * size)()
        self._pinned[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def unpin(self, address: int) -> None:
        del self._pinned[address]

    def to_gpu(self, target: int, source: int, size: int) -> None:
        self._check("to_gpu")
        self._begun.append((target, source, size))
        self.fetched += size

    def to_host(self, target: int, source: int, size: int) -> None:
        self._check("to_host")
        self._begun.append((target, source, size))
        self.sent += size

    def wait(self) -> None:
        for target, source, size in self._begun:
            ctypes.memmove(target, source, size)
        self._begun = []

    def _check(self, name: str) -> None:
        if name in self.refuses:
            raise CudaError(f"{name}: refused")


def host_gpu() -> Gpu:
    return Gpu(HostCopier(), slabs=1 << 30)
