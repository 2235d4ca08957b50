"""A prompt cache comes back from coded blocks: multiplied out on the device, as numpy would."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from codec_samples import calibration_for, kv_like
from host_gpu import host_gpu
from mlx_lm.models.cache import KVCache

from tests.core.cache_support import counts, file_of, open_store
from thunder_patches.cache.keys import chain, root_key, snapshot_key, token_bytes
from thunder_patches.cache.match import Piece
from thunder_patches.cache.record import Header, Record, TensorSpec
from thunder_patches.cache.store import CacheStore, ReadJob
from thunder_patches.codec.calibration import Shelf
from thunder_patches.codec.kvtc import Kvtc
from thunder_patches.codec.policy import Policy
from thunder_patches.codec.rotary import Rotary
from thunder_patches.tensors import cuda, kvtc_batches, upload
from thunder_patches.tensors import cut as cutting
from thunder_patches.tensors import restore as module
from thunder_patches.tensors.cuda import Gpu
from thunder_patches.tensors.cut import cut
from thunder_patches.tensors.layers import Layout, leaves
from thunder_patches.tensors.restore import RestoreFailed, join_layout, restore

LAYERS, HEADS, DIM, BLOCK = 2, 2, 32, 64
ROTARY = Rotary(tuple(10000 ** (-np.arange(0, DIM, 2) / DIM)))
LENGTH = 20 * BLOCK + 10


@pytest.fixture(params=["host", "GPU"], autouse=True)
def device(request, monkeypatch) -> Gpu | None:
    """Where the rows go: the buffers themselves, or a (stand-in) GPU's memory."""
    made = None if request.param == "host" else host_gpu()
    monkeypatch.setattr(module, "gpu", lambda: made)
    monkeypatch.setattr(cutting, "gpu", lambda: made)
    if made is not None:
        monkeypatch.setattr(upload, "LANDING", 3 * 2 * LAYERS * HEADS * BLOCK * DIM * 2)
    return made


def live(length: int = LENGTH) -> list[KVCache]:
    """A prompt cache whose rows are like those that the calibration is of."""
    keys = ROTARY.turn(kv_like(LAYERS * HEADS, length, DIM, 0), 0)
    values = kv_like(LAYERS * HEADS, length, DIM, 1)
    caches = []
    for i in range(LAYERS):
        part = slice(i * HEADS, (i + 1) * HEADS)
        cache = KVCache()
        cache.update_and_fetch(
            *(mx.array(rows[part][None]).astype(mx.bfloat16) for rows in (keys, values))
        )
        caches.append(cache)
    return caches


def policy(folder: Path, mode: str = "kvtc", rotary: Rotary = ROTARY) -> Policy:
    shape = (LAYERS * HEADS, BLOCK, DIM)
    specs = [TensorSpec("k0", "BF16", shape), TensorSpec("v0", "BF16", shape)]
    shelf = Shelf(folder / "calibrations")
    known = shelf.add(replace(calibration_for(*specs, rotary=rotary), id=""))
    made = Policy(mode, shelf=shelf)  # type: ignore[arg-type]
    assert made.use_model(known.model) is not None
    return made


def stored(store: CacheStore, caches: list[KVCache]) -> tuple[list[Piece], list[Record]]:
    """The cache's blocks and tail in the store, and what reads them."""
    found = leaves(caches)
    layout = Layout.of(found)
    text = layout.dumps()
    tokens = np.arange(LENGTH)
    root = root_key("a model", text, "", BLOCK)
    keys = chain(root, tokens, BLOCK)
    spans = [(i * BLOCK, (i + 1) * BLOCK) for i in range(len(keys))] + [(20 * BLOCK, LENGTH)]
    pieces, records = [], []
    for i, (part, (start, end)) in enumerate(zip(cut(found, layout, spans), spans, strict=True)):
        ids = token_bytes(tokens[start:end])
        parent = keys[i - 1] if i else root
        last = i == len(keys)
        key = snapshot_key(parent, ids) if last else keys[i]
        kind = "snapshot" if last else "block"
        specs = tuple(TensorSpec(n, d, s) for n, (d, s, _) in part.tensors.items())
        written = join_layout(text, {}) if last else text
        header = Header(key, parent, kind, start, ids, written, specs)
        records.append(Record(header, tuple(data for _, _, data in part.tensors.values())))
        pieces.append(Piece(kind, key, parent, start, ids, end - start))
        store.put(records[-1], 1)
    assert store.flush(60)
    return pieces, records


