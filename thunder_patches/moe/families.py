"""The model families whose MoE layers may be fused: compat/moe_families.toml.

A family is the name of the model's module in mlx_lm/models. The file is written by
``python -m tests.hosts.test_moe_families``, which fuses a small model of each family and compares
every logit with the unfused one.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass

import mlx.nn as nn

from thunder_patches.patching import compat


@dataclass(frozen=True)
class Family:
    """Whether a family is proven, or why it is left alone."""

    fuse: bool
    reason: str = ""


@functools.cache
def families() -> dict[str, Family]:
    """The file's entries by name of the family."""
    path = compat.folder() / "moe_families.toml"
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: Family(entry["fuse"], entry.get("reason", "")) for name, entry in entries.items()}


def family_of(model: nn.Module) -> str:
    """``qwen3_moe`` for a model of the class ``mlx_lm.models.qwen3_moe.Model``."""
    return type(model).__module__.rpartition(".")[2]


def why_not_family(model: nn.Module) -> str | None:
    """The reason why layers of this model's family aren't fused, or None."""
    name = family_of(model)
    family = families().get(name)
    if family is None:
        return f"the family {name} isn't proven (THUNDER_ALLOW_UNTESTED=1 tries it)"
    return None if family.fuse else f"{name}: {family.reason}"
