"""Headers of safetensors files: read as the public library writes them, refused when malformed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from thunder_patches.moe.checkpoint import CheckpointError, header, tensors


def write(folder: Path, name: str, arrays: dict[str, np.ndarray]) -> Path:
    file = folder / name
    save_file(arrays, str(file), metadata={"format": "mlx"})
    return file


def test_offsets_are_those_of_the_bytes(tmp_path: Path) -> None:
    arrays = {
        "a.weight": np.arange(24, dtype=np.uint32).reshape(2, 3, 4),
        "a.scales": np.arange(6, dtype=np.float16).reshape(2, 3),
        "b": np.array(3.5, np.float32),
    }
    file = write(tmp_path, "model.safetensors", arrays)
    data = file.read_bytes()
    found = tensors(tmp_path)
    assert found.keys() == arrays.keys()
    for name, array in load_file(str(file)).items():
        tensor = found[name]
        assert tensor.shape == array.shape
        assert data[tensor.offset : tensor.offset + tensor.nbytes] == array.tobytes()


def test_shards_and_other_files(tmp_path: Path) -> None:
    write(tmp_path, "model-00001-of-00002.safetensors", {"a": np.zeros(2, np.uint8)})
    write(tmp_path, "model-00002-of-00002.safetensors", {"b": np.zeros(2, np.uint8)})
    write(tmp_path, "adapters.safetensors", {"c": np.zeros(2, np.uint8)})
    assert tensors(tmp_path).keys() == {"a", "b"}
    write(tmp_path, "model-again.safetensors", {"b": np.zeros(2, np.uint8)})
    with pytest.raises(CheckpointError, match="b is both in"):
        tensors(tmp_path)


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found none"):
        tensors(tmp_path)


def raw(entries: Any, data: int = 64, length: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


def entry(start: int, end: int, shape: Any = (8,), dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


MALFORMED = {
    "empty": (b"", "expected a safetensors header"),
    "seven bytes": (b"1234567", "expected a safetensors header"),
    "length beyond the file": (raw({}, 8, 1 << 30), "expected a safetensors header"),
    "no JSON": ((16).to_bytes(8, "little") + b"\xff" * 64, "can't be read"),
    "a list": (raw([]), "JSON object"),
    "no dtype": (raw({"a": {"shape": [8], "data_offsets": [0, 8]}}), "expected dtype"),
    "an entry that is text": (raw({"a": "b"}), "expected dtype"),
    "negative": (raw({"a": entry(-8, 0)}), "expected dtype"),
    "three offsets": (raw({"a": entry(0, 8) | {"data_offsets": [0, 8, 9]}}), "expected dtype"),
    "unknown dtype": (raw({"a": entry(0, 8, dtype="X9")}), "unknown dtype X9"),
    "other size": (raw({"a": entry(0, 16)}), "should have 8 bytes, has 16"),
    "outside": (raw({"a": entry(60, 68)}), "ends at byte"),
    "overlap": (raw({"a": entry(0, 8), "b": entry(7, 15)}), "a and b overlap"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(tmp_path: Path, case: str) -> None:
    data, said = MALFORMED[case]
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=said) as refused:
        header(file)
    assert str(file) in str(refused.value)


def test_well_formed_control(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(raw({"__metadata__": {}, "b": entry(8, 16), "a": entry(0, 8)}))
    assert [tensor.name for tensor in header(file)] == ["a", "b"]


def test_truncated(tmp_path: Path) -> None:
    file = write(tmp_path, "model.safetensors", {"a": np.zeros(100, np.uint8)})
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is it truncated"):
        header(file)
