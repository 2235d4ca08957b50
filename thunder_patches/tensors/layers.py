"""What one sequence's prompt cache holds, layer by layer, as rows or as state.

*Rows* are arrays with one entry per token, ``[heads, tokens, dim]``: they can be cut at any token and
go into blocks. *State* is everything else (recurrent state, a rotated window): it is only right at the
one position where it was taken and goes, verbatim, into a snapshot.

Cache classes are known by name (``mlx_lm.models.cache``), so this module needs no host. Attributes are
read directly: ``state`` changed its form between mlx-lm releases.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

CacheObject = Any
Meta = dict[str, Any]

DTYPES: dict[str, mx.Dtype] = {
    "BF16": mx.bfloat16,
    "F16": mx.float16,
    "F32": mx.float32,
    "U32": mx.uint32,
    "I32": mx.int32,
    "I64": mx.int64,
    "U8": mx.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SAME_SIZE = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
"""A type that numpy knows, by bytes of an element."""


class UnsupportedCache(Exception):
    """A cache holds something that cannot be stored exactly; the message says what."""


@dataclass(frozen=True)
class Leaf:
    """One cache object of one layer, for one sequence.

    Args:
        path: position in the prompt cache, ``"3"`` or ``"3.1"`` inside a ``CacheList``.
        cls: class name of the cache object.
        rows: (role, array ``[heads, capacity, dim]``) pairs; token ``t`` is entry ``first + t``.
        first: entry of token 0, larger than zero where the row is left-padded in a batch.
        state: arrays that belong to this position only.
        meta: plain values needed to rebuild the cache object beside ``state``.
    """

    path: str
    cls: str
    rows: tuple[tuple[str, mx.array], ...] = ()
    first: int = 0
    state: tuple[mx.array, ...] = ()
    meta: Meta = field(default_factory=dict)

    @property
    def cuttable(self) -> bool:
        return self.cls in ROW_CLASSES


def leaves(caches: Sequence[CacheObject], row: int | None = None) -> list[Leaf]:
    """The leaves of a prompt cache; ``row`` picks one sequence of a batched cache.

    Raises:
        UnsupportedCache: for a cache class that is not known here.
    """
    found = []
    for path, cache in flatten(caches):
        if row is not None and kind(cache) == "BatchKVCache":
            padding = int(cache.left_padding[row].item())
            rows = (("k", cache.keys[row]), ("v", cache.values[row]))
            found.append(Leaf(path, "KVCache", rows, padding))
            continue
        if row is not None and kind(cache) == "BatchRotatingKVCache" and _alone(cache):
            found.append(Leaf(path, "RotatingKVCache", (), 0, *_rotating_state(cache)))
            continue
        if row is not None and hasattr(cache, "extract"):
            cache = cache.extract(row)
        name = kind(cache)
        if name in ROW_CLASSES:
            found.append(Leaf(path, name, ROW_CLASSES[name](cache), 0, (), _row_meta(cache)))
        elif name in STATE_CLASSES:
            state, meta = STATE_CLASSES[name][0](cache)
            found.append(Leaf(path, name, (), 0, state, meta))
        else:
            raise UnsupportedCache(f"cache class {name} of layer {path} is not known")
    return found


def kind(cache: CacheObject) -> str:
    """The class name under which a cache object is known here."""
    name = type(cache).__name__
    return _ALIASES.get(name, name)


def describe(caches: Sequence[CacheObject]) -> str:
    """The kinds of a *fresh* prompt cache, run-length coded: part of every block's key.

    Example: ``"3*ArraysCache(2) KVCache 3*ArraysCache(2) KVCache"``.

    Raises:
        UnsupportedCache: for a cache class that is not known here.
    """
    names: list[tuple[str, int]] = []
    for path, cache in flatten(caches):
        name = kind(cache)
        if name not in ROW_CLASSES and name not in STATE_CLASSES:
            raise UnsupportedCache(f"cache class {name} of layer {path} is not known")
        fixed = [
            str(getattr(cache, a)) for a in ("max_size", "keep", "chunk_size") if hasattr(cache, a)
        ]
        if name == "ArraysCache":
            fixed.append(str(len(cache.cache)))
        name += f"({','.join(fixed)})" if fixed else ""
        if "." in path:
            name = f"{path.partition('.')[2]}:{name}"
        if names and names[-1][0] == name:
            names[-1] = (name, names[-1][1] + 1)
        else:
            names.append((name, 1))
    return " ".join(name if n == 1 else f"{n}*{name}" for name, n in names)


def has_ring(caches: Sequence[CacheObject]) -> bool:
    """Whether a layer keeps a window that decoding turns into a ring.

    Attention over a ring sums in another order than over the same window in temporal order, so the
    state after a decode step is not to the bit that after prefill of the same tokens.
    """
    return holds(caches, "RotatingKVCache")


def holds(caches: Sequence[CacheObject], name: str) -> bool:
    """Whether a layer's cache is of class ``name``."""
    return any(kind(cache) == name for _, cache in flatten(caches))


