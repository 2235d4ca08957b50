"""oMLX (`omlx serve`). One request, in order: scheduler (lookup, prefill, store), usage.

oMLX runs on mlx-lm's ``BatchGenerator``, so the first step and the decoding are those of
``hosts/mlx_lm/batched.py``. Its own prefix cache is put out of use for a model that this package serves:
one store, one format and one folder for both hosts, checksummed, without keeping everything twice.
"""

from .lifecycle import start

__all__ = ["start"]
