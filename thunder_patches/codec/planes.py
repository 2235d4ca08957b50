"""Lossless: the bytes of equal weight together, each such plane compressed where that pays.

Floating point is rotated left by one bit first, so that the top byte of BF16 and F32 is the exponent
alone and the sign goes to the end; mantissas are noise and stay as they are. In the top plane a
channel's tokens follow each other, since its exponents vary little over time. All the work is done by
the entropy coder: zstd is set up to look for hardly any matches.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import ClassVar

import lz4.block
import numpy as np
import zstandard

from thunder_patches.cache.record import DTYPE_BYTES, Buffer, Header, TensorSpec, flat

from .base import CodecError, Coded, take

FLOATS = {"BF16", "F16", "F32"}
PAYS = 0.97  # a plane is kept compressed when this much of it or less is left
SAMPLE = 1 << 16  # bytes of a plane that are tried before all of it is

_local = threading.local()


def zstd_pack(data: Buffer) -> bytes:
    """One zstd frame without content size, Huffman-coded literals for the most part."""
    compressor = getattr(_local, "compressor", None)
    if compressor is None:
        settings = zstandard.ZstdCompressionParameters(
            window_log=17,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            strategy=zstandard.STRATEGY_FAST,
            write_content_size=False,
        )
        compressor = zstandard.ZstdCompressor(compression_params=settings)
        _local.compressor = compressor
    return compressor.compress(data)


def zstd_unpack(data: Buffer, size: int) -> bytes:
    """The ``size`` bytes of a frame made by `zstd_pack`.

    Raises:
        CodecError: for anything else. Never allocates more than ``size`` bytes for the result.
    """
    decompressor = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 17)
    try:
        if zstandard.frame_content_size(data) != -1:
            raise CodecError("expected a zstd frame without a content size")
        out = decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"damaged zstd frame: {error}") from error
    if len(out) != size:
        raise CodecError(f"expected {size} bytes in a zstd frame, found {len(out)}")
    return out


def lz4_pack(data: Buffer) -> bytes:
    return lz4.block.compress(data, store_size=False)


def lz4_unpack(data: Buffer, size: int) -> bytes:
    """The ``size`` bytes of an lz4 block; raises CodecError."""
    try:
        out = lz4.block.decompress(data, uncompressed_size=size)
    except (lz4.block.LZ4BlockError, ValueError, OverflowError, MemoryError) as error:
        raise CodecError(f"damaged lz4 block: {error}") from error
    if len(out) != size:
        raise CodecError(f"expected {size} bytes in an lz4 block, found {len(out)}")
    return out


PACKERS = {"zstd": (zstd_pack, zstd_unpack), "lz4": (lz4_pack, lz4_unpack)}


class Planes:
    """Byte planes, each raw or packed; parameter "planes": [[packer or "raw", bytes], ...]."""

    lossy: ClassVar[bool] = False
    packer: ClassVar[str]
    name: ClassVar[str]

    def encode(self, spec: TensorSpec, data: Buffer, header: Header) -> Coded:
        if not spec.nbytes:
            return Coded(self.name, b"", {"planes": []})
        pack, _ = PACKERS[self.packer]
        planes, parts = [], []
        for plane in split(spec, flat(data)):
            packed = _pack_if_it_pays(pack, plane)
            if packed is None:
                parts.append(plane.reshape(-1).data)
                planes.append(["raw", plane.size])
            else:
                parts.append(memoryview(packed))
                planes.append([self.packer, len(packed)])
        return Coded(self.name, b"".join(parts), {"planes": planes})

    def decode(self, spec: TensorSpec, coded: Coded, header: Header) -> Buffer:
        entries = take(coded.params, "planes", list)
        width = DTYPE_BYTES[spec.dtype]
        if len(entries) != (width if spec.nbytes else 0):
            raise CodecError(f"{spec.name}: expected {width} planes, found {len(entries)}")
        data, at, size = flat(coded.data), 0, spec.nbytes // width
        planes = []
        for i, entry in enumerate(entries):
            how, stored = _entry(entry)
            part = data[at : at + stored]
            at += stored
            if len(part) != stored or (how == "raw" and stored != size):
                raise CodecError(f"{spec.name}: plane {i} has {stored} bytes, or fewer are left")
            whole = part if how == "raw" else PACKERS[how][1](part, size)
            planes.append(np.frombuffer(whole, np.uint8))
        if at != len(data):
            raise CodecError(f"{spec.name}: {len(data) - at} bytes after the last plane")
        return join(spec, planes)


class PlanesZstd(Planes):
    packer: ClassVar[str] = "zstd"
    name: ClassVar[str] = "planes+zstd"


class PlanesLz4(Planes):
    packer: ClassVar[str] = "lz4"
    name: ClassVar[str] = "planes+lz4"


def split(spec: TensorSpec, data: memoryview) -> list[np.ndarray]:
    """The tensor's byte planes, uint8, most significant first.

    The first is ``[outer, channels, tokens]``, the others ``[outer, tokens, channels]``.
    """
    width, (outer, tokens, channels) = DTYPE_BYTES[spec.dtype], three_axes(spec.shape)
    words = np.frombuffer(data, f"<u{width}").reshape(outer, tokens, channels)
    first = np.empty((outer, channels, tokens), np.uint8)
    rest = [np.empty((outer, tokens, channels), np.uint8) for _ in range(1, width)]
    for part in pieces(outer, tokens * channels):
        word = words[part]
        if spec.dtype in FLOATS:
            word = (word << 1) | (word >> (8 * width - 1))
        for i, plane in enumerate(rest):
            plane[part] = word >> 8 * (width - 2 - i)
        first[part] = (word >> 8 * (width - 1)).astype(np.uint8).swapaxes(1, 2)
    return [first, *rest]


def join(spec: TensorSpec, planes: list[np.ndarray]) -> memoryview:
    """The tensor's bytes; inverse of `split` (the planes may come flat)."""
    if not planes:
        return memoryview(b"")
    width, (outer, tokens, channels) = DTYPE_BYTES[spec.dtype], three_axes(spec.shape)
    words = np.empty((outer, tokens, channels), f"<u{width}")
    first = planes[0].reshape(outer, channels, tokens).swapaxes(1, 2)
    rest = [plane.reshape(words.shape) for plane in planes[1:]]
    for part in pieces(outer, tokens * channels):
        word = words[part]
        word[...] = first[part]
        for plane in rest:
            word <<= 8
            word |= plane[part]
        if spec.dtype in FLOATS:
            sign = word << (8 * width - 1)
            word >>= 1
            word |= sign
    return words.reshape(-1).view(np.uint8).data


def three_axes(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The shape as (outer, tokens, channels); missing axes are 1."""
    *outer, tokens, channels = (1, 1, *shape)
    return math.prod(outer), tokens, channels


def pieces(outer: int, inner: int) -> list[slice]:
    """Slices of the outer axis of about 64K values each: what fits a core's cache."""
    step = max(1, (1 << 16) // max(1, inner))
    return [slice(i, i + step) for i in range(0, outer, step)]


def _pack_if_it_pays(pack: Callable[[Buffer], bytes], plane: np.ndarray) -> bytes | None:
    data = plane.reshape(-1).data
    packed = pack(data[:SAMPLE])
    if len(packed) > PAYS * min(SAMPLE, len(data)):
        return None
    if len(data) > SAMPLE:
        packed = pack(data)
    return packed if len(packed) <= PAYS * len(data) else None


def _entry(entry: object) -> tuple[str, int]:
    match entry:
        case [str(how), int(stored)] if stored >= 0 and (how == "raw" or how in PACKERS):
            return how, stored
    raise CodecError(f"expected [packer, bytes] of a plane, found {entry!r}")
