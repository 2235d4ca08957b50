"""What a record's layout says about a tensor: row tensor or state, keys or values, which layers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

from .base import CodecError

FLOAT_ROWS = {"BF16", "F16", "F32"}


@dataclass(frozen=True, slots=True)
class Rows:
    """One row tensor ``[heads, tokens, dim]``: all layers of one role, dtype and dim together.

    Args:
        role: "k" or "v" for plain attention keys and values, anything else for what must stay exact
            (the parts of a quantised cache).
        layers: (first head, heads) of each layer's part, in layer order; together all heads.
    """

    name: str
    role: str
    dtype: str
    heads: int
    dim: int
    layers: tuple[tuple[int, int], ...]

    @property
    def attention(self) -> bool:
        """Whether these are floating-point keys or values, which a lossy codec may touch."""
        return self.role in ("k", "v") and self.dtype in FLOAT_ROWS


@lru_cache(maxsize=64)
def rows_of(layout: str) -> dict[str, Rows]:
    """The row tensors of a record by name; tensors that aren't in it are state or logits.

    Raises:
        CodecError: when the text is no layout.
    """
    try:
        value = json.loads(layout)
        if "layout" in value:  # a snapshot's, with the meta of its state beside it
            value = json.loads(value["layout"])
        parts: dict[str, list[tuple[int, int]]] = {name: [] for name in value["rows"]}
        for layer in value["layers"]:
            for name, first, heads in layer["rows"]:
                parts[name].append((int(first), int(heads)))
        return {
            name: Rows(
                name, name.rstrip("0123456789"), dtype, int(heads), int(dim), tuple(parts[name])
            )
            for name, (dtype, heads, dim) in value["rows"].items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CodecError(f"expected a layout as JSON, found {layout[:80]!r}") from error
