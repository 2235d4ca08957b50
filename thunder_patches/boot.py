"""Waits for the hosts' modules: finds nothing itself, asks the other finders, and arms the host's
trigger once the module has run. Standard library only; what patches is imported when a server
starts.

The finder that comes here stands in thunder_patches.pth, or, where Python reads ``.start`` files in
its place, is put there by `start`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The modules waited for, each with its host; none with ``THUNDER=0``.
_waiting: dict[str, str] = {}
if os.environ.get("THUNDER", "").strip().lower() not in ("0", "false", "off", "no"):
    _waiting |= {"mlx_lm.server": "mlx_lm", "omlx.server": "omlx"}
    if "mlx_lm.server" in sys.orig_argv:
        # `python -m` runs the server as __main__, so that its name is never imported. It is
        # reached through a module that it imports.
        _waiting["mlx_lm.models.cache"] = "mlx_lm"

_asking: set[str] = set()


class HostFinder:
    """The finder, where there is no thunder_patches.pth to bring it."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return find(fullname, path, target)


def start() -> None:
    """Wait for the hosts. Calling it again does nothing."""
    if HostFinder.__name__ not in [getattr(finder, "__name__", "") for finder in sys.meta_path]:
        sys.meta_path.insert(0, HostFinder)


def find(name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """The spec that the other finders give, its loader told to call back."""
    if name not in _waiting or name in _asking:
        return None
    _asking.add(name)
    try:
        for finder in list(sys.meta_path):
            ask = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = ask(name, path, target) if ask else None
            if spec is not None:
                _shadow_loader(spec)
                return spec
        return None
    finally:
        _asking.discard(name)


def _shadow_loader(spec: ModuleSpec) -> None:
    """Learn when the module has run. The loader stays the object that it was: its method is
    covered on the instance for one call."""
    loader: Any = spec.loader

    def exec_module(module: ModuleType) -> None:
        if module.__name__ == spec.name and vars(loader).get("exec_module") is exec_module:
            if own is None:
                del loader.exec_module
            else:
                loader.exec_module = own
        host_exec(module)
        host = _waiting.pop(module.__name__, None)
        if host is not None:
            _arm(host, module)

    try:
        own = vars(loader).get("exec_module")
        host_exec = loader.exec_module
        loader.exec_module = exec_module
    except Exception:  # a loader without instance attributes: the host stays stock
        return


def _arm(host: str, module: ModuleType) -> None:
    """A fault of ours never breaks the host's import."""
    try:
        from thunder_patches.patching import trigger

        trigger.arm(host, module)
    except Exception as error:
        print(f"thunder: off, because of {type(error).__name__}: {error}", file=sys.stderr)