def is_cuttable(caches: Sequence[CacheObject]) -> bool:
    """Whether every layer holds rows only, so that any prefix can be taken from it."""
    return all(kind(cache) in ROW_CLASSES for _, cache in flatten(caches))


@dataclass(frozen=True)
class Layout:
    """How the rows of all layers lie in the row tensors of a block.

    Layers whose rows share role, dtype and dim are put together along the head axis: one tensor
    ``[total heads, tokens, dim]`` per group, so that a block is a handful of long tensors.

    Args:
        groups: tensor name to (dtype name, total heads, dim).
        parts: one (path, class, meta, [(tensor name, first head, heads), ...]) per leaf, in order.
    """

    groups: dict[str, tuple[str, int, int]]
    parts: tuple[tuple[str, str, Meta, tuple[tuple[str, int, int], ...]], ...]

    @classmethod
    def of(cls, found: Sequence[Leaf]) -> Layout:
        groups: dict[str, tuple[str, int, int]] = {}
        index: dict[tuple[str, str, int], str] = {}
        parts = []
        for leaf in found:
            placed = []
            for role, array in leaf.rows:
                heads, _, dim = array.shape
                if array.dtype not in DTYPE_NAMES:
                    raise UnsupportedCache(f"layer {leaf.path} holds {array.dtype}")
                kind = (role, DTYPE_NAMES[array.dtype], dim)
                name = index.setdefault(kind, f"{role}{sum(k[0] == role for k in index)}")
                dtype, total, _ = groups.get(name, (kind[1], 0, dim))
                placed.append((name, total, heads))
                groups[name] = (dtype, total + heads, dim)
            parts.append((leaf.path, leaf.cls, leaf.meta if leaf.cuttable else {}, tuple(placed)))
        return cls(groups, tuple(parts))

    def dumps(self) -> str:
        """Canonical JSON, kept in each record and compared on every read."""
        layers = [
            {"path": path, "class": name, "meta": meta, "rows": [list(p) for p in placed]}
            for path, name, meta, placed in self.parts
        ]
        value = {"rows": {n: list(g) for n, g in self.groups.items()}, "layers": layers}
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    @classmethod
    def loads(cls, text: str) -> Layout:
        """Inverse of `dumps`.

        Raises:
            ValueError: when the text is not a layout.
        """
        try:
            value = json.loads(text)
            groups = {n: (str(d), int(h), int(w)) for n, (d, h, w) in value["rows"].items()}
            parts = tuple(
                (
                    str(layer["path"]),
                    str(layer["class"]),
                    dict(layer["meta"]),
                    tuple((str(n), int(a), int(h)) for n, a, h in layer["rows"]),
                )
                for layer in value["layers"]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"expected a layout as JSON, found {text[:80]!r}") from error
        return cls(groups, parts)


def fill(
    fresh: Sequence[CacheObject],
    layout: Layout,
    rows: dict[tuple[str, int], mx.array],
    states: Mapping[str, tuple[Sequence[mx.array], Meta]],
    length: int,
) -> list[CacheObject]:
    """Put restored arrays into a fresh prompt cache and return it.

    Args:
        fresh: what the host's ``make_prompt_cache`` returned for this model.
        rows: (path, position among the leaf's rows) to array ``[1, heads, capacity, dim]``.
        states: path to the state's arrays and meta, for leaves that hold state.
        length: tokens that the restored rows stand for.

    Raises:
        UnsupportedCache: when the fresh cache does not have the layout's classes.
    """
    result = list(fresh)
    for (path, cache), (want_path, name, meta, placed) in zip(
        flatten(fresh), layout.parts, strict=True
    ):
        if path != want_path:
            raise UnsupportedCache(f"expected layer {want_path}, found {path}")
        if name == "QuantizedKVCache" and kind(cache) == "KVCache":
            cache = cache.to_quantized(group_size=meta["group_size"], bits=meta["bits"])
            _replace(result, path, cache)
        if kind(cache) != name:
            raise UnsupportedCache(f"layer {path}: expected {name}, found {kind(cache)}")
        if name in ROW_CLASSES:
            parts = [rows[path, i] for i in range(len(placed))]
            _set_rows(cache, name, parts, length)
        else:
            STATE_CLASSES[name][1](cache, *states[path])
    return result


# The known classes.

_ALIASES: dict[str, str] = {}


def alias(subclass: str, of: str) -> None:
    """Treat caches of class name ``subclass`` (made by a host adapter) as class ``of``."""
    _ALIASES[subclass] = of


def _kv_rows(cache: CacheObject) -> tuple[tuple[str, mx.array], ...]:
    return (("k", cache.keys[0]), ("v", cache.values[0]))


