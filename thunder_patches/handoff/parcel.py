"""A context in one file that can go anywhere: safetensors, with everything said about it in the metadata.

Nothing in a file is trusted: every size, shape and checksum is looked at before it is used, and the keys
under which its records are stored come from its tokens, never from the file. There is no pickle.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from thunder_patches.cache.record import DTYPE_BYTES, Coded, Header, TensorSpec, flat
from thunder_patches.codec.base import CodecError
from thunder_patches.codec.layout import rows_of

from .context import BadContext, Context

FORMAT = "thunder-context"
VERSION = "1"


class BadParcel(ValueError):
    """A file that is no parcel, or a damaged one; the message says how."""


@dataclass(frozen=True)
class Packed:
    """A record as it lies in a parcel."""

    header: Header
    tensors: tuple[Coded, ...]


def write(file: Path, context: Context, records: Sequence[Packed]) -> None:
    """Write a new file for this user alone; raises OSError."""
    from safetensors.numpy import save

    told, arrays = [], {}
    for i, packed in enumerate(records):
        tensors = []
        for j, (spec, coded) in enumerate(zip(packed.header.tensors, packed.tensors, strict=True)):
            data = np.frombuffer(flat(coded.data), np.uint8)
            arrays[f"{i}.{j}"] = data
            tensors.append(
                {
                    "name": spec.name,
                    "dtype": spec.dtype,
                    "shape": list(spec.shape),
                    "codec": coded.codec,
                    "params": coded.params,
                    "xxh3": xxhash.xxh3_128_hexdigest(data.data),
                }
            )
        header = packed.header
        told.append(
            {
                "kind": header.kind,
                "start": header.start,
                "tokens": base64.b64encode(header.tokens).decode(),
                "layout": header.layout,
                "end": header.end,
                "tensors": tensors,
            }
        )
    text = json.dumps(told, separators=(",", ":"))
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "context": context.dumps().decode(),
        "records": text,
        "checksum": hashlib.sha256(text.encode()).hexdigest(),
    }
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(file, flags, 0o600), "wb") as out:
        out.write(save(arrays, metadata))


class Parcel:
    """An open parcel.

    Raises:
        BadParcel: when the file is anything else.
    """

    def __init__(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            self._file = safe_open(file, framework="numpy")
            meta = self._file.metadata() or {}
            found = (meta.get("format"), meta.get("version"))
            if found != (FORMAT, VERSION):
                raise BadParcel(f"expected a file of form {(FORMAT, VERSION)}, found {found}")
            text = meta["records"]
            if hashlib.sha256(text.encode()).hexdigest() != meta["checksum"]:
                raise BadParcel("the checksum of its records' descriptions is wrong")
            self.context = Context.loads(meta["context"].encode())
            self._told = json.loads(text)
            self._names = set(self._file.keys())
            if len(self._told) > 1_000_000:
                raise BadParcel(f"{len(self._told)} records")
        except BadParcel:
            raise
        except (BadContext, KeyError, TypeError, ValueError, OSError, SafetensorError) as error:
            raise BadParcel(f"not a context's file: {error}") from error

    def __len__(self) -> int:
        return len(self._told)

    def records(self) -> Iterator[Packed]:
        """The records in order, each checked.

        Raises:
            BadParcel: when one is not what it must be.
        """
        for i, told in enumerate(self._told):
            try:
                yield self._record(i, told)
            except BadParcel:
                raise
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise BadParcel(f"record {i}: {error!r}"[:300]) from error

    def _record(self, i: int, told: dict[str, Any]) -> Packed:
        specs, tensors = [], []
        for j, tensor in enumerate(told["tensors"]):
            name = f"{i}.{j}"
            if name not in self._names:
                raise BadParcel(f"record {i}: expected a tensor {name}, found none")
            data = self._file.get_tensor(name)
            if data.dtype != np.uint8 or data.ndim != 1:
                raise BadParcel(f"record {i}: expected bytes, found {data.dtype} {data.shape}")
            if xxhash.xxh3_128_hexdigest(data.data) != tensor["xxh3"]:
                raise BadParcel(f"record {i}: the checksum of {tensor['name']!r} is wrong")
            shape = tuple(int(n) for n in tensor["shape"])
            if tensor["dtype"] not in DTYPE_BYTES or any(n < 0 for n in shape):
                raise BadParcel(f"record {i}: {tensor['dtype']} {shape}")
            specs.append(TensorSpec(str(tensor["name"]), tensor["dtype"], shape))
            tensors.append(Coded(str(tensor["codec"]), data.data, dict(tensor["params"])))
        if told["kind"] not in ("block", "snapshot"):
            raise BadParcel(f"record {i}: expected a block or a snapshot, found {told['kind']!r}")
        header = Header(
            b"",
            b"",
            told["kind"],
            int(told["start"]),
            base64.b64decode(told["tokens"], validate=True),
            str(told["layout"]),
            tuple(specs),
            bool(told["end"]),
        )
        check(header)
        return Packed(header, tuple(tensors))


def check(header: Header) -> None:
    """Whether a record's tensors are those of its layout and its tokens.

    Raises:
        BadParcel: when they are not.
    """
    try:
        rows = rows_of(header.layout)
        states = json.loads(header.layout).get("state", {}) if header.kind == "snapshot" else {}
    except (CodecError, ValueError, AttributeError) as error:
        raise BadParcel(f"not a layout: {error}") from error
    found = {spec.name: spec for spec in header.tensors}
    for name, row in rows.items():
        wanted = (row.dtype, (row.heads, header.n_tokens, row.dim))
        spec = found.pop(name, None)
        if spec is None or (spec.dtype, spec.shape) != wanted:
            raise BadParcel(f"expected {name} as {wanted}, found {spec}")
    for path, meta in states.items():
        for i in range(int(meta["arrays"])):
            if found.pop(f"s{path}.{i}", None) is None:
                raise BadParcel(f"expected the state s{path}.{i}, found none")
    if header.end and found.pop("logits", None) is None:
        raise BadParcel("expected logits, found none")
    if found:
        raise BadParcel(f"tensors that no layout names: {sorted(found)[:4]}")
