"""mlx_lm.server. One request, in order: requests, lookup, batched or serial, usage."""

from .lifecycle import start

__all__ = ["start"]
