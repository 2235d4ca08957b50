"""Where the tensors of a safetensors checkpoint lie, read from the files' headers and validated."""

from __future__ import annotations

import itertools
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_MAX_HEADER = 100_000_000
"""What the safetensors library itself accepts."""


class CheckpointError(Exception):
    """A file that isn't a well-formed safetensors file: what was expected, what was found."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint and the bytes it occupies."""

    name: str
    file: Path
    dtype: str
    """As in the header: F32, BF16, U32, ..."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""
    nbytes: int


def weight_files(folder: Path) -> list[Path]:
    """The files that mlx-lm reads: ``model*.safetensors``."""
    return sorted(folder.glob("model*.safetensors"))


def tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the checkpoint in `folder`, by name.

    Raises:
        CheckpointError: no file, a file that is not well-formed, or a name in two files.
    """
    files = weight_files(folder)
    if not files:
        raise CheckpointError(f"expected model*.safetensors in {folder}, found none")
    found: dict[str, Tensor] = {}
    for file in files:
        for tensor in header(file):
            if tensor.name in found:
                other = found[tensor.name].file.name
                raise CheckpointError(f"{tensor.name} is both in {other} and in {file.name}")
            found[tensor.name] = tensor
    return found


def header(file: Path) -> list[Tensor]:
    """The tensors of one file, in the order of their bytes.

    Raises:
        CheckpointError: the header is none, or a tensor lies outside the file, has another size
            than its shape says, or overlaps the next.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise CheckpointError(
                    f"{file}: expected a safetensors header, found length {length} in {size} bytes"
                )
            entries = json.loads(stream.read(length))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: can't be read: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: expected a JSON object as header")
    entries.pop("__metadata__", None)
    base = 8 + length
    found = [_tensor(file, name, entry, base, size) for name, entry in entries.items()]
    found.sort(key=lambda tensor: tensor.offset)
    for this, following in itertools.pairwise(found):
        if this.offset + this.nbytes > following.offset:
            raise CheckpointError(f"{file}: {this.name} and {following.name} overlap")
    return found


def _tensor(file: Path, name: str, entry: object, base: int, size: int) -> Tensor:
    try:
        assert isinstance(entry, dict)
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        start, end = entry["data_offsets"]
        whole = all(isinstance(number, int) and number >= 0 for number in (*shape, start, end))
        assert whole and isinstance(dtype, str)
    except (AssertionError, KeyError, TypeError, ValueError):
        raise CheckpointError(f"{file}: {name}: expected dtype, shape and offsets") from None
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{file}: {name} has the unknown dtype {dtype}")
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if end - start != nbytes:
        raise CheckpointError(
            f"{file}: {name}, {dtype} {list(shape)}, should have {nbytes} bytes, has {end - start}"
        )
    if base + end > size:
        raise CheckpointError(
            f"{file}: {name} ends at byte {base + end} of a file of {size}: is it truncated?"
        )
    return Tensor(name, file, dtype, shape, base + start, nbytes)


def same_file(a: os.stat_result, b: os.stat_result) -> bool:
    """Whether nothing was written to a file between two `stat` calls on it."""
    return (a.st_size, a.st_mtime_ns, a.st_ino) == (b.st_size, b.st_mtime_ns, b.st_ino)
