"""Serving over several machines (``mlx.launch``): all ranks go on from the same token, or none does.

Each rank keeps its own part of every layer in its own store, under keys that name the rank. A prompt
is matched on each; what they restore must reach just as far, since they compute the rest together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx
import numpy as np

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The group that serves one model; its methods must be called on all ranks, in the same order."""

    rank: int
    size: int

    def lowest_and_highest(self, value: int) -> tuple[int, int]:
        """Of what the ranks bring, on the host's own group and stream."""
        found = mx.distributed.all_max(mx.array([-value, value], dtype=mx.int32))
        low, high = np.asarray(found).tolist()
        return -low, high

    def agree(self, find: Callable[[int | None], T], reach: Callable[[T], int]) -> T:
        """What ``find(limit)`` gives, once it reaches as far on every rank.

        Args:
            find: looks up with no limit, at most ``limit`` tokens, or (0) nothing of the store; must
                not raise.
            reach: how far a finding goes; equal numbers mean that ranks can go on together.
        """
        found = find(None)
        for attempt in range(2):
            low, high = self.lowest_and_highest(reach(found))
            if low == high:
                break
            found = find(low // 2 if attempt == 0 else 0)
        return found


def group() -> Ranks | None:
    """The group that this process serves in, or None when it serves alone."""
    world = mx.distributed.init()
    return Ranks(world.rank(), world.size()) if world.size() > 1 else None