def _quantized_rows(cache: CacheObject) -> tuple[tuple[str, mx.array], ...]:
    return tuple(
        (role + part, array[0])
        for role, arrays in (("k", cache.keys), ("v", cache.values))
        for part, array in zip(("q", "s", "b"), arrays, strict=True)
    )


ROW_CLASSES: dict[str, Callable[[CacheObject], tuple[tuple[str, mx.array], ...]]] = {
    "KVCache": _kv_rows,
    "ConcatenateKVCache": _kv_rows,
    "QuantizedKVCache": _quantized_rows,
}


def _row_meta(cache: CacheObject) -> Meta:
    return {a: getattr(cache, a) for a in ("group_size", "bits") if hasattr(cache, a)}


def _set_rows(cache: CacheObject, name: str, parts: list[mx.array], length: int) -> None:
    if name == "QuantizedKVCache":
        cache.keys, cache.values = tuple(parts[:3]), tuple(parts[3:])
    elif name == "ConcatenateKVCache":
        cache.keys, cache.values = (p[..., :length, :] for p in parts)
    else:
        cache.keys, cache.values = parts
    cache.offset = length


def _arrays_state(cache: CacheObject) -> tuple[tuple[mx.array, ...], Meta]:
    present = [c is not None for c in cache.cache]
    return tuple(c for c in cache.cache if c is not None), {"present": present}


def _set_arrays(cache: CacheObject, arrays: Sequence[mx.array], meta: Meta) -> None:
    left = iter(arrays)
    cache.cache = [next(left) if present else None for present in meta["present"]]


def _rotating_state(cache: CacheObject) -> tuple[tuple[mx.array, ...], Meta]:
    """Keys and values of a rotating cache, batched or not, verbatim, less what the next update would drop.

    In temporal order only the first ``keep`` and the last ``max_size`` entries are ever read again;
    a ring that has wrapped is kept as it is, with its write position.
    """
    meta = {
        "offset": _integer(cache.offset),
        "keep": int(getattr(cache, "keep", 0)),
        "_idx": int(cache._idx),
        "max_size": int(cache.max_size),
    }
    if cache.keys is None:
        return (), meta
    keys, values = cache.keys, cache.values
    held, idx, size, keep = keys.shape[2], meta["_idx"], meta["max_size"], meta["keep"]
    if held > size and idx == held:
        keys, values = (
            mx.concatenate([a[..., :keep, :], a[..., held - size + keep :, :]], axis=2)
            for a in (keys, values)
        )
        meta["_idx"] = size
    elif meta["offset"] == idx < held:
        keys, values = keys[..., :idx, :], values[..., :idx, :]
    return (keys, values), meta


def _integer(value: Any) -> int:
    return int(value.item()) if isinstance(value, mx.array) else int(value)  # type: ignore[arg-type]


def _alone(cache: CacheObject) -> bool:
    """Whether a ``BatchRotatingKVCache`` holds one sequence and no padding: its ring is verbatim."""
    return cache.keys is None or (cache.keys.shape[0] == 1 and cache.left_padding.item() <= 0)


def _set_rotating(cache: CacheObject, arrays: Sequence[mx.array], meta: Meta) -> None:
    cache.keys, cache.values = arrays if arrays else (None, None)
    for name in ("offset", "_idx", "keep", "max_size"):
        setattr(cache, name, meta[name])


def _chunked_state(cache: CacheObject) -> tuple[tuple[mx.array, ...], Meta]:
    meta = {a: int(getattr(cache, a)) for a in ("offset", "start_position", "chunk_size")}
    if cache.keys is None:
        return (), meta
    valid = meta["offset"] - meta["start_position"]
    return (cache.keys[..., :valid, :], cache.values[..., :valid, :]), meta


def _set_chunked(cache: CacheObject, arrays: Sequence[mx.array], meta: Meta) -> None:
    cache.keys, cache.values = arrays if arrays else (None, None)
    for name in ("offset", "start_position", "chunk_size"):
        setattr(cache, name, meta[name])


STATE_CLASSES: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    "ArraysCache": (_arrays_state, _set_arrays),
    "RotatingKVCache": (_rotating_state, _set_rotating),
    "ChunkedKVCache": (_chunked_state, _set_chunked),
}


def flatten(caches: Sequence[CacheObject]) -> Iterator[tuple[str, CacheObject]]:
    for i, cache in enumerate(caches):
        if type(cache).__name__ == "CacheList":
            for path, inner in flatten(cache.caches):
                yield f"{i}.{path}", inner
        else:
            yield str(i), cache


def _replace(caches: list[CacheObject], path: str, cache: CacheObject) -> None:
    head, _, tail = path.partition(".")
    if not tail:
        caches[int(head)] = cache
        return
    outer = caches[int(head)]
    inner = list(outer.caches)
    _replace(inner, tail, cache)
    outer.caches = tuple(inner)
