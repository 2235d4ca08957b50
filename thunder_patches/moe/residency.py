"""Which pages of a file are in the page cache, by mincore(2)."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from typing import Any

import numpy as np


class Residency:
    """Asks the kernel about parts of one open file. Maps the file, and reads none of it."""

    def __init__(self, fd: int) -> None:
        self._size = os.fstat(fd).st_size
        self._map = mmap.mmap(fd, self._size, prot=mmap.PROT_READ)
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data

    def pages(self, offset: int, nbytes: int) -> tuple[int, int]:
        """(pages of these bytes that are in memory, pages in all).

        Raises:
            OSError: the kernel doesn't say.
        """
        first = offset // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(offset + nbytes, self._size)
        count = -(-(end - first) // mmap.PAGESIZE)
        if count <= 0:
            return 0, 0
        vector = (ctypes.c_ubyte * count)()
        where = ctypes.c_void_p(self._address + first)
        if _mincore()(where, ctypes.c_size_t(end - first), vector) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(page & 1 for page in bytes(vector)), count


@functools.cache
def _mincore() -> Any:
    """The C library's function.

    Raises:
        OSError: this platform has none.
    """
    try:
        return ctypes.CDLL(None, use_errno=True).mincore
    except (AttributeError, TypeError) as error:
        raise OSError("no mincore here") from error
