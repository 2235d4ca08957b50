"""A record as one safetensors file, readable with the public library.

The header's `__metadata__` says all that the record's header says, and holds two xxh3_64 checksums:
one of the payload as stored, one of the header itself. A tensor that a codec changed is stored as
U8. Nothing in a file is trusted before its checksum is right, and no size before it fits the file.
"""

from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import xxhash

from thunder_patches.cache.keys import KEY_BYTES
from thunder_patches.cache.record import (
    DTYPE_BYTES,
    Buffer,
    Coded,
    Header,
    Record,
    TensorSpec,
    flat,
)

FORMAT = "thunder-cache"
VERSION = "1"
CHECKSUM = "xxh3_64"
MAX_HEADER_BYTES = 8 << 20

# The header's checksum stands first, at a fixed place, and covers all that follows it.
_LEAD = b'{"__metadata__":{"header_checksum":"'
_DIGITS = 16
_ALIGN = 64
_FIRST_READ = 32 << 10
# One readv: small enough that the checksum finds the bytes in the core's own cache.
_BATCH_BYTES = 256 << 10
_BATCH_BUFFERS = 512

# A tensor's targets: writable views whose concatenation is the tensor; an int skips so many bytes.
Segments = Sequence[memoryview | int]


class BadFile(Exception):
    """The file isn't what its name promises; the message says what was expected and found."""


class Unwanted(Exception):
    """The file is good, but not what is wanted here."""


class Encoded(Protocol):
    """A record's tensors as they are stored, in order; `lossy` names a codec that isn't exact."""

    @property
    def tensors(self) -> Sequence[Coded]: ...
    @property
    def lossy(self) -> str | None: ...


class Codec(Protocol):
    """Turns tensors into fewer bytes and back. Its methods may be called from several threads."""

    @property
    def allows_lossy(self) -> bool:
        """Whether records that aren't exact may be read."""

    def encode(self, record: Record) -> Encoded: ...

    def decode(self, spec: TensorSpec, coded: Coded, header: Header) -> Buffer:
        """The tensor's bytes again; raises on an unknown codec or data that can't be decoded."""

    def unpack(self, spec: TensorSpec, coded: Coded, header: Header) -> object | None:
        """The first half of decoding, for a caller that does the second; None without halves."""

    def ages(self, codecs: Sequence[str]) -> bool:
        """Whether `age` is worth a try for a record whose tensors are stored with these codecs."""

    def age(self, record: Record) -> Encoded | None:
        """The record in fewer bytes and still exact, for idle time; None when nothing is gained."""


@dataclass(frozen=True, slots=True)
class Raw:
    """A record whose tensors are stored as they are."""

    tensors: Sequence[Coded]
    lossy: str | None = None


class RawCodec:
    """Stores every tensor as it is."""

    allows_lossy = False

    def encode(self, record: Record) -> Raw:
        return Raw([Coded("raw", data) for data in record.data])

    def decode(self, spec: TensorSpec, coded: Coded, header: Header) -> Buffer:
        raise ValueError(f"{spec.name}: unknown codec {coded.codec!r}")

    def unpack(self, spec: TensorSpec, coded: Coded, header: Header) -> object | None:
        return None

    def ages(self, codecs: Sequence[str]) -> bool:
        return False

    def age(self, record: Record) -> Encoded | None:
        return None


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor in a file: its decoded form, and the payload's bytes [begin, end) that hold it."""

    spec: TensorSpec
    codec: str
    params: Any
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Head:
    """A file's checked header. `parts` are in the record's order, the payload from offset `payload`
    on in that of `begin`. `lossy`: the codec that wasn't exact, or ""."""

    header: Header
    parts: tuple[Part, ...]
    payload: int
    checksum: str
    lossy: str


# Writing


