"""int8 and int4: whole numbers in groups of 64, each group with its own step and offset.

Keys have channels of very unlike size, so a group of theirs is 64 tokens of one channel; values
have not, and a group is 64 channels of one token (KIVI, arXiv 2402.02750). Steps and offsets are
BF16, rounded so that the group's range still fits: no value is off by more than half a step.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from thunder_patches.cache.record import Buffer, Header, TensorSpec, flat

from .base import CodecError, Coded, Refused, take
from .layout import Rows, rows_of
from .numbers import bf16_down, bf16_up, from_bf16, from_float32, to_float32
from .planes import join_parts, split_parts

GROUP = 64


class Integers:
    """Affine whole numbers; parameters: "axis" of the groups and "parts", see `planes`."""

    lossy: ClassVar[bool] = True
    name: ClassVar[str]
    bits: ClassVar[int]

    def encode(self, spec: TensorSpec, data: Buffer, header: Header) -> Coded:
        axis = "tokens" if _rows(spec, header).role == "k" else "channels"
        if not spec.nbytes:
            return Coded(self.name, b"", {"axis": axis, "parts": []})
        values = to_float32(flat(data), spec.dtype).reshape(spec.shape)
        if not np.isfinite(values).all():
            raise Refused(f"{spec.name} holds NaN or infinity")
        groups = _grouped(values, axis)
        low, high = groups.min(-1), groups.max(-1)
        offset = bf16_down(low)
        with np.errstate(over="ignore"):
            step = bf16_up((high - from_bf16(offset)) / (2**self.bits - 1))
        scale = from_bf16(step)
        if not np.isfinite(scale).all():
            raise Refused(f"{spec.name} has a range too wide for {self.name}")
        groups -= from_bf16(offset)[..., None]
        groups /= np.where(scale == 0, 1, scale)[..., None]
        whole = np.rint(groups, out=groups).astype(np.uint8)
        if self.bits == 4:
            whole = whole[..., 0::2] | (whole[..., 1::2] << 4)
        parts, payload = join_parts([whole, step.view(np.uint8), offset.view(np.uint8)])
        return Coded(self.name, payload, {"axis": axis, "parts": parts})

    def decode(self, spec: TensorSpec, coded: Coded, header: Header) -> Buffer:
        axis = take(coded.params, "axis", str)
        if axis not in ("tokens", "channels") or len(spec.shape) != 3:
            raise CodecError(f"{spec.name}: no groups along {axis!r} of {spec.shape}")
        if not spec.nbytes:
            return b""
        heads, tokens, dim = spec.shape
        lines, length = (dim, tokens) if axis == "tokens" else (tokens, dim)
        n = -(-length // GROUP)
        shape = (heads, lines, n)
        sizes = [heads * lines * n * GROUP * self.bits // 8, *[heads * lines * n * 2] * 2]
        packed, step, offset = split_parts(coded, sizes)
        scale = from_bf16(step.view("<u2")).reshape(*shape, 1)
        low = from_bf16(offset.view("<u2")).reshape(*shape, 1)
        if self.bits == 4:
            whole = np.empty((*shape, GROUP), np.float32)
            nibbles = packed.reshape(*shape, GROUP // 2)
            whole[..., 0::2], whole[..., 1::2] = nibbles & 15, nibbles >> 4
        else:
            whole = packed.reshape(*shape, GROUP).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            whole *= scale
            whole += low
        values = whole.reshape(heads, lines, n * GROUP)[..., :length]
        return from_float32(values.swapaxes(1, 2) if axis == "tokens" else values, spec.dtype)


class Int8(Integers):
    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8


class Int4(Integers):
    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4


def _rows(spec: TensorSpec, header: Header) -> Rows:
    rows = rows_of(header.layout).get(spec.name)
    if rows is None or not rows.attention or len(spec.shape) != 3:
        raise Refused(f"{spec.name} isn't attention keys or values")
    return rows


def _grouped(values: np.ndarray, axis: str) -> np.ndarray:
    """A copy ``[heads, lines, groups, GROUP]``, the last group filled up with its last value."""
    if axis == "tokens":
        values = values.swapaxes(1, 2)
    *outer, length = values.shape
    n = -(-length // GROUP)
    out = np.empty((*outer, n * GROUP), np.float32)
    out[..., :length] = values
    out[..., length:] = values[..., -1:]
    return out.reshape(*outer, n, GROUP)
