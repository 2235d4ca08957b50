"""Runs in every Python process of the environment: standard library only, and almost nothing.

``install`` adds a finder that waits for the hosts' server modules; everything else (wrapt, the
registry, the settings) is imported when a host's server starts.

What counts as a host's server. Importing a host, or even its server module, changes nothing but one
attribute, the host's *trigger*; a server uses it when it starts, a script that only imports doesn't:

* mlx_lm: code of ``mlx_lm.server`` builds its ``LRUPromptCache``, just before its worker thread.
  Under ``python -m mlx_lm.server`` that code is ``__main__``, is never imported by name, and is
  reached through ``mlx_lm.models.cache``, which it imports. Only then, told by the command line,
  is that module waited for: a script that imports mlx_lm alone finds it as it is.
* omlx: ``omlx.server.init_server`` is called.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing and collections.abc would cost more than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

OFF = ("0", "false", "off", "no")


class Trigger:
    """The attribute whose call means that the host's server starts."""

    def __init__(self, host: str, server: str, owner: str | None, attribute: str) -> None:
        self.host = host
        self.server = server  # name of the server module
        self.owner = owner  # class that has the attribute; None: the server module itself
        self.attribute = attribute


MLX_LM = Trigger("mlx_lm", "mlx_lm.server", "LRUPromptCache", "__init__")
OMLX = Trigger("omlx", "omlx.server", None, "init_server")


def install() -> None:
    """Wait for the hosts, unless ``THUNDER=0``. Calling it again does nothing."""
    if os.environ.get("THUNDER", "").strip().lower() in OFF:
        return
    if any(isinstance(finder, HostFinder) for finder in sys.meta_path):
        return
    waiting = {MLX_LM.server: MLX_LM, OMLX.server: OMLX}
    if MLX_LM.server in sys.orig_argv:
        waiting["mlx_lm.models.cache"] = MLX_LM
    sys.meta_path.insert(0, HostFinder(waiting))


class HostFinder:
    """Finds nothing itself: asks the other finders, and arms the trigger once the module ran."""

    def __init__(self, waiting: dict[str, Trigger]) -> None:
        self._waiting = waiting
        self._asking: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._waiting or name in self._asking:
            return None
        self._asking.add(name)
        try:
            for finder in list(sys.meta_path):
                find = None if finder is self else getattr(finder, "find_spec", None)
                spec = find(name, path, target) if find else None
                if spec is not None:
                    _quietly(self._shadow_loader, spec)
                    return spec
            return None
        finally:
            self._asking.discard(name)

    def _shadow_loader(self, spec: ModuleSpec) -> None:
        """Learn when the module has run. The loader stays the object that it was: its method is
        covered on the instance for one call."""
        loader: Any = spec.loader
        own = vars(loader).get("exec_module")
        host_exec = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if module.__name__ == spec.name and vars(loader).get("exec_module") is exec_module:
                if own is None:
                    del loader.exec_module
                else:
                    loader.exec_module = own
            host_exec(module)
            trigger = self._waiting.pop(module.__name__, None)
            if trigger is not None:
                _quietly(_arm, trigger, module)

        loader.exec_module = exec_module


def _arm(trigger: Trigger, module: ModuleType) -> None:
    """Cover the trigger's attribute until a server calls it."""
    owner = getattr(module, trigger.owner, None) if trigger.owner else module
    original = vars(owner).get(trigger.attribute) if owner is not None else None
    if original is None:
        # A host that lost its trigger: have the registry say so.
        _activate(trigger.host, vars(module) if module.__name__ == trigger.server else None)
        return
    if hasattr(original, "_thunder_trigger"):
        return

    def starts(*args: Any, **kwargs: Any) -> Any:
        server = _calling_server(trigger) if trigger.owner else vars(module)
        if server is not None:
            if vars(owner).get(trigger.attribute) is starts:
                setattr(owner, trigger.attribute, original)
            _quietly(_activate, trigger.host, server)
        return original(*args, **kwargs)

    starts._thunder_trigger = trigger  # type: ignore[attr-defined]
    setattr(owner, trigger.attribute, starts)


def _calling_server(trigger: Trigger) -> dict[str, Any] | None:
    """Globals of the server module if its code, as ``__main__`` too, is among the callers."""
    frame = sys._getframe(2)
    for _ in range(16):
        spec = frame.f_globals.get("__spec__")
        if getattr(spec, "name", None) == trigger.server:
            return frame.f_globals
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _activate(host: str, server: dict[str, Any] | None) -> None:
    from thunder_patches.patching import registry

    registry.activate(host, server)


def _quietly(call: Callable[..., None], *args: Any) -> None:
    """A fault of ours never breaks the host's import or start."""
    try:
        call(*args)
    except Exception as error:
        print(f"thunder: off, because of {type(error).__name__}: {error}", file=sys.stderr)
