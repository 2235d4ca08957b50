"""Between the host's memory and that of an NVIDIA GPU: pinned memory, and copies that the GPU makes itself.

MLX's own way goes page by page (an array's buffer belongs to processor and GPU in turns): three times as long
from files, and 40 ms for each 0.6 GB that is stored (tests/bench/results/h200.json). Here the GPU copies from
and to pinned memory. CUDA's driver API through ctypes: MLX has loaded it, and nothing else need be installed.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Protocol

import mlx.core as mx
import numpy as np

from ..cache.record import Buffer, Record, flat

LANDING = 512 << 20
"""Bytes of pinned memory for reading files, and as many on the GPU, at most, unless one record alone is
larger; kept for the process's life."""
DEPARTURE = 256 << 20
"""Bytes on the GPU, at most, that what is stored leaves from."""
PAUSE = 0.05
"""Seconds between two slabs that are pinned: while one is, the driver's other calls may have to wait."""
_NON_BLOCKING, _PORTABLE = 1, 1


class CudaError(Exception):
    """A call of the driver failed; the message has the call and the driver's number."""


class Copier(Protocol):
    """What pins memory and copies; addresses are plain numbers. Its methods raise CudaError."""

    def pin(self, size: int) -> int:
        """New pinned memory of the host."""

    def unpin(self, address: int) -> None: ...

    def to_gpu(self, target: int, source: int, size: int) -> None:
        """Begin to copy from the host's memory."""

    def to_host(self, target: int, source: int, size: int) -> None:
        """Begin to copy into pinned memory."""

    def wait(self) -> None:
        """Until all that was begun is done."""


