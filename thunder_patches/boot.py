"""Runs in every Python process of the environment: standard library only, and almost nothing.

``install`` adds a finder that waits for the hosts' server modules. When one has loaded, `trigger`
takes over; the registry, the settings and wrapt are imported when a host's server starts, not
before. This file avoids even ``typing`` and ``__future__``: they would cost more than it does.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def install() -> None:
    """Wait for the hosts, unless ``THUNDER=0``. Calling it again does nothing."""
    if os.environ.get("THUNDER", "").strip().lower() in ("0", "false", "off", "no"):
        return
    if any(type(finder) is HostFinder for finder in sys.meta_path):
        return
    # Module waited for: its host.
    waiting = {"mlx_lm.server": "mlx_lm", "omlx.server": "omlx"}
    if "mlx_lm.server" in sys.orig_argv:
        # `python -m` runs the server as __main__, so that its name is never imported. It is
        # reached through a module that it imports.
        waiting["mlx_lm.models.cache"] = "mlx_lm"
    sys.meta_path.insert(0, HostFinder(waiting))


class HostFinder:
    """Finds nothing itself: asks the other finders, and is told when the module has run."""

    def __init__(self, waiting: "dict[str, str]") -> None:
        self._waiting = waiting
        self._asking: set[str] = set()

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name not in self._waiting or name in self._asking:
            return None
        self._asking.add(name)
        try:
            for finder in list(sys.meta_path):
                find = None if finder is self else getattr(finder, "find_spec", None)
                spec = find(name, path, target) if find else None
                if spec is not None:
                    self._shadow_loader(spec)
                    return spec
            return None
        finally:
            self._asking.discard(name)

    def _shadow_loader(self, spec: "ModuleSpec") -> None:
        """Learn when the module has run. The loader stays the object that it was: its method is
        covered on the instance for one call."""
        loader: Any = spec.loader

        def exec_module(module: "ModuleType") -> None:
            if module.__name__ == spec.name and vars(loader).get("exec_module") is exec_module:
                if own is None:
                    del loader.exec_module
                else:
                    loader.exec_module = own
            host_exec(module)
            host = self._waiting.pop(module.__name__, None)
            if host is not None:
                _loaded(host, module)

        try:
            own = vars(loader).get("exec_module")
            host_exec = loader.exec_module
            loader.exec_module = exec_module
        except Exception:  # a loader without instance attributes: the host stays stock
            return


def _loaded(host: str, module: "ModuleType") -> None:
    """A fault of ours never breaks the host's import."""
    try:
        from thunder_patches.patching import trigger

        trigger.arm(host, module)
    except Exception as error:
        print(f"thunder: off, because of {type(error).__name__}: {error}", file=sys.stderr)
