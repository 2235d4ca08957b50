"""The bytes as they are."""

from __future__ import annotations

from typing import ClassVar

from thunder_patches.cache.record import Buffer, Header, TensorSpec, flat

from .base import CodecError, Coded


class Raw:
    """Stores a tensor verbatim; the store reads such tensors straight into their final buffers."""

    name: ClassVar[str] = "raw"
    lossy: ClassVar[bool] = False

    def encode(self, spec: TensorSpec, data: Buffer, header: Header) -> Coded:
        return Coded(self.name, flat(data))

    def decode(self, spec: TensorSpec, coded: Coded, header: Header) -> Buffer:
        found = memoryview(coded.data).nbytes
        if found != spec.nbytes:
            raise CodecError(f"{spec.name}: expected {spec.nbytes} raw bytes, found {found}")
        return flat(coded.data)
