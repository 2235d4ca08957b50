"""BF16 and F16 in numpy, which knows no BF16: bits in, float32 out, and back."""

from __future__ import annotations

import numpy as np

from thunder_patches.cache.record import Buffer


def to_float32(data: Buffer, dtype: str) -> np.ndarray:
    """A new flat float32 array of BF16, F16 or F32 bytes."""
    if dtype == "BF16":
        return from_bf16(np.frombuffer(data, "<u2"))
    return np.frombuffer(data, {"F16": "<f2", "F32": "<f4"}[dtype]).astype(np.float32)


def from_float32(values: np.ndarray, dtype: str) -> memoryview:
    """The C-order bytes of finite float32 values, rounded to nearest even; BF16, F16 or F32."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "BF16":
        bits = values.view(np.uint32)
        odd = (bits >> 16) & 1
        odd += 0x7FFF
        odd += bits
        odd >>= 16
        rounded = odd.astype(np.uint16)
    else:
        with np.errstate(over="ignore"):
            rounded = values.astype({"F16": "<f2", "F32": "<f4"}[dtype])
    return rounded.reshape(-1).view(np.uint8).data


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """float32 values of BF16 bits (uint16)."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def bf16_down(values: np.ndarray) -> np.ndarray:
    """Bits of the largest BF16 numbers that aren't above these finite float32 values."""
    return _towards(values, up=False)


def bf16_up(values: np.ndarray) -> np.ndarray:
    """Bits of the smallest BF16 numbers that aren't below these finite float32 values."""
    return _towards(values, up=True)


def _towards(values: np.ndarray, up: bool) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    away = (values > 0) if up else (values < 0)  # cutting the low bits rounds towards zero
    return ((bits + np.where(away, np.uint32(0xFFFF), np.uint32(0))) >> 16).astype(np.uint16)
