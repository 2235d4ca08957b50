"""What is cached: a block of a prefix, or a snapshot of the state after a prefix, as bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["block", "snapshot"]
Buffer = bytes | bytearray | memoryview

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (safetensors' name of it, such as "BF16") and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Ref:
    """A record as its file's name describes it.

    tail_length, end: of a snapshot, its number of tokens, and whether it holds their logits.
    """

    kind: Kind
    key: bytes
    parent: bytes
    tail_length: int = 0
    end: bool = False

    def covers(self, other: Ref) -> bool:
        """Whether this record is as good as `other`: the same, or the same with logits."""
        same = (self.kind, self.key, self.parent) == (other.kind, other.key, other.parent)
        return same and (self.end or not other.end)


@dataclass(frozen=True, slots=True)
class Listed:
    """A record as a listing tells it: bytes, last use in ns, who pinned it, whether it is in memory."""

    ref: Ref
    size: int
    stamp: int
    owners: tuple[str, ...] = ()
    in_ram: bool = False


class Tree:
    """Refs by the record that they hang off. Not locked: its owner's lock guards it."""

    def __init__(self) -> None:
        self._after: dict[bytes, dict[bytes, Ref]] = {}

    def add(self, ref: Ref) -> None:
        self._after.setdefault(ref.parent, {})[ref.key] = ref

    def discard(self, ref: Ref) -> bool:
        """Take `ref` out; True when its parent has nothing hanging off it any more."""
        refs = self._after.get(ref.parent)
        if refs is None or refs.get(ref.key) != ref:
            return False
        del refs[ref.key]
        if refs:
            return False
        del self._after[ref.parent]
        return True

    def after(self, parent: bytes) -> list[Ref]:
        return list(self._after.get(parent, {}).values())

    def __contains__(self, parent: bytes) -> bool:
        return parent in self._after


@dataclass(frozen=True, slots=True)
class Header:
    """All of a record but its tensors' bytes.

    A block holds exactly one block of tokens from position `start`. A snapshot hangs off block
    `parent` (or the root key), which ends at `start`; its `tokens` are those since then, fewer than
    a block, and its tensors the rows of these tokens and the state of the layers that can't be cut.
    `tokens`: little-endian int64. `layout`: canonical JSON, compared as a string.
    `end`: the snapshot also holds the tensor "logits" of its last token.
    """

    key: bytes
    parent: bytes
    kind: Kind
    start: int
    tokens: bytes
    layout: str
    tensors: tuple[TensorSpec, ...]
    end: bool = False

    @property
    def n_tokens(self) -> int:
        return len(self.tokens) // 8

    @property
    def ref(self) -> Ref:
        if self.kind == "block":
            return Ref("block", self.key, self.parent)
        return Ref("snapshot", self.key, self.parent, self.n_tokens, self.end)


@dataclass(frozen=True, slots=True)
class Record:
    """A header and one C-contiguous buffer for each of its tensors, decoded."""

    header: Header
    data: tuple[Buffer, ...]

    def __post_init__(self) -> None:
        specs = self.header.tensors
        if len(specs) != len(self.data):
            raise ValueError(f"expected {len(specs)} buffers, found {len(self.data)}")
        for spec, data in zip(specs, self.data, strict=True):
            found = memoryview(data).nbytes
            if found != spec.nbytes:
                raise ValueError(f"{spec.name}: expected {spec.nbytes} bytes, found {found}")

    @property
    def nbytes(self) -> int:
        """Bytes that the record occupies, its header's strings included."""
        head = len(self.header.tokens) + len(self.header.layout)
        return head + sum(spec.nbytes for spec in self.header.tensors)


@dataclass(frozen=True, slots=True)
class Coded:
    """One tensor as it is stored: its codec's name ("raw": unchanged), parameters, and payload."""

    codec: str
    data: Buffer
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return memoryview(self.data).nbytes


def flat(data: Buffer) -> memoryview:
    """The buffer's bytes, one-dimensional; raises TypeError when it isn't C-contiguous."""
    view = memoryview(data)
    if view.ndim == 1 and view.format == "B":
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")
