"""Tells a server that starts from a script that imports one.

Importing a host, or even its server module, changes nothing but one attribute, the host's trigger.
A server uses it when it starts; a mere import does not:

* mlx_lm: code of ``mlx_lm.server`` builds its ``LRUPromptCache``, just before its worker thread.
  Under ``python -m mlx_lm.server`` that code is ``__main__``, and is recognised by its spec.
* omlx: ``omlx.server.init_server`` is called.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Trigger:
    """The attribute whose call means that the host's server starts."""

    server: str
    """Name of the server module."""
    owner: str
    """Class that has the attribute; empty: the server module itself."""
    attribute: str


TRIGGERS = {
    "mlx_lm": Trigger("mlx_lm.server", "LRUPromptCache", "__init__"),
    "omlx": Trigger("omlx.server", "", "init_server"),
}


def arm(host: str, module: ModuleType) -> None:
    """Cover the trigger, found in the freshly loaded `module`, until a server calls it."""
    trigger = TRIGGERS[host]
    owner = getattr(module, trigger.owner, None) if trigger.owner else module
    original = vars(owner).get(trigger.attribute) if owner is not None else None
    if original is None:
        # A strange host without its trigger: the registry will say what else it lacks.
        _activate(host, vars(module) if module.__name__ == trigger.server else None)
        return
    if hasattr(original, "_thunder_trigger"):
        return

    def starts(*args: Any, **kwargs: Any) -> Any:
        server = _calling_server(trigger) if trigger.owner else vars(module)
        if server is not None:
            if vars(owner).get(trigger.attribute) is starts:
                setattr(owner, trigger.attribute, original)
            _activate(host, server)
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
    """A fault of ours never breaks the server's start."""
    try:
        from thunder_patches.patching import registry

        registry.activate(host, server)
    except Exception as error:
        print(f"thunder: off, because of {type(error).__name__}: {error}", file=sys.stderr)
