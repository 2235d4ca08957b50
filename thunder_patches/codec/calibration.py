"""What KVTC knows of one model: bases, weights, rotary embeddings, step sizes, measured quality.

One safetensors file for each calibration, beside the cache. It derives from the user's text, so it is
readable by its owner alone. Blocks, handed contexts and exported files name the calibration that they were
coded with by the first 16 hex digits of its checksum. No file is ever deleted here: a server that runs may
still be coding with it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from .base import CodecError
from .rotary import Rotary

VERSION = 1
MOST_HEADER = 8 << 20
SINKS = 4  # first tokens of a prompt, kept exact: their keys are outliers that all others attend to


@dataclass(frozen=True)
class Basis:
    """Centred, weighted PCA of the rows ``[first, first + heads)`` of a row tensor, over all of them.

    A token's features x (heads * dim of them, head by head, keys with RoPE undone) are
    weighted head by head by how much the model minds an error in them, z = (x - mean) @ weight, so
    that all of ``y = z @ directions`` deserves the same step; ``y @ decode + mean`` is x again.

    Args:
        mean: ``[heads, dim]``.
        weight: ``[heads, dim, dim]``, z = x @ weight head by head; `inverse` undoes it.
        directions: ``[heads * dim, rank]``, orthonormal, most variance first.
        variance: ``[rank]`` of y in the calibration texts.
    """

    first: int
    heads: int
    mean: np.ndarray
    weight: np.ndarray
    inverse: np.ndarray
    directions: np.ndarray
    variance: np.ndarray

    @property
    def rank(self) -> int:
        return len(self.variance)

    @property
    def size(self) -> float:
        """Root of the mean square of a token's y."""
        return float(np.sqrt(self.variance.sum()))

    @cached_property
    def axes(self) -> np.ndarray:
        """The directions as float32."""
        return self.directions.astype(np.float32)

    @cached_property
    def decode(self) -> np.ndarray:
        """float32 ``[rank, heads * dim]``."""
        turned = self.inverse.transpose(0, 2, 1)
        return np.ascontiguousarray(_blockwise(turned, self.axes).T)


