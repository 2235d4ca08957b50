"""Names of cached blocks: a chain of digests, so that a key stands for a whole prefix.

Every field is framed with its length, so that no two different lists of fields give the same bytes,
and every kind of key has its own domain tag.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16
TOKEN_DTYPE = np.dtype("<i8")

_ROOT = b"thunder.root.1"
_BLOCK = b"thunder.block.1"
_SNAPSHOT = b"thunder.snapshot.1"


def root_key(identity: str, layout: str, salt: str, block_tokens: int) -> bytes:
    """Key of the empty prefix of one model with one cache layout, for one tenant.

    identity: digest of the model's content. layout: canonical JSON of the layers' cache layout.
    salt: empty, or what separates tenants. block_tokens: tokens in a block.
    """
    fields = (identity.encode(), layout.encode(), salt.encode(), str(block_tokens).encode())
    return _digest(_ROOT, *fields)


def chain(root: bytes, tokens: npt.NDArray[np.int64], block_tokens: int) -> list[bytes]:
    """Keys of the full blocks of `tokens` (int64, 1-D); a shorter rest has no key here.

    root: the root key, or the key of the block before these.
    """
    if len(root) != KEY_BYTES:
        raise ValueError(f"expected a key of {KEY_BYTES} bytes, found {len(root)}")
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, found {block_tokens}")
    data = np.ascontiguousarray(tokens, TOKEN_DTYPE).data.cast("B")
    step = block_tokens * TOKEN_DTYPE.itemsize
    # Within a chain a parent's key and a block's tokens have one size each, so their frames are
    # constants; the digest is then about all that a block costs.
    start = hashlib.sha256(_frame(_BLOCK) + KEY_BYTES.to_bytes(8, "little"))
    size = step.to_bytes(8, "little")
    keys = []
    parent = root
    for at in range(0, len(data) - step + 1, step):
        digest = start.copy()
        digest.update(parent + size)
        digest.update(data[at : at + step])
        parent = digest.digest()[:KEY_BYTES]
        keys.append(parent)
    return keys


def snapshot_key(parent: bytes, tail: bytes) -> bytes:
    """Key of the snapshot `tail` (tokens as bytes, may be empty) after block `parent`."""
    return _digest(_SNAPSHOT, parent, tail)


def token_bytes(tokens: npt.ArrayLike) -> bytes:
    """Tokens as little-endian int64 bytes, the form that keys, records and files use."""
    return np.ascontiguousarray(tokens, dtype=TOKEN_DTYPE).tobytes()


def _digest(*fields: bytes) -> bytes:
    return hashlib.sha256(b"".join(map(_frame, fields))).digest()[:KEY_BYTES]


def _frame(field: bytes) -> bytes:
    return len(field).to_bytes(8, "little") + field