def rows(caches: list[KVCache], length: int) -> np.ndarray:
    return np.stack(
        [
            np.array(array[0, :, :length].astype(mx.float32))
            for cache in caches
            for array in (cache.keys, cache.values)
        ]
    )


def through(codec: Policy, records: list[Record]) -> list[Record]:
    """The records as numpy decodes them."""
    return [codec.record(codec.encode(record)) for record in records]


def brought_back(
    store: CacheStore, pieces: list[Piece], length: int = LENGTH, capacity: int = LENGTH + 50
) -> np.ndarray:
    fresh = [KVCache() for _ in range(LAYERS)]
    found = restore(store, pieces, fresh, length=length, capacity=capacity)
    assert all(cache.offset == length for cache in found.caches)
    return rows(found.caches, length)


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_blocks_and_tail_are_as_numpy_decodes_them(tmp_path, monkeypatch, batch: int) -> None:
    monkeypatch.setattr(kvtc_batches, "BATCH", batch)
    codec = policy(tmp_path)
    coded = open_store(tmp_path / "v1", codec=codec)
    caches = live()
    pieces, records = stored(coded, caches)
    numpy_store = open_store(None, ram_budget=1 << 30)
    for record in through(codec, records):
        numpy_store.put(record, 1)
    wanted, found = (brought_back(store, pieces) for store in (numpy_store, coded))
    exact = rows(caches, LENGTH)
    assert (found[:, :, :4] == exact[:, :, :4]).all(), "the sinks are exact"
    assert np.abs(found - wanted).max() <= 0.01 * np.abs(wanted).max()
    assert (found[:, :, 20 * BLOCK :] == exact[:, :, 20 * BLOCK :]).all(), "so is the tail"
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 0.01 < error < 0.3, "coded, and still the same rows"
    coded.close()


@pytest.mark.parametrize("length", [10 * BLOCK + 7, 10 * BLOCK])
def test_a_piece_may_be_used_in_part(tmp_path, length: int) -> None:
    store = open_store(tmp_path / "v1", codec=policy(tmp_path))
    pieces, _ = stored(store, live())
    whole = brought_back(store, pieces)
    some = [piece for piece in pieces if piece.start < length]
    some[-1] = replace(some[-1], use=length - some[-1].start)
    found, wanted = brought_back(store, some, length), whole[:, :, :length]
    # A product of fewer blocks may round otherwise: by a step of bfloat16, here and there.
    assert np.abs(found - wanted).max() <= 2**-7 * np.abs(wanted).max()
    assert (found == wanted).mean() > 0.99
    other = np.roll(wanted, 1, axis=2)  # the control
    assert (found == other).mean() < 0.5
    store.close()


def test_exact_and_coded_pieces_mix(tmp_path) -> None:
    """Blocks that another setting, or a codec's fallback, has stored are exact beside coded ones."""
    codec, caches = policy(tmp_path), live()
    store = open_store(tmp_path / "v1")
    pieces, records = stored(store, caches)
    store.close()
    for record in records[::2]:
        file_of(tmp_path / "v1", record.header).unlink()
    store = open_store(tmp_path / "v1", codec=codec)
    for record in records[::2]:
        store.put(record, 2)
    assert store.flush(60)
    found, exact = brought_back(store, pieces), rows(caches, LENGTH)
    same = (found == exact).reshape(2 * LAYERS, HEADS, LENGTH, DIM).all(axis=(0, 1, 3))
    assert same[BLOCK : 2 * BLOCK].all() and same[19 * BLOCK : 20 * BLOCK].all()
    assert same[:BLOCK].sum() < BLOCK and same[2 * BLOCK : 3 * BLOCK].sum() < BLOCK
    store.close()


