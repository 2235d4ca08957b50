"""A context's state in one record, in less than full precision, and back.

Keys and values lose what the precision allows; all else (recurrent state, rings, logits) stays verbatim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from thunder_patches.cache.keys import snapshot_key
from thunder_patches.cache.record import (
    DTYPE_BYTES,
    Buffer,
    Coded,
    Header,
    Record,
    TensorSpec,
    flat,
)
from thunder_patches.codec.base import Codec, Refused
from thunder_patches.codec.codecs import CODECS, decode
from thunder_patches.codec.layout import Rows, rows_of

from . import mixed

Precision = Literal["int8", "mixed", "kvtc"]
WORTH_IT = 0.95
_LOSSLESS = "planes+zstd"


def joined(records: Sequence[Record], tokens: bytes) -> Record:
    """A chain of blocks, and the snapshot at its end if there is one, as one record of all tokens.

    Raises:
        ValueError: when the records don't follow each other.
    """
    at = 0
    for record in records:
        if record.header.start != at:
            raise ValueError(f"expected a record from token {at}, found {record.header.start}")
        at += record.header.n_tokens
    last = records[-1].header
    row_names = rows_of(last.layout)
    specs: list[TensorSpec] = []
    data: list[Buffer] = []
    for i, spec in enumerate(last.tensors):
        if spec.name not in row_names:
            specs.append(spec)
            data.append(records[-1].data[i])
            continue
        heads, dim = spec.shape[0], spec.shape[2]
        parts = [_part(record, spec) for record in records]
        specs.append(TensorSpec(spec.name, spec.dtype, (heads, at, dim)))
        data.append(np.concatenate(parts, axis=1).reshape(-1).data)
    root = records[0].header.parent
    key = snapshot_key(root, tokens)
    header = Header(key, root, "snapshot", 0, tokens, last.layout, tuple(specs), last.end)
    return Record(header, tuple(data))


def _part(record: Record, spec: TensorSpec) -> np.ndarray:
    """The bytes of one tensor ``[heads, tokens, bytes of a row]``."""
    for found, data in zip(record.header.tensors, record.data, strict=True):
        if (found.name, found.dtype) == (spec.name, spec.dtype):
            raw = np.frombuffer(flat(data), np.uint8)
            heads, tokens, dim = found.shape
            return raw.reshape(heads, tokens, dim * DTYPE_BYTES[spec.dtype])
    raise ValueError(f"expected tensor {spec.name} as {spec.dtype} in every record")


def encode(
    record: Record,
    precision: Precision,
    *,
    bits: float = mixed.BITS,
    kvtc: Codec | None = None,
) -> list[Coded]:
    """One `Coded` for each tensor of a record that `joined` made.

    Args:
        bits: of "mixed". kvtc: the codec of that name, with a calibration.
    """
    header, names = record.header, rows_of(record.header.layout)
    pairs = list(zip(header.tensors, record.data, strict=True))
    chosen: Mapping[str, np.ndarray] = {}
    rows: dict[str, mixed.Rows] = {}
    if precision == "mixed":
        for spec, data in pairs:
            if spec.name in names and names[spec.name].attention:
                try:
                    rows[spec.name] = mixed.values_of(spec, names[spec.name].role, data)
                except Refused:
                    continue
        chosen = mixed.choose(list(rows.values()), bits)
    coded = []
    for spec, data in pairs:
        try:
            if spec.name in rows:
                coded.append(mixed.CODEC.encode_units(rows[spec.name], data, chosen[spec.name]))
            else:
                coded.append(_other(spec, data, header, names.get(spec.name), precision, kvtc))
        except Refused:
            coded.append(lossless(spec, data, header))
    return coded


def _other(
    spec: TensorSpec,
    data: Buffer,
    header: Header,
    rows: Rows | None,
    precision: Precision,
    kvtc: Codec | None,
) -> Coded:
    if rows is None or not rows.attention or not spec.nbytes or precision == "mixed":
        return lossless(spec, data, header)
    if precision == "kvtc" and kvtc is not None:
        return kvtc.encode(spec, data, header)
    return CODECS["int8"].encode(spec, data, header)


def lossless(spec: TensorSpec, data: Buffer, header: Header) -> Coded:
    """The tensor without loss, smaller where that pays."""
    if spec.nbytes:
        coded = CODECS[_LOSSLESS].encode(spec, data, header)
        if coded.nbytes <= WORTH_IT * spec.nbytes:
            return coded
    return Coded("raw", flat(data))


def decoded(header: Header, coded: Sequence[Coded], kvtc: Codec | None = None) -> Record:
    """The record again.

    Raises:
        CodecError: when a tensor can't be decoded.
    """
    codecs: dict[str, Codec] = {**CODECS, mixed.CODEC.name: mixed.CODEC}
    if kvtc is not None:
        codecs["kvtc"] = kvtc
    pairs = zip(header.tensors, coded, strict=True)
    return Record(header, tuple(decode(spec, tensor, header, codecs) for spec, tensor in pairs))