class Driver:
    """libcuda on the device that MLX computes on, with a stream of copies of our own.

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

    def pin(self, size: int) -> int:
        at = c_void_p()
        with self._current():
            self._call("cuMemHostAlloc", byref(at), c_size_t(size), c_uint(_PORTABLE))
        assert at.value is not None
        return at.value

    def unpin(self, address: int) -> None:
        with self._current():
            self._call("cuMemFreeHost", c_void_p(address))

    def to_gpu(self, target: int, source: int, size: int) -> None:
        ends = c_size_t(target), c_void_p(source)
        with self._current():
            self._call("cuMemcpyHtoDAsync_v2", *ends, c_size_t(size), self._stream)

    def to_host(self, target: int, source: int, size: int) -> None:
        ends = c_void_p(target), c_size_t(source)
        with self._current():
            self._call("cuMemcpyDtoHAsync_v2", *ends, c_size_t(size), self._stream)

    def wait(self) -> None:
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


class Slabs:
    """Pinned pieces for what is stored; one comes back once nothing refers to it.

    None is made while somebody waits for it: what is missing is pinned in the background, for the next time.

    Args:
        limit: bytes to pin at most.
    """

    def __init__(self, copier: Copier, limit: int) -> None:
        self._copier, self._limit = copier, limit
        self._free: defaultdict[int, deque[int]] = defaultdict(deque)
        self._addresses: set[int] = set()
        self._wanted: SimpleQueue[int] = SimpleQueue()
        self._pinned = 0
        self._thread: Thread | None = None

    def take(self, size: int) -> memoryview | None:
        """Writable bytes, their contents anything; None while there are none of about this size."""
        room = _room(size)
        try:
            address = self._free[room].pop()
        except IndexError:
            self._want(room)
            return None
        slab = (ctypes.c_ubyte * room).from_address(address)
        weakref.finalize(slab, self._free[room].append, address).atexit = False
        return memoryview(slab).cast("B")[:size]

    def hold_all(self, records: Sequence[Record]) -> bool:
        """Whether all that these records hold is in slabs."""
        return all(self.hold(data) for record in records for data in record.data)

    def hold(self, data: Buffer) -> bool:
        """Whether these bytes, if there are any, are part of a slab."""
        if not len(data):
            return True
        owner = data.obj if isinstance(data, memoryview) else None
        return isinstance(owner, ctypes.Array) and ctypes.addressof(owner) in self._addresses

    def _want(self, room: int) -> None:
        if self._pinned + room > self._limit:
            return
        self._pinned += room
        self._wanted.put(room)
        if self._thread is None:
            self._thread = Thread(target=self._pin, name="thunder-pin", daemon=True)
            self._thread.start()

    def _pin(self) -> None:
        while True:
            room = self._wanted.get()
            try:
                self._add(room)
            except CudaError:
                self._limit = 0
            time.sleep(PAUSE)

    def _add(self, room: int) -> None:
        address = self._copier.pin(room)
        self._addresses.add(address)
        self._free[room].append(address)


def _room(size: int) -> int:
    """The sizes that slabs come in: four to each power of two."""
    step = 1 << max(16, size.bit_length() - 3)
    return -(-size // step) * step


@dataclass(frozen=True)
class Landing:
    """An array on the GPU that copies go to.

    Args:
        array: uint8 ``[bytes]``. Its contents change with every `Gpu.fetch`: what is made of it must be
            evaluated before the next one.
        address: of the array's first byte.
    """

    array: mx.array
    address: int


class Gpu:
    """The memory of MLX's device.

    Its methods are for the generation thread, with `lock` held while what they gave is in use.
    """

    def __init__(self, copier: Copier, slabs: int | None = None) -> None:
        self._copier = copier
        self.slabs = Slabs(copier, _memory() // 4 if slabs is None else slabs)
        self.lock = Lock()
        self._landing: Landing | None = None
        self._departure: mx.array | None = None
        self._pinned: memoryview | None = None

    def landing(self, size: int) -> Landing:
        """At least ``size`` bytes; the same ones at every call, unless more is asked for."""
        if self._landing is None or self._landing.array.nbytes < size:
            self._landing = None
            array = mx.zeros((size,), mx.uint8)
            self._landing = Landing(array, _address(array))
        return self._landing

    def pinned(self, size: int) -> memoryview:
        """At least ``size`` bytes of pinned memory; the same ones, unless more is asked for."""
        if self._pinned is None or self._pinned.nbytes < size:
            if self._pinned is not None:
                before, self._pinned = _pointer(self._pinned), None
                self._copier.unpin(before)
            at = self._copier.pin(size)
            self._pinned = memoryview((ctypes.c_ubyte * size).from_address(at)).cast("B")
        return self._pinned

    def fetch(self, landing: Landing, at: int, data: Buffer) -> None:
        """Begin to copy pinned bytes to the ``at``-th of the landing and those after it.

        They must stay until `wait`.
        """
        self._copier.to_gpu(landing.address + at, _pointer(data), flat(data).nbytes)

    def wait(self) -> None:
        """Until all that was begun is done."""
        self._copier.wait()

    def bring(self, parts: Sequence[tuple[mx.array, memoryview]]) -> None:
        """Copy arrays of uint8, lazy or not, to pinned bytes of the same size each."""
        size = sum(view.nbytes for _, view in parts)
        array, self._departure = self._departure, None
        if array is None or array.nbytes < size:
            array = mx.zeros((size,), mx.uint8)
            _address(array)
        at = 0
        for part, view in parts:
            array[at : at + view.nbytes] = part.reshape(-1)
            at += view.nbytes
        # In place, as nothing else refers to the array; were it not, the address would be the new one.
        source = _address(array)
        try:
            for _, view in parts:
                self._copier.to_host(_pointer(view), source, view.nbytes)
                source += view.nbytes
        finally:
            self._copier.wait()
        self._departure = array


def _address(array: mx.array) -> int:
    """Of an array's first byte, the same on both sides.

    Asked for it, MLX moves the buffer to memory that has one; it stays on the GPU as long as the processor
    doesn't touch it.
    """
    mx.eval(array)
    return int(np.asarray(array).ctypes.data)


def _pointer(data: Buffer) -> int:
    return int(np.frombuffer(flat(data), np.uint8).ctypes.data)


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def gpu() -> Gpu | None:
    """The GPU, where MLX computes on its first one and copies there and back arrive; None elsewhere."""
    if (cuda := getattr(mx, "cuda", None)) is None or not cuda.is_available():
        return None
    if mx.default_device() != mx.Device(mx.gpu, 0):
        return None
    with suppress(Exception):
        made = Gpu(Driver())
        if _copies(made):
            return made
    return None


def _copies(device: Gpu) -> bool:
    """Whether bytes arrive on the GPU and come back from it."""
    size = 1 << 20
    landing, pinned = device.landing(size), device.pinned(size)
    pinned[:] = bytes(range(256)) * (size >> 8)
    device.fetch(landing, 256 + 7, pinned[263:1263])
    device.wait()
    expected = np.zeros(size, np.uint8)
    expected[263:1263] = np.frombuffer(pinned, np.uint8)[263:1263]
    if not mx.array_equal(landing.array, mx.array(expected)).item():
        return False
    there = mx.arange(size // 4, dtype=mx.uint32)
    for shift in 0, 1:
        device.bring([((there + shift).view(mx.uint8), pinned)])
        if not np.array_equal(np.frombuffer(pinned, np.uint32), np.arange(size // 4) + shift):
            return False
    return True
