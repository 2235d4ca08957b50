"""What a model *is*, as far as its KV state goes: content, never a name.

The identity covers the configuration (quantisation and RoPE settings are in it), a sample of the bytes of
every tensor of the checkpoint and of the adapter, and the source of the model code that computes the
state. The same path, size and date with other weights gives another identity; the same files under
another path or host give the same.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

SAMPLES = 8
"""Places sampled in each tensor, first and last bytes among them."""
SAMPLE_BYTES = 256
_MAX_HEADER = 100_000_000
_IGNORED = {"_name_or_path", "transformers_version", "torch_dtype_original"}


class IdentityError(Exception):
    """The model's files cannot be read as a checkpoint; the message says which and why."""


def identify(model_dir: Path, adapter_dir: Path | None, code: Iterable[str]) -> str:
    """32 hex digits for the model in ``model_dir`` with the adapter in ``adapter_dir``, if any.

    Args:
        code: source texts of the modules that compute the state (`code_of`).

    Raises:
        IdentityError: no configuration or no safetensors file, or one that is not well-formed.
    """
    digest = hashlib.sha256()
    for folder, config in ((model_dir, "config.json"), (adapter_dir, "adapter_config.json")):
        if folder is None:
            _frame(digest, b"none")
            continue
        _frame(digest, _canonical(folder / config))
        files = sorted(folder.glob("*.safetensors"))
        if folder is adapter_dir:
            files = [f for f in files if f.name == "adapters.safetensors"]
        if not files:
            raise IdentityError(f"expected safetensors files in {folder}, found none")
        for file in files:
            _sample(digest, file)
    for text in code:
        _frame(digest, text.encode())
    return digest.hexdigest()[:32]


def code_of(model: object, package: str) -> list[str]:
    """Sources of the modules under ``package`` that the model's classes come from, sorted by name.

    Modules that those modules use are followed, so a change in a shared kernel counts too.
    """
    names = {type(m).__module__ for m in getattr(model, "modules", lambda: [model])()}
    todo = [n for n in names if n.startswith(package)]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen or name.endswith(".cache"):
            continue
        seen.add(name)
        for value in vars(sys.modules[name]).values():
            used = (
                value.__name__
                if isinstance(value, ModuleType)
                else getattr(value, "__module__", "")
            )
            if isinstance(used, str) and used.startswith(package) and used in sys.modules:
                todo.append(used)
    return [_source(name) for name in sorted(seen)]


def _source(name: str) -> str:
    try:
        return inspect.getsource(sys.modules[name])
    except (OSError, TypeError):
        return name


def _canonical(config: Path) -> bytes:
    try:
        value = json.loads(config.read_bytes())
    except (OSError, ValueError) as error:
        raise IdentityError(f"expected a JSON configuration at {config}: {error}") from error
    if isinstance(value, dict):
        value = {k: v for k, v in value.items() if k not in _IGNORED}
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _sample(digest: hashlib._Hash, file: Path) -> None:
    try:
        fd = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise IdentityError(f"cannot read {file}: {error}") from error
    try:
        size = os.fstat(fd).st_size
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if not 0 < length <= min(_MAX_HEADER, size - 8):
            raise IdentityError(f"{file}: expected a safetensors header, found length {length}")
        header = json.loads(os.pread(fd, length, 8))
        for name in sorted(header):
            if name == "__metadata__":
                continue
            spec = header[name]
            start, end = spec["data_offsets"]
            if not 0 <= start <= end <= size - 8 - length:
                raise IdentityError(f"{file}: {name} lies outside the file")
            _frame(digest, f"{name} {spec['dtype']} {spec['shape']}".encode())
            base = 8 + length
            for offset in _places(end - start):
                count = min(SAMPLE_BYTES, end - start - offset)
                digest.update(os.pread(fd, count, base + start + offset))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IdentityError(f"{file}: not a safetensors file: {error}") from error
    finally:
        os.close(fd)


def _places(nbytes: int) -> list[int]:
    if nbytes <= SAMPLES * SAMPLE_BYTES:
        return list(range(0, nbytes, SAMPLE_BYTES))
    step = (nbytes - SAMPLE_BYTES) // (SAMPLES - 1)
    return [i * step for i in range(SAMPLES - 1)] + [nbytes - SAMPLE_BYTES]


def _frame(digest: hashlib._Hash, value: bytes) -> None:
    digest.update(len(value).to_bytes(8, "little"))
    digest.update(value)
