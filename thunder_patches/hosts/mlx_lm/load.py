"""``ModelProvider._load``: once a model is there, learn what it is."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from ...patching.guard import shield
from ...tensors.identity import IdentityError, code_of, identify
from ...tensors.layers import UnsupportedCache
from ..prefill import Prefill
from ..quantised import AnySession, QuantisedSession
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
        self.prefill: Prefill | None = None
        self.session: AnySession | None = None
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
            loaded.prefill = _prefill(instance, loaded.session)
            loaded.reason = ""
        except (IdentityError, NotEligible, UnsupportedCache) as error:
            loaded.reason = str(error)
            log.warning("thunder: no caching for this model: %s", error)
    return result


def session_for(key: Any) -> AnySession | None:
    """The session for the host's cache key, if that model is loaded and eligible."""
    return loaded.session if loaded.key == key else None


def session_of(model: Any) -> AnySession | None:
    """The session for a model object, if it is the one loaded and eligible."""
    return loaded.session if loaded.model is model else None


def _session(provider: Any) -> AnySession:
    path, adapter, draft = provider.model_key
    if getattr(provider, "is_distributed", False):
        raise NotEligible("distributed serving is not supported yet")
    make = sys.modules["mlx_lm.models.cache"].make_prompt_cache
    model, draft_model, options = provider.model, provider.draft_model, provider.cli_args
    family = Family.named(_family_name(model))
    identity = identify(
        _folder(path), None if adapter is None else Path(adapter), code_of(model, _MODELS)
    )

    def fresh() -> list[Any]:
        # With a draft model the host keeps both models' caches in one list.
        return make(model) + (make(draft_model) if draft_model is not None else [])

    if draft_model is not None:
        identity += identify(_folder(draft), None, code_of(draft_model, _MODELS))
    # Speculative decoding starts with both models, so no first token comes from stored logits.
    session = Session(runtime(), identity, family, fresh, can_skip=draft_model is None)
    bits = getattr(options, "kv_bits", None)
    if bits is None:
        return session
    if draft_model is not None:
        raise NotEligible("a draft model together with --kv-bits is not supported")
    group, start = options.kv_group_size, options.quantized_kv_start
    variant = f" kv_bits={bits} group_size={group} start={start}"
    quantised = Session(runtime(), identity, family, fresh, variant=variant)
    return QuantisedSession(session, quantised, start=start, step=options.prefill_step_size)


def _prefill(provider: Any, session: AnySession) -> Prefill:
    fresh = sys.modules["mlx_lm.models.cache"].make_prompt_cache(provider.model)
    step = provider.cli_args.prefill_step_size
    return Prefill(provider.model, fresh, step, session.block_tokens, session.cut_anywhere)


def _family_name(model: Any) -> str:
    return type(model).__module__.rpartition(".")[2]


def _folder(path: str) -> Path:
    folder = Path(path)
    if folder.exists():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True))
