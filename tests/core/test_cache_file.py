import json
import os
import tracemalloc
import zlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import safetensors
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.core.cache_support import BLOCK, ROOT, block, content, snapshot
from thunder_patches.cache import file as file_module
from thunder_patches.cache.file import (
    BadFile,
    Raw,
    RawCodec,
    Unwanted,
    compose,
    open_file,
    read_head,
    read_into,
    read_record,
    write_all,
)
from thunder_patches.cache.record import Coded, Header, Record, TensorSpec

TOKENS = [7, -3, 2**40, 9, 1, 2]


class Zlib:
    """A codec for the even tensors; `lossy` is only what it says of itself."""

    def __init__(self, lossy: str | None = None, allows_lossy: bool = False) -> None:
        self.lossy, self.allows_lossy = lossy, allows_lossy

    def encode(self, record):
        coded = [
            Coded("raw", data) if i % 2 else Coded("zlib", zlib.compress(data), {"level": 6})
            for i, data in enumerate(record.data)
        ]
        return Raw(coded, self.lossy)

    def decode(self, spec, coded, header):
        assert (coded.codec, coded.params) == ("zlib", {"level": 6})
        return zlib.decompress(coded.data)


def write(path, record, codec=None):
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    write_all(fd, compose(record, (codec or RawCodec()).encode(record)))
    os.close(fd)
    return path


def read(path, codec=None) -> Record:
    fd = open_file(str(path))
    try:
        return read_record(fd, read_head(fd), codec or RawCodec())
    finally:
        os.close(fd)


def same(found: Record, expected: Record) -> bool:
    data = zip(found.data, expected.data, strict=True)
    return found.header == expected.header and all(bytes(a) == bytes(b) for a, b in data)


@pytest.mark.parametrize("codec", [RawCodec(), Zlib()], ids=["raw", "zlib"])
@pytest.mark.parametrize(
    "record",
    [
        block(ROOT, TOKENS, 0),
        snapshot(ROOT, TOKENS, 4),
        snapshot(ROOT, TOKENS, 6, end=True),
        Record(Header(b"k" * 16, ROOT, "block", 0, b"", "{}", ()), ()),
    ],
    ids=["block", "empty tail", "end", "no tensors"],
)
def test_what_is_written_is_read(tmp_path, record, codec):
    assert same(read(write(tmp_path / "f", record, codec), codec), record)


def test_the_public_library_reads_it(tmp_path):
    record = snapshot(ROOT, TOKENS, 6, end=True)
    path = write(tmp_path / "f", record)
    found = dict(safetensors.deserialize(path.read_bytes()))
    assert set(found) == {spec.name for spec in record.header.tensors}
    for spec in record.header.tensors:
        assert found[spec.name]["dtype"] == spec.dtype
        assert tuple(found[spec.name]["shape"]) == spec.shape
        assert bytes(found[spec.name]["data"]) == content(record.header.key, spec)
    with safetensors.safe_open(path, "numpy") as opened:
        metadata = opened.metadata()
        logits = opened.get_tensor("logits")
    assert logits.tobytes() == content(record.header.key, record.header.tensors[-1])
    assert metadata["format"] == "thunder-cache" and metadata["version"] == "1"
    assert metadata["parent"] == record.header.parent.hex()
    assert metadata["start"] == "4" and metadata["end"] == "1"
    assert [t["codec"] for t in json.loads(metadata["tensors"])] == ["raw"] * 4


def test_its_checksum_is_that_of_the_payload_as_stored(tmp_path):
    raw = write(tmp_path / "f", block(ROOT, TOKENS, 0)).read_bytes()
    payload = raw[8 + int.from_bytes(raw[:8], "little") :]
    metadata = json.loads(raw[8 : len(raw) - len(payload)])["__metadata__"]
    assert metadata["checksum_algorithm"] == "xxh3_64"
    assert metadata["checksum"] == xxhash.xxh3_64(payload).hexdigest()


def test_tensors_are_aligned_to_their_items(tmp_path):
    specs = (
        TensorSpec("a", "U8", (3,)),
        TensorSpec("b", "F32", (5,)),
        TensorSpec("c", "BF16", (1,)),
    )
    header = Header(b"k" * 16, ROOT, "snapshot", 0, b"", "{}", specs)
    record = Record(header, tuple(content(header.key, spec) for spec in specs))
    path = write(tmp_path / "f", record)
    fd = open_file(str(path))
    head = read_head(fd)
    os.close(fd)
    assert head.payload % 64 == 0
    assert {part.spec.name: part.begin for part in head.parts} == {"a": 22, "b": 0, "c": 20}
    assert same(read(path), record)


