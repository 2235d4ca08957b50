"""``mlx_lm.utils.load_model`` and ``load_adapters``: fuse the experts' gate and up projections.

`load_model` reads a checkpoint lazily and evaluates it at the end. Fusing between the two keeps
peak memory at that of the finished model. oMLX loads text models through the same functions.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from ...config import settings
from ...moe import fusion
from ...patching import report
from ...patching.guard import is_on, shield
from ...patching.patch import State
from ..arguments import named, replaced

log = logging.getLogger("thunder_patches")

HOST_SWITCH = "OMLX_QWEN35_MOE_GATE_UP"
"""oMLX's own switch for its own fusion; 0 turns ours off as well."""


def fuse_loaded(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``load_model(model_path, lazy=False, ...) -> (model, config)``."""
    if not is_on("moe_fusion") or _asked_lazily(wrapped, args, kwargs):
        # Lazily: to be sharded or converted. Experts that are read now might not be needed.
        return wrapped(*args, **kwargs)
    args, kwargs = replaced(wrapped, args, kwargs, lazy=True)
    result = wrapped(*args, **kwargs)
    model = result[0]
    with shield("moe_fusion", "load"):
        _fuse(model)
    _evaluate(model)
    return result


def release_adapted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``load_adapters(model, adapter_path) -> model``: layers whose experts got an adapter
    go back to the host's form."""
    model = wrapped(*args, **kwargs)
    with shield("moe_fusion", "adapters"):
        if fusion.undo_adapted(model):
            _say(fusion.report(model))
    return model


def _fuse(model: Any) -> None:
    if os.environ.get(HOST_SWITCH) == "0":
        report.note("moe_fusion", State.OFF, f"{HOST_SWITCH}=0")
        return
    _say(fusion.fuse(model, any_family=settings().allow_untested))


def _say(found: fusion.Report) -> None:
    """Once a load in the log; in the status, where nothing was fused, the reason."""
    if not found.fused and not found.left_alone:
        report.note("moe_fusion", State.NOT_ELIGIBLE, str(found))
        return
    log.info("thunder: %s", found)
    report.note("moe_fusion", None if found.fused else State.NOT_ELIGIBLE, str(found))


def _asked_lazily(wrapped: Any, args: Any, kwargs: Any) -> bool:
    try:
        return bool(named(wrapped, args, kwargs).get("lazy", False))
    except TypeError:
        return True


def _evaluate(model: Any) -> None:
    """What `load_model` does at its end unless it is asked to be lazy."""
    import mlx.core as mx

    mx.eval(model.parameters())
