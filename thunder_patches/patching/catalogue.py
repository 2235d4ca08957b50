"""Every feature and every patch. To add one, add a line here, its wrapper under
``thunder_patches/hosts/<host>/``, and record the target: see ``maintain``."""

from __future__ import annotations

from thunder_patches.patching.patch import Feature, Patch

FEATURES: tuple[Feature, ...] = (
    Feature("host_cache", "the host's own cache is checked: an exact hit would kill the server"),
    Feature("ssd_cache", "KV state in blocks on disk", switch="ssd_cache"),
    Feature("prefetch", "read-ahead of matched blocks", switch="prefetch", requires="ssd_cache"),
    Feature(
        "skip_logic",
        "no model call for a prompt that is known to its last token",
        switch="skip_logic",
        requires="ssd_cache",
    ),
    Feature(
        "approx_skip",
        "reuse of blocks after a differing one; answers may differ",
        switch="approx_skip",
        requires="ssd_cache",
    ),
    Feature(
        "context_pilot", "reuse told to the client", switch="context_pilot", requires="ssd_cache"
    ),
    Feature(
        "chunked_prefill",
        "chunks sized from free memory; what cannot fit is refused",
        switch="chunked_prefill",
        requires="ssd_cache",
    ),
    Feature(
        "progress",
        "signs of life while a prompt is prefilled",
        switch="progress",
        requires="ssd_cache",
    ),
    Feature("mixed_kv_bits", "--kv-bits works for models with sliding-window layers"),
    Feature(
        "moe_fusion", "gate and up of MoE layers in one launch, the same bits", switch="moe_fusion"
    ),
    # After moe_fusion: it wraps the same function, and must be asked first.
    Feature(
        "expert_streaming",
        "experts stay on disk, the routed ones are read",
        switch="expert_streaming",
    ),
    Feature(
        "stabilize",
        "opt-in canonical form of requests",
        switch="stabilize",
        requires="context_pilot",
    ),
    Feature(
        "ushape",
        "opt-in summary at the prompt's end",
        switch="ushape",
        requires="context_pilot",
    ),
    Feature(
        "learning",
        "kvtc calibrates itself from stored prompts in idle time",
        switch="calibrate_after",
        requires="ssd_cache",
        hosts=("mlx_lm",),
    ),
    Feature("routes", "/thunder/ on the host's port"),
    Feature(
        "engine_thread",
        "one thread for all steps of an engine",
        switch="engine_thread",
        eligibility="thunder_patches.hosts.threads:has_own_thread",
    ),
    # After what they wrap around: a context's tokens come before the prompt's own.
    Feature("contexts", "requests that go on from a context"),
    Feature(
        "handoff",
        "contexts passed from one agent to another by descriptor",
        switch="handoff",
        requires="contexts",
    ),
    Feature(
        "named_caches",
        "prefixes kept by name",
        switch="named_caches",
        requires="contexts",
    ),
)


_REUSE = "mlx_lm.server keeps prompt caches across restarts"
_FUSED = "mlx-lm loads gate and up as one projection"
_HANDED = "mlx-lm hands prompt caches from one request to another by name"
_STREAMED = "mlx-lm reads experts when they are routed to"


def _mlx_lm(
    feature: str,
    module: str,
    attribute: str,
    wrapper: str,
    *,
    adds: bool = False,
    until: str = _REUSE,
) -> Patch:
    """A patch of mlx-lm's server, with a wrapper in ``hosts/mlx_lm``."""
    return Patch(
        id=f"mlx_lm.{wrapper.replace(':', '.')}",
        feature=feature,
        host="mlx_lm",
        module=module,
        attribute=attribute,
        wrapper=f"thunder_patches.hosts.mlx_lm.{wrapper}",
        versions=">=0.31.3,<0.33",
        adds=adds,
        remove_when=until,
    )


def _omlx(
    feature: str,
    module: str,
    attribute: str,
    wrapper: str,
    *,
    eligibility: str = "",
    until: str = "oMLX checksums its blocks and keeps logits and state at a prompt's end",
) -> Patch:
    """A patch of oMLX, with a wrapper in ``hosts/omlx``; it decodes with mlx-lm's batch generator."""
    return Patch(
        id=f"omlx.{wrapper.replace(':', '.')}",
        feature=feature,
        host="omlx",
        module=module,
        attribute=attribute,
        wrapper=f"thunder_patches.hosts.{wrapper}",
        versions=">=0.4.4rc1,<0.8",
        eligibility=eligibility,
        remove_when=until,
    )


def _experts(feature: str, attribute: str, wrapper: str, eligibility: str, until: str) -> Patch:
    """A patch of mlx-lm's loading under oMLX, unless oMLX does the same itself."""
    asks = f"thunder_patches.hosts.mlx_lm.moe:{eligibility}"
    return _omlx(feature, _UTILS, attribute, f"mlx_lm.moe:{wrapper}", eligibility=asks, until=until)


