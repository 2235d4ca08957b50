"""Tensor codecs: bytes in, bytes out, no MLX and no host.

`policy.Policy` is what the cache store calls; `codecs.CODECS` holds the codecs by name; `kvtc`
needs a `calibration` of the model.
"""