def test_a_wrong_calibration_is_noticed_by_the_control(tmp_path) -> None:
    """The control: with the rotation left out, the rows are others."""
    caches = live()
    right = open_store(tmp_path / "a", codec=policy(tmp_path / "x"))
    pieces, _ = stored(right, caches)
    found = brought_back(right, pieces)
    right.close()
    wrong = policy(tmp_path / "x", rotary=Rotary((0.5,) * (DIM // 2)))
    (codec,) = wrong._models.values()
    wrong._codecs["kvtc"] = Kvtc(lambda id: codec.calibration, codec.calibration)
    store = open_store(tmp_path / "a", codec=wrong)
    off = brought_back(store, pieces)
    keys, values = slice(0, None, 2), slice(1, None, 2)
    assert np.abs(off[values] - found[values]).max() < 1e-6
    assert np.abs(off[keys] - found[keys]).max() > 0.5
    store.close()


def test_damage_and_a_lost_calibration_are_misses(tmp_path) -> None:
    store = open_store(tmp_path / "v1", codec=policy(tmp_path))
    pieces, records = stored(store, live())
    path = file_of(tmp_path / "v1", records[3].header)
    data = bytearray(path.read_bytes())
    data[-9] ^= 16
    path.write_bytes(data)
    with pytest.raises(RestoreFailed):
        brought_back(store, pieces)
    assert counts(store)["corrupt"] == 1 and not path.exists()
    brought_back(store, pieces[:3], 3 * BLOCK)
    store.close()

    for file in (tmp_path / "calibrations").iterdir():
        file.unlink()
    store = open_store(
        tmp_path / "v1", codec=Policy("kvtc", shelf=Shelf(tmp_path / "calibrations"))
    )
    with pytest.raises(RestoreFailed):
        brought_back(store, pieces[:3], 3 * BLOCK)
    store.close()


def test_lossy_records_are_not_kept_decoded_in_memory(tmp_path) -> None:
    store = open_store(tmp_path / "v1", codec=policy(tmp_path), ram_budget=0)
    pieces, _ = stored(store, live())
    store.close()
    store = open_store(tmp_path / "v1", codec=policy(tmp_path), ram_budget=1 << 30)
    for _ in range(3):
        brought_back(store, pieces)
    store.close()
    assert store.stats()["ram"]["blocks"] <= 1, "the tail, which is exact"


@pytest.mark.parametrize("refused", ["pin", "to_gpu", "to_host"])
@pytest.mark.parametrize("tier", ["ram", "ssd"])
def test_what_the_driver_refuses_goes_through_the_host(tmp_path, device, refused, tier) -> None:
    if device is not None:
        device._copier.refuses.add(refused)
    caches = live()
    store = open_store(tmp_path / "v1", ram_budget=1 << 30 if tier == "ram" else 0)
    pieces, _ = stored(store, caches)
    assert (brought_back(store, pieces) == rows(caches, LENGTH)).all()
    store.close()


@pytest.mark.parametrize("pinned", [True, False])
def test_records_in_pinned_memory_need_no_reading(tmp_path, device, monkeypatch, pinned) -> None:
    if device is not None:
        monkeypatch.setattr(cuda.Slabs, "_want", cuda.Slabs._add)
        for _ in range(LENGTH // BLOCK + 2):  # one more is there each time
            stored(open_store(None, ram_budget=1 << 30), live())
    caches = live()
    store = open_store(None, ram_budget=1 << 30)
    pieces, records = stored(store, caches)
    if not pinned:
        store = open_store(None, ram_budget=1 << 30)
        for record in records:
            store.put(Record(record.header, tuple(bytes(data) for data in record.data)), 1)
    begun = []

    def begin(self: CacheStore, job: ReadJob, tick: int) -> Future:
        begun.append(job)
        return real(self, job, tick)

    real = CacheStore.begin
    monkeypatch.setattr(CacheStore, "begin", begin)
    assert (brought_back(store, pieces) == rows(caches, LENGTH)).all()
    assert len(begun) == (0 if device is None or pinned else len(pieces))
    assert device is None or device._copier.fetched


@pytest.mark.parametrize("tier", ["ram", "ssd"])
def test_exact_rows_are_the_same_to_the_bit_on_either_way(tmp_path, device, tier: str) -> None:
    caches = live()
    store = open_store(tmp_path / "v1", ram_budget=1 << 30 if tier == "ram" else 0)
    pieces, _ = stored(store, caches)
    found, exact = brought_back(store, pieces), rows(caches, LENGTH)
    assert (found == exact).all()
    assert device is None or device._copier.fetched >= exact.nbytes // 2
    part = [
        *pieces[:2],
        replace(pieces[2], use=7),
    ]  # a block of which only the first tokens are ours
    length = 2 * BLOCK + 7
    assert (brought_back(store, part, length) == exact[:, :, :length]).all()
    other = brought_back(store, [*pieces[1:2], *pieces[1:]])  # the control
    assert (other != exact).any()
    store.close()
