"""From files to the memory of an NVIDIA GPU: pinned host memory, and copies that the GPU makes itself.

MLX's own way there goes page by page (a new array's buffer belongs to processor and GPU in turns) and took
three times as long (tests/bench/results/h200.json). Here a file's bytes are read into pinned memory, and the
GPU fetches them from there into a buffer of its own while the next files are read. CUDA's driver API through
ctypes: MLX has loaded it, and nothing else need be installed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from functools import cache
from threading import Lock

import mlx.core as mx
import numpy as np

LANDING = 512 << 20
"""Bytes of pinned memory at most, and as many on the GPU; they are kept for the life of the process."""
_NON_BLOCKING, _PORTABLE = 1, 1


class CudaError(Exception):
    """A call of the driver failed; the message has the call and the driver's number."""


@dataclass(frozen=True)
class Landing:
    """Memory of one size on both sides.

    Args:
        pinned: the host's bytes, writable.
        array: the GPU's, uint8 ``[bytes]``. Its contents change with every `Gpu.fetch`: what is made of it
            must be evaluated before the next one.
        address: of the array's first byte.
    """

    pinned: memoryview
    array: mx.array
    address: int


class Gpu:
    """The device that MLX computes on, and a stream of copies of our own.

    Raises CudaError, OSError or AttributeError when there is no such driver.
    """

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        device, self._context, self._stream = c_int(), c_void_p(), c_void_p()
        self._call("cuInit", c_uint(0))
        self._call("cuDeviceGet", byref(device), c_int(0))
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), device)
        with self._current():
            self._call("cuStreamCreate", byref(self._stream), c_uint(_NON_BLOCKING))
        self._landing: Landing | None = None
        self.lock = Lock()
        """Held while the landing is in use."""

    def landing(self, size: int) -> Landing:
        """At least ``size`` bytes; the same ones at every call, unless more is asked for."""
        if self._landing is None or self._landing.array.nbytes < size:
            self._free()
            at = c_void_p()
            with self._current():
                self._call("cuMemHostAlloc", byref(at), c_size_t(size), c_uint(_PORTABLE))
            assert at.value is not None
            pinned = memoryview((ctypes.c_ubyte * size).from_address(at.value)).cast("B")
            array = mx.zeros((size,), mx.uint8)
            mx.eval(array)
            # Asked for its address, MLX moves a buffer to memory that has the same one on both sides; it
            # stays on the GPU as long as the processor doesn't touch it.
            self._landing = Landing(pinned, array, np.asarray(array).ctypes.data)
        return self._landing

    def _free(self) -> None:
        if self._landing is not None:
            at = ctypes.addressof(ctypes.c_char.from_buffer(self._landing.pinned))
            self._landing = None
            with self._current():
                self._call("cuMemFreeHost", c_void_p(at))

    def fetch(self, landing: Landing, at: int, size: int) -> None:
        """Begin to copy ``size`` bytes, the ``at``-th and those after it, from the pinned side to the array."""
        source = ctypes.addressof(ctypes.c_char.from_buffer(landing.pinned)) + at
        with self._current():
            self._call(
                "cuMemcpyHtoDAsync_v2",
                c_size_t(landing.address + at),
                c_void_p(source),
                c_size_t(size),
                self._stream,
            )

    def wait(self) -> None:
        """Until all that was begun is done."""
        with self._current():
            self._call("cuStreamSynchronize", self._stream)

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def _call(self, name: str, *args: object) -> None:
        if number := getattr(self._cuda, name)(*args):
            raise CudaError(f"{name}: error {number}")


@cache
def gpu() -> Gpu | None:
    """The GPU, where MLX computes on its first one and copies to it arrive; None elsewhere."""
    if (cuda := getattr(mx, "cuda", None)) is None or not cuda.is_available():
        return None
    if mx.default_device() != mx.Device(mx.gpu, 0):
        return None
    with suppress(Exception):
        made = Gpu()
        landing = made.landing(1 << 20)
        landing.pinned[:] = bytes(range(256)) * (1 << 12)
        made.fetch(landing, 256 + 7, 1000)
        made.wait()
        expected = np.zeros(1 << 20, np.uint8)
        expected[263:1263] = np.frombuffer(landing.pinned, np.uint8)[263:1263]
        if bool(mx.array_equal(landing.array, mx.array(expected)).item()):
            return made
    return None