def compose(record: Record, encoded: Encoded) -> list[memoryview]:
    """The file's bytes: its head, then the payload's buffers in order."""
    specs, coded = record.header.tensors, encoded.tensors
    if len(coded) != len(specs):
        raise ValueError(f"expected {len(specs)} encoded tensors, found {len(coded)}")
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError("two tensors have the same name")

    def width(i: int) -> int:
        return DTYPE_BYTES[specs[i].dtype] if coded[i].codec == "raw" else 1

    # Wider items first, so that every tensor is aligned to its item in the file.
    order = sorted(range(len(specs)), key=width, reverse=True)
    data = [flat(tensor.data) for tensor in coded]
    places: dict[str, Any] = {}
    digest = xxhash.xxh3_64()
    at = 0
    for i in order:
        spec, size, raw = specs[i], data[i].nbytes, coded[i].codec == "raw"
        if raw and size != spec.nbytes:
            raise ValueError(f"{spec.name}: expected {spec.nbytes} bytes, found {size}")
        places[spec.name] = {
            "dtype": spec.dtype if raw else "U8",
            "shape": spec.shape if raw else [size],
            "data_offsets": [at, at + size],
        }
        digest.update(data[i])
        at += size
    head = _head_bytes(record.header, encoded, places, digest.hexdigest())
    return [memoryview(head), *(data[i] for i in order if data[i].nbytes)]


def _head_bytes(
    header: Header, encoded: Encoded, places: Mapping[str, Any], checksum: str
) -> bytes:
    tensors = [
        {"name": s.name, "dtype": s.dtype, "shape": s.shape, "codec": c.codec, "params": c.params}
        for s, c in zip(header.tensors, encoded.tensors, strict=True)
    ]
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "checksum_algorithm": CHECKSUM,
        "checksum": checksum,
        "kind": header.kind,
        "key": header.key.hex(),
        "parent": header.parent.hex(),
        "start": str(header.start),
        "tokens": base64.b64encode(header.tokens).decode(),
        "end": str(int(header.end)),
        "layout": header.layout,
        "lossy": encoded.lossy or "",
        "tensors": json.dumps(tensors, separators=(",", ":")),
    }
    # `_LEAD` opened both objects; what json.dumps writes after its own brace goes on from there.
    body = b'",' + json.dumps(metadata, separators=(",", ":"))[1:].encode()
    body += (b"," if places else b"") + json.dumps(places, separators=(",", ":"))[1:].encode()
    body += b" " * (-(8 + len(_LEAD) + _DIGITS + len(body)) % _ALIGN)
    text = _LEAD + xxhash.xxh3_64(body).hexdigest().encode() + body
    return len(text).to_bytes(8, "little") + text


def write_all(fd: int, buffers: Iterable[memoryview]) -> None:
    """Write the buffers to `fd`, one after the other; raises OSError."""
    for batch in _batches(buffers):
        while batch:
            batch = _after(batch, os.writev(fd, batch))


# Reading


def open_file(path: str) -> int:
    """A descriptor of the regular file at `path`; a link or anything else raises BadFile."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadFile("expected a regular file")
    return fd


def read_head(fd: int) -> Head:
    """Read and check the header; leaves the descriptor's position anywhere."""
    size = os.fstat(fd).st_size
    start = os.pread(fd, _FIRST_READ, 0)
    if len(start) < 8:
        raise BadFile(f"expected a safetensors file, found {len(start)} bytes")
    length = int.from_bytes(start[:8], "little")
    if not len(_LEAD) + _DIGITS < length <= min(size - 8, MAX_HEADER_BYTES):
        raise BadFile(f"header of {length} bytes in a file of {size}")
    text = start[8 : 8 + length]
    while len(text) < length:
        more = os.pread(fd, length - len(text), 8 + len(text))
        if not more:
            raise BadFile("the file ends inside its header")
        text += more
    head = parse_head(text)
    end = head.payload + sum(part.end - part.begin for part in head.parts)
    if end != size:
        raise BadFile(f"expected {end} bytes, found {size}")
    return head


