"""Finds a host and says which build it is, without importing it."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from thunder_patches.patching import compat


@dataclass(frozen=True)
class Host:
    """An installed host. Its distribution, not its package, tells it from its forks."""

    name: str
    """The top-level package: mlx_lm, omlx."""
    distribution: str
    version: str
    root: Path
    """The folder that holds the package's folder."""
    modules: dict[str, ModuleType] = field(default_factory=dict, compare=False)
    """Modules that are loaded under another name: a server that runs as ``__main__``."""

    def file(self, module: str) -> Path | None:
        """The source file of one of its modules (or of a package that it patches itself)."""
        top = module.partition(".")[0]
        root = self.root if top == self.name else _root(top)
        if root is None:
            return None
        path = root.joinpath(*module.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
        return None

    def module(self, name: str) -> ModuleType:
        """The live module; imports it if need be."""
        return self.modules.get(name) or importlib.import_module(name)


def find(name: str) -> Host | None:
    """The host as this interpreter would import it (or has imported it); None: not installed."""
    root = _root(name)
    if root is None:
        return None
    known = compat.hosts()[name]["distributions"]
    for place in ([str(root)], sys.path):
        for distribution in known:
            for found in importlib.metadata.distributions(name=distribution, path=place):
                return Host(name, distribution, found.version, root)
    for distribution in importlib.metadata.packages_distributions().get(name, ()):
        return Host(name, distribution, importlib.metadata.version(distribution), root)
    return Host(name, "unknown distribution", "unknown", root)


def _root(package: str) -> Path | None:
    loaded = getattr(sys.modules.get(package), "__file__", None)
    if loaded is None:
        spec = PathFinder.find_spec(package)
        loaded = spec.origin if spec else None
    return Path(loaded).parent.parent if loaded else None
