"""One host attribute, and our layers around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any

import wrapt

Wrapper = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]

_MISSING = object()


class Layer:
    """One wrapper on one target. An inactive layer that another plugin still holds on to passes
    calls straight through."""

    def __init__(self, wrapper: Wrapper) -> None:
        self.wrapper = wrapper
        self.active = True


class Target:
    """The attribute `name` of `parent` (a class or a module). Several features may wrap it; any of
    them may leave in any order; without layers the attribute is the host's own object again."""

    def __init__(self, parent: Any, name: str) -> None:
        self.parent = parent
        self.name = name
        self.original = vars(parent).get(name, _MISSING)
        self._layers: list[Layer] = []
        self._ours = self.original

    @property
    def absent(self) -> bool:
        """Whether the host itself has no such attribute, inherited ones included."""
        return self.original is _MISSING and not hasattr(self.parent, self.name)

    def add(self, wrapper: Wrapper) -> Layer:
        """Wrap the attribute, or create it where it is absent."""
        layer = Layer(wrapper)
        self._layers.append(layer)
        self.settle()
        return layer

    def remove(self, layer: Layer) -> None:
        """Take the layer off; where another plugin is on top, leave it there without effect."""
        layer.active = False
        self._layers.remove(layer)
        self.settle()

    def settle(self) -> None:
        """Make the attribute what the layers say, if it is ours to set."""
        if self._current() is not self._ours:
            return
        chain = self.original
        for layer in self._layers:
            chain = _link(chain, layer)
        if chain is _MISSING:
            if self.name in vars(self.parent):
                delattr(self.parent, self.name)
        elif chain is not self._ours:
            setattr(self.parent, self.name, chain)
        self._ours = chain

    def displaced_by(self) -> tuple[str, bool] | None:
        """(the module whose code is on top, whether ours still runs inside it), or None."""
        current = self._current()
        if current is self._ours:
            return None
        module = getattr(current, "__module__", None) or "other code"
        return module, any(self._is_ours(inner) for inner in _inside(current))

    def _is_ours(self, inner: Any) -> bool:
        # A plugin that took the attribute from the class holds our wrapper's bound form.
        return inner is self._ours or getattr(inner, "_self_parent", None) is self._ours

    def _current(self) -> Any:
        return vars(self.parent).get(self.name, _MISSING)


def _inside(outer: Any) -> Iterator[Any]:
    """What a function may call: what it says that it wraps, and the functions that its closure holds."""
    waiting, seen = [outer], 0
    while waiting and seen < 64:
        function = waiting.pop(0)
        seen += 1
        held = [getattr(function, "__wrapped__", None)]
        if isinstance(function, FunctionType):
            held += [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
        inner = [value for value in held if callable(value) and not isinstance(value, type)]
        yield from inner
        waiting += inner


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not assigned yet
        return False


def _link(inner: Any, layer: Layer) -> Any:
    if inner is not _MISSING:
        return wrapt.FunctionWrapper(inner, layer.wrapper, enabled=lambda: layer.active)

    def added(self: Any, *args: Any, **kwargs: Any) -> Any:
        return layer.wrapper(None, self, args, kwargs)

    return added
