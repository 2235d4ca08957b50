"""Rotary position embedding in numpy: undone before keys are compressed, redone after."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Rotary:
    """What a layer does with a key at position p (RoFormer, arXiv 2104.09864, and its variants).

    Args:
        rates: radians per token for each rotated pair; pairs beyond them are left alone.
        interleaved: whether a pair is (2i, 2i+1) rather than (i, i + pairs).
        scale: factor on the rotated part, other than 1 in YaRN and LongRoPE.
    """

    rates: tuple[float, ...]
    interleaved: bool = False
    scale: float = 1.0

    def turn(self, keys: np.ndarray, start: int, inverse: bool = False) -> np.ndarray:
        """Rotate float32 ``[..., tokens, dim]`` whose first token is at ``start``, or undo it."""
        cos, sin = self.table(start, keys.shape[-2], inverse)
        pairs = len(self.rates)
        out = keys.copy()
        if self.interleaved:
            a, b = keys[..., 0 : 2 * pairs : 2], keys[..., 1 : 2 * pairs : 2]
            out[..., 0 : 2 * pairs : 2] = a * cos - b * sin
            out[..., 1 : 2 * pairs : 2] = a * sin + b * cos
        else:
            a, b = keys[..., :pairs], keys[..., pairs : 2 * pairs]
            out[..., :pairs] = a * cos - b * sin
            out[..., pairs : 2 * pairs] = a * sin + b * cos
        return out

    def table(
        self, start: int, tokens: int, inverse: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines ``[tokens, pairs]``, scaled, float32."""
        angle = np.outer(np.arange(start, start + tokens), np.array(self.rates, np.float64))
        scale = 1 / self.scale if inverse else self.scale
        sin = np.sin(angle) * (-scale if inverse else scale)
        return (np.cos(angle) * scale).astype(np.float32), sin.astype(np.float32)
