"""The codecs by name. A new one is added here and to the policy; the store needs no change."""

from __future__ import annotations

from collections.abc import Mapping

from thunder_patches.cache.record import Buffer, Header, TensorSpec

from .base import Codec, CodecError, Coded
from .integers import Int4, Int8
from .planes import PlanesLz4, PlanesZstd
from .raw import Raw

CODECS: dict[str, Codec] = {c.name: c for c in (Raw(), PlanesLz4(), PlanesZstd(), Int8(), Int4())}


def decode(
    spec: TensorSpec, coded: Coded, header: Header, codecs: Mapping[str, Codec] = CODECS
) -> Buffer:
    """The tensor's bytes, exactly ``spec.nbytes`` of them.

    Raises:
        CodecError: unknown codec, or a payload that isn't one of this codec for this tensor.
    """
    codec = codecs.get(coded.codec)
    if codec is None:
        raise CodecError(f"{spec.name}: unknown codec {coded.codec!r}")
    try:
        data = codec.decode(spec, coded, header)
    except CodecError:
        raise
    except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError) as error:
        raise CodecError(f"{spec.name}: damaged {coded.codec} payload: {error}") from error
    found = memoryview(data).nbytes
    if found != spec.nbytes:
        raise CodecError(f"{spec.name}: expected {spec.nbytes} bytes, found {found}")
    return data
