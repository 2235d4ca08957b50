"""What a codec is: a tensor's bytes in, fewer bytes and the parameters to get them back out.

A stored tensor names its codec and carries that codec's parameters (JSON) beside the payload, so
a reader needs nothing else but the tensor's name, dtype and shape, and for "kvtc" the calibration
that the parameters name. Codecs are looked up by name in `codecs.CODECS`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from thunder_patches.cache.record import Buffer, Coded, Header, TensorSpec

Params = dict[str, Any]


class CodecError(ValueError):
    """A payload that can't be decoded: unknown codec, wrong parameters, damaged bytes."""


class Refused(Exception):
    """This codec can't keep this tensor (NaN, too coarse, no calibration): take another one."""


class Codec(Protocol):
    """Encodes and decodes one tensor. Stateless but for what it was built with; safe in threads."""

    name: ClassVar[str]
    lossy: ClassVar[bool]

    def encode(self, spec: TensorSpec, data: Buffer, header: Header) -> Coded:
        """Encode C-contiguous ``data``. `header` is the record's: its position and its layout.

        Raises:
            Refused: when this codec can't keep this tensor.
        """

    def decode(self, spec: TensorSpec, coded: Coded, header: Header) -> Buffer:
        """Exactly ``spec.nbytes`` bytes, C order.

        Raises:
            CodecError: when the payload isn't one of this codec for this tensor.
        """


def take(params: Params, name: str, kind: type | tuple[type, ...]) -> Any:
    """A parameter that must be there and of one of these types; raises CodecError."""
    value = params.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise CodecError(f"parameter {name!r}: expected {kind}, found {value!r}")
    return value
