"""``ModelProvider._load``: once a model is there, learn what it is."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from ...config import settings
from ...patching.guard import shield
from ...tensors.identity import IdentityError, code_of, identify
from ...tensors.layers import UnsupportedCache, is_cuttable
from ..prefill import Prefill
from ..quantised import AnySession, QuantisedSession
from ..ranks import Ranks, group
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
        self.host_bytes: int | None = None
        """``--prompt-cache-bytes``, the budget of the host's own prompt cache."""
        self.ranks: Ranks | None = None
        """Set where several processes serve the model together and have agreed to cache."""
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
        loaded.host_bytes = getattr(instance.cli_args, "prompt_cache_bytes", None)
        try:
            loaded.session = _session(instance)
            if not instance.is_distributed:
                # Ranks must cut their chunks alike, whatever memory each has.
                loaded.prefill = _prefill(instance, loaded.session)
            loaded.reason = ""
        except (IdentityError, NotEligible, UnsupportedCache) as error:
            loaded.reason = str(error)
            log.warning("thunder: no caching for this model: %s", error)
    if getattr(instance, "is_distributed", False) and settings().distributed:
        _agree()
    return result


def _agree() -> None:
    """All ranks cache or none; called on each, whatever became of the session there."""
    ranks = group()
    assert ranks is not None
    eligible, _ = ranks.lowest_and_highest(int(loaded.session is not None))
    if eligible:
        loaded.ranks = ranks
    elif loaded.session is not None:
        loaded.session, loaded.reason = None, "another rank cannot cache this model"
        log.warning("thunder: no caching for this model: %s", loaded.reason)


def session_for(key: Any) -> AnySession | None:
    """The session for the host's cache key, if that model is loaded and eligible."""
    return loaded.session if loaded.key == key else None


def session_of(model: Any) -> AnySession | None:
    """The session for a model object, if it is the one loaded and eligible."""
    return loaded.session if loaded.model is model else None


def _session(provider: Any) -> AnySession:
    path, adapter, draft = provider.model_key
    if provider.is_distributed and not runtime().settings.distributed:
        raise NotEligible("serving over several ranks needs THUNDER_DISTRIBUTED=1 on every one")
    make = sys.modules["mlx_lm.models.cache"].make_prompt_cache
    model, draft_model, options = provider.model, provider.draft_model, provider.cli_args
    family = Family.named(_family_name(model))
    identity = identify(
        _folder(path), None if adapter is None else Path(adapter), code_of(model, _MODELS)
    )

    if provider.is_distributed:
        identity += _split(provider, make(model))

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


def _split(provider: Any, fresh: list[Any]) -> str:
    """What a split model's part adds to its identity.

    Raises:
        NotEligible: for layers with snapshots, for which prefill would be cut on one rank's word.
    """
    if not is_cuttable(fresh):
        raise NotEligible("recurrent and rotating layers are not cached over several ranks")
    if runtime().settings.salt == "api-key":
        raise NotEligible("THUNDER_SALT=api-key is not known to all ranks")
    ranks = group()
    mode = "pipeline" if provider.pipeline_group is not None else "tensor"
    return f" rank {ranks.rank} of {ranks.size}, {mode}" if ranks is not None else ""


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