def test_every_flipped_bit_is_found(tmp_path):
    record = block(ROOT, TOKENS, 0)
    path = tmp_path / "f"
    good = write(path, record).read_bytes()
    for at in range(len(good)):
        flipped = bytearray(good)
        flipped[at] ^= 1 << (at % 8)
        path.write_bytes(flipped)
        with pytest.raises(BadFile):
            read(path)
    path.write_bytes(good)
    assert same(read(path), record)


def test_every_truncation_and_extension_is_found(tmp_path):
    path = tmp_path / "f"
    good = write(path, block(ROOT, TOKENS, 0)).read_bytes()
    for size in range(len(good)):
        path.write_bytes(good[:size])
        with pytest.raises(BadFile):
            read(path)
    path.write_bytes(good + b"\0")
    with pytest.raises(BadFile, match="bytes, found"):
        read(path)


def test_swapped_tensors_are_found(tmp_path):
    """The control: an XOR of the tensors' hashes, as elsewhere, doesn't see the swap."""
    path = tmp_path / "f"
    record = block(ROOT, TOKENS, 0)
    raw = bytearray(write(path, record).read_bytes())
    size = record.header.tensors[0].nbytes
    keys, values = raw[-2 * size : -size], raw[-size:]
    assert keys != values
    xor = xxhash.xxh64_intdigest(keys) ^ xxhash.xxh64_intdigest(values)
    assert xor == xxhash.xxh64_intdigest(values) ^ xxhash.xxh64_intdigest(keys)
    raw[-2 * size :] = values + keys
    path.write_bytes(raw)
    with pytest.raises(BadFile, match="the payload's checksum is wrong"):
        read(path)


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**40, 2**63, 2**64 - 1])
def test_sizes_are_checked_before_memory_is_taken(tmp_path, length):
    path = tmp_path / "f"
    raw = write(path, block(ROOT, TOKENS, 0)).read_bytes()
    path.write_bytes(length.to_bytes(8, "little") + raw[8:])
    tracemalloc.start()
    try:
        with pytest.raises(BadFile):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def forge(path, change) -> None:
    """Change the header's JSON and make its own checksum right again."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    body = json.dumps(header, separators=(",", ":")).encode()[len(file_module._LEAD) + 16 :]
    text = file_module._LEAD + xxhash.xxh3_64(body).hexdigest().encode() + body
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def set_tensors(header, change) -> None:
    tensors = json.loads(header["__metadata__"]["tensors"])
    change(tensors)
    header["__metadata__"]["tensors"] = json.dumps(tensors)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["__metadata__"].update(version="2"),
        lambda h: h["__metadata__"].update(format="other"),
        lambda h: h["__metadata__"].update(kind="page"),
        lambda h: h["__metadata__"].update(key="00"),
        lambda h: h["__metadata__"].update(key="no hex"),
        lambda h: h["__metadata__"].update(start="x"),
        lambda h: h["__metadata__"].update(tokens="AAAA"),
        lambda h: h["__metadata__"].update(tokens="%%"),
        lambda h: h["__metadata__"].update(tensors="[]"),
        lambda h: h["__metadata__"].update(tensors="[" * 100_000),
        lambda h: h["__metadata__"].update(tensors=None),
        lambda h: h["__metadata__"].pop("layout"),
        lambda h: h.update(extra={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        lambda h: h.pop("k0"),
        lambda h: h["k0"].update(data_offsets=[8, 128]),
        lambda h: h["v0"].update(data_offsets=h["k0"]["data_offsets"]),
        lambda h: h["v0"].update(data_offsets=[120, 2**60]),
        lambda h: h["v0"].update(data_offsets=[240, 120]),
        lambda h: h["v0"].update(data_offsets="12"),
        lambda h: set_tensors(h, lambda t: t[0].update(shape=[2**40, 2**40])),
        lambda h: set_tensors(h, lambda t: t[0].update(shape=[-4, -30])),
        lambda h: set_tensors(h, lambda t: t[0].update(shape=["a"])),
        lambda h: set_tensors(h, lambda t: t[0].update(dtype="F7")),
        lambda h: set_tensors(h, lambda t: t[0].update(codec="none such")),
        lambda h: set_tensors(h, lambda t: t.append(t[0])),
    ],
)
def test_a_forged_header_is_refused(tmp_path, change):
    path = write(tmp_path / "f", block(ROOT, TOKENS, 0))
    forge(path, change)
    with pytest.raises(BadFile):
        read(path)


def test_forging_itself_is_sound(tmp_path):
    """The control of the test above: a forged header that says the same is accepted."""
    record = block(ROOT, TOKENS, 0)
    path = write(tmp_path / "f", record)
    forge(path, lambda header: None)
    assert same(read(path), record)


def test_only_regular_files_are_opened(tmp_path):
    target = write(tmp_path / "f", block(ROOT, TOKENS, 0))
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(BadFile, match="expected a regular file"):
            open_file(str(tmp_path / name))
    with pytest.raises(OSError, match="symbolic links"):
        open_file(str(tmp_path / "link"))


@given(st.data())
def test_bytes_are_scattered_to_where_they_belong(tmp_path_factory, data):
    """Any split of the tensors into targets and skips, in batches of any size."""
    record = snapshot(ROOT, TOKENS, 6, end=True)
    path = write(tmp_path_factory.getbasetemp() / "scattered", record)
    targets, wanted = {}, []
    for spec in record.header.tensors:
        if data.draw(st.integers(0, 4)) == 0:
            continue
        cuts = data.draw(st.lists(st.integers(0, spec.nbytes), max_size=6))
        ends = sorted({0, spec.nbytes, *cuts})
        whole = content(record.header.key, spec)
        segments = []
        for start, end in pairwise(ends):
            if data.draw(st.booleans()):
                segments.append(end - start)
            else:
                into = bytearray(end - start)
                segments.append(memoryview(into))
                wanted.append((into, whole[start:end]))
        targets[spec.name] = segments
    bytes_, buffers = file_module._BATCH_BYTES, file_module._BATCH_BUFFERS
    fd = open_file(str(path))
    try:
        file_module._BATCH_BYTES = data.draw(st.integers(1, 400))
        file_module._BATCH_BUFFERS = data.draw(st.integers(1, 8))
        read_into(fd, read_head(fd), targets, RawCodec())
    finally:
        file_module._BATCH_BYTES, file_module._BATCH_BUFFERS = bytes_, buffers
        os.close(fd)
    assert all(into == expected for into, expected in wanted)


def test_targets_may_be_arrays_of_any_shape(tmp_path):
    record = block(ROOT, TOKENS, 0)
    path = write(tmp_path / "f", record)
    into = np.zeros((3, BLOCK, 5), np.uint16)
    fd = open_file(str(path))
    read_into(fd, read_head(fd), {"k0": [memoryview(into[i]) for i in range(3)]}, RawCodec())
    os.close(fd)
    assert into.tobytes() == content(record.header.key, record.header.tensors[0])


def test_targets_of_a_wrong_size_are_refused(tmp_path):
    fd = open_file(str(write(tmp_path / "f", block(ROOT, TOKENS, 0))))
    with pytest.raises(ValueError, match="k0: expected targets of 120 bytes, found 119"):
        read_into(fd, read_head(fd), {"k0": [memoryview(bytearray(119))]}, RawCodec())
    os.close(fd)


def test_a_lossy_record_is_only_read_where_that_is_allowed(tmp_path):
    record = block(ROOT, TOKENS, 0)
    path = write(tmp_path / "f", record, Zlib("rounded"))
    assert same(read(path, Zlib(allows_lossy=True)), record)
    with pytest.raises(Unwanted, match="rounded"):
        read(path, Zlib())


@dataclass
class Broken(Zlib):
    answer: object = None

    def decode(self, spec, coded, header):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", [b"", bytes(119), ValueError("damaged"), MemoryError(), None])
def test_what_a_codec_gets_wrong_is_a_bad_file(tmp_path, answer):
    path = write(tmp_path / "f", block(ROOT, TOKENS, 0), Zlib())
    codec = Broken(answer=answer)
    codec.allows_lossy = False
    with pytest.raises(BadFile, match="k0"):
        read(path, codec)


def test_records_of_the_wrong_size_are_refused_at_once():
    spec = TensorSpec("k0", "F32", (2,))
    header = Header(b"k" * 16, ROOT, "block", 0, b"", "{}", (spec,))
    with pytest.raises(ValueError, match="k0: expected 8 bytes, found 7"):
        Record(header, (bytes(7),))
    with pytest.raises(ValueError, match="expected 1 buffers, found 0"):
        Record(header, ())
    with pytest.raises(ValueError, match="the same name"):
        twice = Header(b"k" * 16, ROOT, "block", 0, b"", "{}", (spec, spec))
        record = Record(twice, (bytes(8), bytes(8)))
        compose(record, RawCodec().encode(record))
