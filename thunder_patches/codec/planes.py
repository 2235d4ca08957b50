"""Lossless: the bytes of equal weight together, each such plane compressed where that pays.

Floating point is rotated left by one bit first, so that the top byte of BF16 and F32 is the
exponent alone and the sign goes to the end; mantissas are noise and stay as they are. In the top
plane a channel's tokens follow each other, since its exponents vary little over time. All the work
is done by the entropy coder: zstd is set up to look for hardly any matches.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable
from typing import Any, ClassVar

import lz4.block
import numpy as np
import zstandard

from thunder_patches.cache.record import DTYPE_BYTES, Buffer, Header, TensorSpec, flat

from .base import CodecError, Coded, take

FLOATS = {"BF16", "F16", "F32"}
PAYS = 0.97  # a part is kept compressed when this much of it or less is left
SAMPLE = 1 << 16  # bytes of a part that are tried before all of it is

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


def deflate_pack(data: Buffer) -> bytes:
    return zlib.compress(data, 6)


def deflate_unpack(data: Buffer, size: int) -> bytes:
    """The ``size`` bytes of a zlib stream; raises CodecError."""
    stream = zlib.decompressobj()
    try:
        out = stream.decompress(data, size) if size else b""
    except zlib.error as error:
        raise CodecError(f"damaged zlib stream: {error}") from error
    if len(out) != size:
        raise CodecError(f"expected {size} bytes in a zlib stream, found {len(out)}")
    return out


PACKERS = {
    "zstd": (zstd_pack, zstd_unpack),
    "lz4": (lz4_pack, lz4_unpack),
    "deflate": (deflate_pack, deflate_unpack),
}


class Planes:
    """The tensor's byte planes as parts, see `join_parts`."""

    lossy: ClassVar[bool] = False
    packer: ClassVar[str]
    name: ClassVar[str]

    def encode(self, spec: TensorSpec, data: Buffer, header: Header) -> Coded:
        parts, payload = join_parts(split(spec, flat(data)) if spec.nbytes else [], self.packer)
        return Coded(self.name, payload, {"parts": parts})

    def decode(self, spec: TensorSpec, coded: Coded, header: Header) -> Buffer:
        width = DTYPE_BYTES[spec.dtype]
        return join(spec, split_parts(coded, [spec.nbytes // width] * width if spec.nbytes else []))


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


def join_parts(arrays: list[np.ndarray], packer: str = "zstd") -> tuple[list[list[Any]], bytes]:
    """The arrays' bytes one after another, each packed where that pays.

    Returns:
        the parameter "parts", [[packer or "raw", stored bytes], ...], and the payload.
    """
    parts: list[list[Any]] = []
    payload: list[Buffer] = []
    for array in arrays:
        data = array.reshape(-1).view(np.uint8).data
        packed = _pack_if_it_pays(PACKERS[packer][0], data)
        payload.append(data if packed is None else packed)
        parts.append(["raw", len(data)] if packed is None else [packer, len(packed)])
    return parts, b"".join(payload)


def split_parts(coded: Coded, sizes: list[int]) -> list[np.ndarray]:
    """The flat uint8 arrays of a payload made by `join_parts`, of ``sizes`` bytes; CodecError."""
    parts, data, at = take(coded.params, "parts", list), flat(coded.data), 0
    if len(parts) != len(sizes):
        raise CodecError(f"expected {len(sizes)} parts, found {len(parts)}")
    arrays = []
    for part, size in zip(parts, sizes, strict=True):
        how, stored = _entry(part)
        piece = data[at : at + stored]
        at += stored
        if len(piece) != stored or (how == "raw" and stored != size):
            raise CodecError(f"expected {size} bytes stored as {part}, found {len(piece)}")
        whole = piece if how == "raw" else PACKERS[how][1](piece, size)
        arrays.append(np.frombuffer(whole, np.uint8))
    if at != len(data):
        raise CodecError(f"{len(data) - at} bytes after the last part")
    return arrays


def _pack_if_it_pays(pack: Callable[[Buffer], bytes], data: memoryview) -> bytes | None:
    if not data:
        return None
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
    raise CodecError(f"expected [packer, bytes] of a part, found {entry!r}")
