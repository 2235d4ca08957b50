"""What is known of each engine's model: one `Engine` for one of the host's schedulers."""

from __future__ import annotations

import logging
import sys
import weakref
from pathlib import Path
from typing import Any

from ...pilot.boundaries import Follower
from ...tensors.identity import IdentityError, code_of, identify
from ...tensors.layers import UnsupportedCache
from ..prefill import Prefill
from ..runtime import runtime
from ..session import Family, NotEligible, Session

log = logging.getLogger("thunder_patches")
_MODELS = "mlx_lm.models."

_engines: weakref.WeakKeyDictionary[Any, Engine] = weakref.WeakKeyDictionary()


class Engine:
    """A scheduler's model; ``session`` is None with a ``reason`` where it is not eligible."""

    def __init__(self, scheduler: Any) -> None:
        model, encode = scheduler.model, scheduler.tokenizer.encode
        self.family = type(model).__module__.rpartition(".")[2]
        self.session: Session | None = None
        self.prefill: Prefill | None = None
        self.follower = Follower(lambda text: encode(text, add_special_tokens=False))
        self.reason: str | None = None
        try:
            family = Family.named(self.family)
            identity = identify(_folder(scheduler.config.model_name), None, code_of(model, _MODELS))
            make = sys.modules["mlx_lm.models.cache"].make_prompt_cache
            # Requests that are remembered hold their session, and must not hold the weights.
            held = weakref.ref(model)
            self.session = Session(
                runtime(),
                identity,
                family,
                lambda: make(held()),
                host_grain=_host_grain(scheduler),
            )
            self.prefill = Prefill(
                model,
                make(model),
                scheduler.config.prefill_step_size,
                self.session.block_tokens,
                self.session.cut_anywhere,
            )
        except (IdentityError, NotEligible, UnsupportedCache, OSError) as error:
            self.reason = str(error)
            log.warning("thunder: no caching for this model: %s", error)

    def describe(self) -> dict[str, Any]:
        """The ``model`` part of the status."""
        return {
            "identity": self.session.identity if self.session else None,
            "family": self.family,
            "eligible": self.session is not None,
            "reason": self.reason,
        }


def add(scheduler: Any) -> Engine:
    """Learn what a new scheduler's model is."""
    engine = _engines[scheduler] = Engine(scheduler)
    return engine


def engine_of(scheduler: Any) -> Engine | None:
    return _engines.get(scheduler)


def engine_named(name: str | None) -> Engine | None:
    """The engine that serves the model of this name (or alias), if it is loaded."""
    server = sys.modules["omlx.server"]
    entry = server.get_engine_pool().get_entry(server.resolve_model_id(name))
    core = getattr(getattr(entry, "engine", None), "_engine", None)
    return engine_of(core.engine.scheduler) if core is not None else None


def tokenizer_named(name: str | None) -> Any:
    """The tokenizer that the host's requests for this model use on the event loop, if it is loaded."""
    server = sys.modules["omlx.server"]
    entry = server.get_engine_pool().get_entry(server.resolve_model_id(name))
    return getattr(getattr(entry, "engine", None), "tokenizer", None)


def engines() -> list[Engine]:
    """All that are loaded now."""
    return list(_engines.values())


def _host_grain(scheduler: Any) -> int | None:
    """Tokens in a block of the host's own cache; None where it keeps nothing.

    The host prefills up to each block's end, and keeps the state of layers that can't be cut there.
    """
    if getattr(scheduler, "block_aware_cache", None) is None:
        return None
    return int(scheduler.config.paged_cache_block_size)


def _folder(name: str) -> Path:
    folder = Path(name)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, local_files_only=True))
