"""A host call's arguments by name, however the host passed them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

Arguments = dict[str, Any]


@lru_cache(maxsize=64)
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def named(wrapped: Callable[..., Any], args: Any, kwargs: Any) -> Arguments:
    """The arguments by parameter name, without defaults.

    Raises:
        TypeError: when they do not fit; the host's own call will say so.
    """
    function = getattr(wrapped, "__func__", wrapped)
    bound = (getattr(wrapped, "__self__", None), *args) if function is not wrapped else args
    return dict(_signature(function).bind(*bound, **kwargs).arguments)


def replaced(
    wrapped: Callable[..., Any], args: Any, kwargs: Any, **new: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with some arguments replaced, each left positional or keyword as it came."""
    names = list(_signature(getattr(wrapped, "__func__", wrapped)).parameters)
    if hasattr(wrapped, "__self__"):
        names = names[1:]
    args, kwargs = list(args), dict(kwargs)
    for name, value in new.items():
        at = names.index(name)
        if at < len(args):
            args[at] = value
        else:
            kwargs[name] = value
    return tuple(args), kwargs
