"""``ModelProvider._load``: once a model is there, learn what it is."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from ...patching.guard import shield
from ...tensors.identity import IdentityError, code_of, identify
from ...tensors.layers import UnsupportedCache
from ..runtime import runtime
from ..session import Family, NotEligible, Session

_MODELS = "mlx_lm.models."

log = logging.getLogger("thunder_patches")


class Loaded:
    """The model that the provider holds now; ``session`` is None with a ``reason`` if not eligible."""

    def __init__(self) -> None:
        self.key: Any = None
        self.model: Any = None
        self.family = ""
        self.session: Session | None = None
        self.reason = "no model loaded"


loaded = Loaded()


def load(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``ModelProvider._load(model_path, adapter_path=None, draft_model_path=None)``."""
    loaded.__init__()  # type: ignore[misc]
    result = wrapped(*args, **kwargs)
    with shield("ssd_cache", "load"):
        loaded.key, loaded.model = instance.model_key, instance.model
        loaded.family = _family_name(instance.model)
        try:
            loaded.session = _session(instance)
            loaded.reason = ""
        except (IdentityError, NotEligible, UnsupportedCache) as error:
            loaded.reason = str(error)
            log.warning("thunder: no caching for this model: %s", error)
    return result


def session_for(key: Any) -> Session | None:
    """The session for the host's cache key, if that model is loaded and eligible."""
    return loaded.session if loaded.key == key else None


def session_of(model: Any) -> Session | None:
    """The session for a model object, if it is the one loaded and eligible."""
    return loaded.session if loaded.model is model else None


def _session(provider: Any) -> Session:
    path, adapter, draft = provider.model_key
    if getattr(provider, "is_distributed", False):
        raise NotEligible("distributed serving is not supported yet")
    if getattr(provider.cli_args, "kv_bits", None) is not None:
        raise NotEligible("quantised KV is not supported yet")
    make = sys.modules["mlx_lm.models.cache"].make_prompt_cache
    model, draft_model = provider.model, provider.draft_model
    family = Family.named(_family_name(model))
    identity = identify(
        _folder(path), None if adapter is None else Path(adapter), code_of(model, _MODELS)
    )
    if draft_model is None:
        return Session(runtime(), identity, family, lambda: make(model))
    # The host keeps both models' caches in one list; the first token needs both models.
    identity += identify(_folder(draft), None, code_of(draft_model, _MODELS))
    return Session(
        runtime(), identity, family, lambda: make(model) + make(draft_model), can_skip=False
    )


def _family_name(model: Any) -> str:
    return type(model).__module__.rpartition(".")[2]


def _folder(path: str) -> Path:
    folder = Path(path)
    if folder.exists():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True))