def parse_head(text: bytes) -> Head:
    """Check and parse a header's JSON text."""
    body = text[len(_LEAD) + _DIGITS :]
    found = text[len(_LEAD) : len(_LEAD) + _DIGITS]
    if not text.startswith(_LEAD):
        raise BadFile("not a file of this cache")
    if found != xxhash.xxh3_64(body).hexdigest().encode():
        raise BadFile("the header's checksum is wrong")
    try:
        return _parse(json.loads(text), len(text))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BadFile(f"unreadable header: {error!r}") from error


def _parse(places: dict[str, Any], length: int) -> Head:
    meta = places.pop("__metadata__")
    form = (meta["format"], meta["version"], meta["checksum_algorithm"])
    if form != (FORMAT, VERSION, CHECKSUM):
        raise BadFile(f"expected format {(FORMAT, VERSION, CHECKSUM)}, found {form}")
    kind: Literal["block", "snapshot"] = meta["kind"]
    if kind not in ("block", "snapshot"):
        raise BadFile(f"expected a block or a snapshot, found {kind!r}")
    parts = []
    for tensor in json.loads(meta["tensors"]):
        spec = TensorSpec(tensor["name"], tensor["dtype"], tuple(tensor["shape"]))
        if any(size < 0 for size in spec.shape):
            raise BadFile(f"{spec.name}: shape {spec.shape}")
        place = places.pop(spec.name)
        begin, end = place["data_offsets"]
        if tensor["codec"] == "raw" and end - begin != spec.nbytes:
            raise BadFile(f"{spec.name}: expected {spec.nbytes} bytes, found {end - begin}")
        parts.append(Part(spec, tensor["codec"], tensor["params"], begin, end))
    if places:
        raise BadFile(f"tensors that the metadata doesn't name: {sorted(places)[:4]}")
    at = 0
    for part in sorted(parts, key=lambda part: (part.begin, part.end)):
        if part.begin != at or part.end < at:
            raise BadFile(f"{part.spec.name}: expected to begin at {at}, found {part.begin}")
        at = part.end
    header = Header(
        key=bytes.fromhex(meta["key"]),
        parent=bytes.fromhex(meta["parent"]),
        kind=kind,
        start=int(meta["start"]),
        tokens=base64.b64decode(meta["tokens"], validate=True),
        layout=meta["layout"],
        tensors=tuple(part.spec for part in parts),
        end=meta["end"] == "1",
    )
    if len(header.key) != KEY_BYTES or len(header.tokens) % 8:
        raise BadFile("key or tokens of a wrong length")
    return Head(header, tuple(parts), 8 + length, meta["checksum"], meta["lossy"])


def check_targets(header: Header, targets: Mapping[str, Segments]) -> None:
    """Raise ValueError unless each target is that of a tensor of the record, and of its size."""
    sizes = {spec.name: spec.nbytes for spec in header.tensors}
    for name, segments in targets.items():
        found = sum(s if isinstance(s, int) else s.nbytes for s in segments)
        if found != sizes.get(name):
            raise ValueError(
                f"{name}: expected targets of {sizes.get(name, 'no')} bytes, found {found}"
            )


