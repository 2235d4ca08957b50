"""What memory is left, and whether a prompt can fit: decided before anything is allocated."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

_CGROUP = Path("/sys/fs/cgroup")
_MARGIN = 0.92
"""Share of the limit that prompts may fill."""


class PromptTooLarge(Exception):
    """A prompt that cannot fit in memory; the message has the numbers."""


@dataclass(eq=False)
class Reservation:
    """Bytes that a running request will still allocate, at most; ends with its last reference."""

    bytes: int


class MemoryGuard:
    """Counts what running requests will need, and refuses what cannot fit.

    Args:
        limit: bytes that this process may use for MLX arrays; None: the device's recommended working set, or
            else what the system has free now beyond what MLX holds already.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._reserved: weakref.WeakSet[Reservation] = weakref.WeakSet()

    def free(self) -> int:
        """Bytes that may still be allocated, what running requests will need taken off."""
        with self._lock:
            return self._left() - sum(r.bytes for r in self._reserved)

    def admit(
        self, tokens: int, answer: int, reused: int, kv_bytes: float, scratch: float
    ) -> Reservation:
        """Reserve the memory for a prompt.

        Args:
            tokens: in the prompt; answer: most tokens of the answer to make room for at once.
            reused: tokens that need no scratch because they are restored.
            kv_bytes: KV state in bytes a token; scratch: bytes of the smallest chunk's scratch.

        Raises:
            PromptTooLarge: it cannot fit now; nothing was reserved.
        """
        needed = int((tokens + answer) * kv_bytes + (scratch if reused < tokens else 0))
        with self._lock:
            held = sum(r.bytes for r in self._reserved)
            left = self._left() - held
            if needed > left:
                raise PromptTooLarge(
                    f"a prompt of {tokens:,} tokens needs about {_gib(needed)} of memory "
                    f"({kv_bytes / 1024:,.1f} KiB a token), but only {_gib(max(left, 0))} are free"
                    + (f" beside {len(self._reserved)} running requests" if self._reserved else "")
                    + "; shorten it, or start the server with a smaller or more quantised model"
                )
            reservation = Reservation(needed)
            self._reserved.add(reservation)
            return reservation

    def allocated(self, reservation: Reservation, tokens: int, kv_bytes: float) -> None:
        """Tell that KV state of ``tokens`` more tokens is held now, and so is no longer to come."""
        with self._lock:
            reservation.bytes = max(0, reservation.bytes - int(tokens * kv_bytes))

    def release(self, reservation: Reservation) -> None:
        """The request has ended."""
        with self._lock:
            self._reserved.discard(reservation)

    def _left(self) -> int:
        active = mx.get_active_memory()
        if self._limit is not None:
            return int(self._limit * _MARGIN) - active
        device = mx.device_info()
        size = device.get("max_recommended_working_set_size") or 0
        left = int(int(size) * _MARGIN) - active if size else None
        system = int(_system_free() * _MARGIN) + mx.get_cache_memory()
        return system if left is None else min(left, system)


def _system_free() -> int:
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        if limit != "max":
            free = min(free, int(limit) - used)
    except (OSError, ValueError):
        pass
    return free


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