_SERVER = "mlx_lm.server"
_CACHE = "mlx_lm.models.cache"
_GENERATE = "mlx_lm.generate"
_UTILS = "mlx_lm.utils"
_SCHEDULER = "omlx.scheduler"
_OMLX = "omlx.server"
_EVERY_REQUEST = "DebugRequestLoggingMiddleware.__call__"

PATCHES: tuple[Patch, ...] = (
    # load
    _mlx_lm("ssd_cache", _SERVER, "ModelProvider._load", "load:load"),
    # lookup
    _mlx_lm("host_cache", _CACHE, "LRUPromptCache.fetch_nearest_cache", "host_cache:checked"),
    _mlx_lm(
        "ssd_cache", _CACHE, "LRUPromptCache.fetch_nearest_cache", "lookup:fetch_nearest_cache"
    ),
    _mlx_lm("host_cache", _CACHE, "LRUPromptCache.insert_cache", "host_cache:insert_cache"),
    # the request, from its text to its tokens
    _mlx_lm("ssd_cache", _SERVER, "APIHandler.do_POST", "routes:do_post"),
    _mlx_lm("ssd_cache", _SERVER, "ResponseGenerator._tokenize", "requests:tokenize"),
    _mlx_lm("ssd_cache", _SERVER, "ResponseGenerator.generate", "requests:generate"),
    # the batched path
    _mlx_lm("ssd_cache", _GENERATE, "BatchGenerator.__init__", "batched:batch_generator_init"),
    _mlx_lm("ssd_cache", _GENERATE, "BatchGenerator.insert_segments", "batched:insert_segments"),
    _mlx_lm("ssd_cache", _GENERATE, "BatchGenerator.remove", "batched:remove"),
    _mlx_lm("ssd_cache", _GENERATE, "PromptProcessingBatch.prompt", "batched:prompt"),
    _mlx_lm("ssd_cache", _GENERATE, "PromptProcessingBatch.generate", "batched:generate"),
    _mlx_lm("ssd_cache", _GENERATE, "GenerationBatch.__init__", "batched:generation_init"),
    _mlx_lm("ssd_cache", _GENERATE, "GenerationBatch.next", "batched:generation_next"),
    # the serial path
    _mlx_lm("ssd_cache", _GENERATE, "generate_step", "serial:generate_step"),
    _mlx_lm(
        "ssd_cache",
        _GENERATE,
        "speculative_generate_step",
        "serial:speculative_generate_step",
    ),
    _mlx_lm(
        "mixed_kv_bits",
        _GENERATE,
        "maybe_quantize_kv_cache",
        "serial:maybe_quantize_kv_cache",
    ),
    # the experts, when a model is loaded, and when they can't be read
    _mlx_lm("moe_fusion", _UTILS, "load_model", "moe:fuse_loaded", until=_FUSED),
    _mlx_lm("moe_fusion", _UTILS, "load_adapters", "moe:release_adapted", until=_FUSED),
    _mlx_lm("expert_streaming", _UTILS, "load_model", "moe:stream_loaded", until=_STREAMED),
    _mlx_lm("expert_streaming", _UTILS, "load_adapters", "moe:bring_in_adapted", until=_STREAMED),
    _mlx_lm(
        "expert_streaming", _GENERATE, "BatchGenerator.next", "moe:fail_requests", until=_STREAMED
    ),
    _mlx_lm(
        "expert_streaming",
        _SERVER,
        "APIHandler.handle_completion",
        "moe:answer_failed",
        until=_STREAMED,
    ),
    # what the client sees
    _mlx_lm("ssd_cache", _SERVER, "APIHandler.generate_response", "usage:generate_response"),
    _mlx_lm(
        "ssd_cache",
        _SERVER,
        "APIHandler.completion_usage_response",
        "usage:completion_usage_response",
    ),
    # the end
    _mlx_lm("ssd_cache", _SERVER, "ResponseGenerator.stop_and_join", "lifecycle:stop_and_join"),
    # what does not fit
    _mlx_lm(
        "chunked_prefill",
        _SERVER,
        "APIHandler._set_completion_headers",
        "routes:set_completion_headers",
    ),
    # the generation thread when it has nothing to do
    _mlx_lm("learning", _SERVER, "ResponseGenerator._next_request", "idle:next_request"),
    # status
    _mlx_lm("routes", _SERVER, "APIHandler.do_GET", "routes:do_get"),
    # contexts: the request, its tokens, its lookup, what the client sees, and the routes
    _mlx_lm(
        "contexts",
        _SERVER,
        "APIHandler.handle_completion",
        "contexts:handle_completion",
        until=_HANDED,
    ),
    _mlx_lm("contexts", _SERVER, "ModelProvider._load", "contexts:load", until=_HANDED),
    _mlx_lm("contexts", _SERVER, "ResponseGenerator._tokenize", "contexts:tokenize", until=_HANDED),
    _mlx_lm(
        "contexts",
        _CACHE,
        "LRUPromptCache.fetch_nearest_cache",
        "contexts:fetch_nearest_cache",
        until=_HANDED,
    ),
    _mlx_lm(
        "contexts",
        _SERVER,
        "APIHandler.generate_response",
        "contexts:generate_response",
        until=_HANDED,
    ),
    _mlx_lm(
        "contexts",
        _SERVER,
        "APIHandler._set_completion_headers",
        "contexts:set_completion_headers",
        until=_HANDED,
    ),
    _mlx_lm("contexts", _SERVER, "APIHandler.do_POST", "context_routes:do_post", until=_HANDED),
    _mlx_lm("contexts", _SERVER, "APIHandler.do_GET", "context_routes:do_get", until=_HANDED),
    _mlx_lm(
        "contexts",
        _SERVER,
        "APIHandler.do_DELETE",
        "context_routes:do_delete",
        adds=True,
        until=_HANDED,
    ),
    # oMLX: lookup, prefill and store on the engine's thread
    _omlx("ssd_cache", _SCHEDULER, "Scheduler.__init__", "omlx.scheduler:scheduler_init"),
    _omlx(
        "ssd_cache",
        _SCHEDULER,
        "Scheduler._do_external_prefill",
        "omlx.scheduler:do_external_prefill",
    ),
    _omlx("ssd_cache", _SCHEDULER, "Scheduler._begin_prefill", "omlx.scheduler:begin_prefill"),
    _omlx(
        "ssd_cache",
        _SCHEDULER,
        "Scheduler._step_prefill_chunk",
        "omlx.scheduler:step_prefill_chunk",
    ),
    # oMLX: the first step and the answer's end
    _omlx("ssd_cache", _GENERATE, "BatchGenerator.__init__", "mlx_lm.batched:batch_generator_init"),
    _omlx(
        "ssd_cache", _GENERATE, "BatchGenerator.insert_segments", "mlx_lm.batched:insert_segments"
    ),
    _omlx("ssd_cache", _GENERATE, "BatchGenerator.remove", "mlx_lm.batched:remove"),
    _omlx("ssd_cache", _GENERATE, "PromptProcessingBatch.generate", "mlx_lm.batched:generate"),
    _omlx("ssd_cache", _GENERATE, "GenerationBatch.__init__", "mlx_lm.batched:generation_init"),
    _omlx("ssd_cache", _GENERATE, "GenerationBatch.next", "mlx_lm.batched:generation_next"),
    # oMLX: the experts; text models are loaded through mlx-lm
    _experts("moe_fusion", "load_model", "fuse_loaded", "omlx_fuses", _FUSED),
    _experts("moe_fusion", "load_adapters", "release_adapted", "omlx_fuses", _FUSED),
    _experts("expert_streaming", "load_model", "stream_loaded", "omlx_streams", _STREAMED),
    _experts("expert_streaming", "load_adapters", "bring_in_adapted", "omlx_streams", _STREAMED),
    # oMLX: the request, from its headers to the engine
    _omlx("ssd_cache", _OMLX, _EVERY_REQUEST, "omlx.requests:asgi"),
    _omlx("ssd_cache", "omlx.engine_core", "EngineCore.add_request", "omlx.requests:add_request"),
    _omlx(
        "contexts",
        "omlx.engine.batched",
        "BatchedEngine._apply_chat_template",
        "omlx.contexts:apply_chat_template",
        until=_HANDED,
    ),
    _omlx(
        "context_pilot",
        "omlx.engine.batched",
        "BatchedEngine._apply_chat_template",
        "omlx.messages:apply_chat_template",
    ),
    _omlx(
        "chunked_prefill",
        _OMLX,
        "validate_context_window",
        "omlx.admission:validate_context_window",
    ),
    # oMLX: what the client sees
    _omlx("context_pilot", _OMLX, "Usage", "omlx.usage:usage"),
    _omlx("context_pilot", _OMLX, "convert_internal_to_anthropic_response", "omlx.usage:message"),
    _omlx("context_pilot", _OMLX, "create_message_start_event", "omlx.usage:message_start"),
    _omlx("context_pilot", _OMLX, "create_message_delta_event", "omlx.usage:message_delta"),
    _omlx("context_pilot", _OMLX, "build_response_usage", "omlx.usage:response_usage"),
    _omlx("context_pilot", _OMLX, "format_sse_event", "omlx.usage:response_event"),
    # oMLX: status
    _omlx("routes", _OMLX, _EVERY_REQUEST, "omlx.routes:asgi"),
    # oMLX: contexts, before anything else sees a request; their tokens; the engine
    _omlx("contexts", _OMLX, _EVERY_REQUEST, "omlx.contexts:asgi", until=_HANDED),
    _omlx(
        "contexts",
        _OMLX,
        "validate_context_window",
        "omlx.contexts:validate_context_window",
        until=_HANDED,
    ),
    _omlx(
        "contexts",
        "omlx.engine_core",
        "EngineCore.add_request",
        "omlx.contexts:add_request",
        until=_HANDED,
    ),
)