def read_into(
    fd: int,
    head: Head,
    targets: Mapping[str, Segments],
    codec: Codec,
    halves: dict[str, object] | None = None,
) -> None:
    """Read the payload into `targets` (by tensor name) and check it.

    With `halves`, a tensor whose codec decodes in two steps goes only through the first, the result
    into `halves`, and its targets are left alone.

    Raises BadFile, Unwanted, OSError, and ValueError when a target's size isn't its tensor's.
    Unchanged tensors go from the file to their targets with one copy. When it raises, the targets
    hold rubbish. A tensor without target is read, checked and thrown away.
    """
    if head.lossy and not codec.allows_lossy:
        raise Unwanted(f"stored with {head.lossy}, which isn't exact")
    check_targets(head.header, targets)
    encoded = {
        part.spec.name: bytearray(part.end - part.begin)
        for part in head.parts
        if part.codec != "raw" and part.spec.name in targets
    }
    os.lseek(fd, head.payload, os.SEEK_SET)
    digest = xxhash.xxh3_64()
    update = digest.update
    for batch in _batches(_destinations(head, targets, encoded)):
        left = batch
        while left:
            count = os.readv(fd, left)
            if not count:
                raise BadFile("the file ends inside its payload")
            left = _after(left, count)
        for view in batch:
            update(view)
    if digest.hexdigest() != head.checksum:
        raise BadFile("the payload's checksum is wrong")
    for part in head.parts:
        if (data := encoded.get(part.spec.name)) is not None:
            _decode_into(head.header, part, data, targets[part.spec.name], codec, halves)


def read_record(fd: int, head: Head, codec: Codec) -> Record:
    """The whole record, in buffers of its own; raises as `read_into` does."""
    data = {spec.name: bytearray(spec.nbytes) for spec in head.header.tensors}
    read_into(fd, head, {name: [memoryview(d)] for name, d in data.items()}, codec)
    return Record(head.header, tuple(data.values()))


def copy_into(data: Buffer, segments: Segments) -> None:
    """Copy a tensor's bytes to its targets."""
    source = flat(data)
    at = 0
    for segment in segments:
        if isinstance(segment, int):
            at += segment
            continue
        target = flat(segment)
        end = at + target.nbytes
        target[:] = source[at:end]
        at = end


def _decode_into(
    header: Header,
    part: Part,
    data: bytearray,
    segments: Segments,
    codec: Codec,
    halves: dict[str, object] | None,
) -> None:
    coded = Coded(part.codec, data, part.params)
    try:
        if halves is not None and (half := codec.unpack(part.spec, coded, header)) is not None:
            halves[part.spec.name] = half
            return
        decoded = flat(codec.decode(part.spec, coded, header))
    except Exception as error:
        raise BadFile(f"{part.spec.name}: {part.codec}: {error!r}") from error
    if decoded.nbytes != part.spec.nbytes:
        raise BadFile(
            f"{part.spec.name}: expected {part.spec.nbytes} bytes, decoded {decoded.nbytes}"
        )
    copy_into(decoded, segments)


def _destinations(
    head: Head, targets: Mapping[str, Segments], encoded: Mapping[str, bytearray]
) -> Iterator[memoryview | int]:
    """Where the payload goes, in the order of its bytes."""
    for part in sorted(head.parts, key=lambda part: part.begin):
        if (data := encoded.get(part.spec.name)) is not None:
            yield memoryview(data)
        elif (segments := targets.get(part.spec.name)) is not None:
            for segment in segments:
                yield segment if isinstance(segment, int) else flat(segment)
        else:
            yield part.end - part.begin


def _batches(buffers: Iterable[memoryview | int]) -> Iterator[list[memoryview]]:
    """The buffers in lists fit for one system call; an int stands for a buffer thrown away."""
    batch: list[memoryview] = []
    room = _BATCH_BYTES
    for buffer in buffers:
        size = buffer if isinstance(buffer, int) else buffer.nbytes
        at = 0
        while at < size:
            step = min(size - at, room)
            if isinstance(buffer, int):
                batch.append(memoryview(bytearray(step)))
            else:
                batch.append(buffer if step == size else buffer[at : at + step])
            at += step
            room -= step
            if not room or len(batch) == _BATCH_BUFFERS:
                yield batch
                batch, room = [], _BATCH_BYTES
    if batch:
        yield batch


def _after(batch: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the batch after its first `count` bytes."""
    for i, view in enumerate(batch):
        if count < view.nbytes:
            return [view[count:], *batch[i + 1 :]]
        count -= view.nbytes
    return []