@dataclass(frozen=True)
class Calibration:
    """A model's calibration.

    Args:
        model: identity of the model, as in the cache's keys.
        rows: tensor name to (heads, dim), which a record must have.
        bases: tensor name to its bases, in order of their rows.
        rotary: tensor name to one (first head, heads, `Rotary`) for each run of layers that has one.
        steps: quality to step size.
        limits: quality to tensor name to the largest weighted squared error per token allowed.
        measured: what came out on held-out text, for doctor and status.
    """

    model: str
    rows: Mapping[str, tuple[int, int]]
    bases: Mapping[str, tuple[Basis, ...]]
    rotary: Mapping[str, tuple[tuple[int, int, Rotary], ...]]
    steps: Mapping[str, float]
    limits: Mapping[str, Mapping[str, float]]
    measured: Mapping[str, Any] = field(default_factory=dict)
    sinks: int = SINKS
    id: str = ""

    def turn(self, name: str, values: np.ndarray, start: int, inverse: bool = False) -> np.ndarray:
        """Redo, or undo, the rotation of all rows ``[heads, tokens, dim]`` of a tensor."""
        for first, heads, rotary in self.rotary.get(name, ()):
            part = slice(first, first + heads)
            values[part] = rotary.turn(values[part], start, inverse)
        return values

    def prepare(self) -> None:
        """Have ready what decoding needs, so that the first restore doesn't wait for it."""
        for bases in self.bases.values():
            for basis in bases:
                _ = basis.decode

    def write(self, folder: Path) -> Calibration:
        """Write to ``<folder>/<id>.safetensors``, mode 0600, and return the calibration with its id."""
        arrays: dict[str, np.ndarray] = {}
        bases: dict[str, list[list[int]]] = {}
        for name, parts in self.bases.items():
            bases[name] = [[basis.first, basis.heads] for basis in parts]
            for i, basis in enumerate(parts):
                for attribute in ("mean", "weight", "inverse", "variance"):
                    array = np.ascontiguousarray(getattr(basis, attribute), np.float32)
                    arrays[f"{name}.{i}.{attribute}"] = array
                arrays[f"{name}.{i}.directions"] = np.ascontiguousarray(
                    basis.directions, np.float16
                )
        about = {
            "version": VERSION,
            "model": self.model,
            "rows": self.rows,
            "bases": bases,
            "rotary": {
                name: [[first, heads, asdict(rotary)] for first, heads, rotary in runs]
                for name, runs in self.rotary.items()
            },
            "steps": self.steps,
            "limits": self.limits,
            "measured": self.measured,
            "sinks": self.sinks,
        }
        text = json.dumps(about, sort_keys=True)
        checksum = _checksum(arrays, text)
        data = save(arrays, {"kvtc": text, "checksum": checksum})
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{checksum[:16]}.safetensors"
        temporary = folder / f".{checksum[:16]}.{os.getpid()}.tmp"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return Calibration(**{**vars(self), "id": checksum[:16]})

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Read a file that `write` made.

        Raises:
            CodecError: damaged, of another version, or no calibration at all.
            OSError: when it can't be read.
        """
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            data = file.read()
        try:
            arrays = load(data)
            head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
            text, checksum = head["kvtc"], head["checksum"]
            if _checksum(arrays, text) != checksum:
                raise CodecError(f"{path.name}: the checksum doesn't match")
            about = json.loads(text)
            if about["version"] != VERSION:
                raise CodecError(
                    f"{path.name}: expected version {VERSION}, found {about['version']}"
                )
            return cls._from(about, arrays, checksum[:16])
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CodecError(f"{path.name} is no calibration: {error}") from error

    @classmethod
    def _from(cls, about: dict[str, Any], arrays: dict[str, np.ndarray], id: str) -> Calibration:
        names = ("mean", "weight", "inverse", "directions", "variance")
        bases = {
            name: tuple(
                Basis(first, heads, *(arrays[f"{name}.{i}.{attribute}"] for attribute in names))
                for i, (first, heads) in enumerate(parts)
            )
            for name, parts in about["bases"].items()
        }
        rotary = {
            name: tuple(
                (first, heads, Rotary(tuple(r["rates"]), r["interleaved"], r["scale"]))
                for first, heads, r in runs
            )
            for name, runs in about["rotary"].items()
        }
        return cls(
            about["model"],
            {name: (heads, dim) for name, (heads, dim) in about["rows"].items()},
            bases,
            rotary,
            about["steps"],
            about["limits"],
            about["measured"],
            about["sinks"],
            id,
        )


class Shelf:
    """The calibrations in a folder, read once each when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, Calibration] = {}

    def get(self, id: str) -> Calibration:
        """The calibration with this id; raises CodecError when it is missing or damaged."""
        found = self._known.get(id)
        if found is None:
            if not (len(id) == 16 and set(id) <= set("0123456789abcdef")):
                raise CodecError(f"{id!r} is no calibration's id")
            try:
                found = Calibration.read(self.folder / f"{id}.safetensors")
            except OSError as error:
                raise CodecError(f"calibration {id} can't be read: {error}") from error
            if found.id != id:
                raise CodecError(f"expected calibration {id}, found {found.id} under its name")
            self._known[id] = found
        return found

    def of_model(self, model: str) -> Calibration | None:
        """The newest good calibration of a model, or None."""
        return next(self._good(lambda path: _model_in(path) == model), None)

    def all(self) -> list[Calibration]:
        """The good calibrations of all models, the newest first."""
        return list(self._good(lambda path: True))

    def add(self, calibration: Calibration) -> Calibration:
        """Write a new calibration and return it with its id."""
        calibration = calibration.write(self.folder)
        self._known[calibration.id] = calibration
        return calibration

    def _good(self, wanted: Callable[[Path], bool]) -> Iterator[Calibration]:
        for path in self._files():
            if wanted(path):
                with suppress(CodecError):
                    yield self.get(path.stem)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"), key=_mtime, reverse=True)


def _blockwise(weight: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """The block-diagonal matrix of ``[heads, dim, dim]`` times ``[heads * dim, rank]``, float32."""
    heads, dim, _ = weight.shape
    parts = directions.reshape(heads, dim, -1)
    return np.matmul(weight.astype(np.float32), parts).reshape(heads * dim, -1)


def _checksum(arrays: Mapping[str, np.ndarray], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _model_in(path: Path) -> str | None:
    """The model that a file says it is of; of the whole file only the header is read."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            head = json.loads(file.read(min(size, MOST_HEADER)))
        return str(json.loads(head["__metadata__"]["kvtc"])["model"])
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
