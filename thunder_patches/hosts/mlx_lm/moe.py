"""``mlx_lm.utils.load_model`` and ``load_adapters``: fuse a model's experts, or leave them on disk.

`load_model` reads a checkpoint lazily and evaluates it at the end. Both features act between the
two: fusing there keeps peak memory at that of the finished model, and streamed experts are never
read. oMLX loads text models through the same functions.

Order matters: streaming wraps fusion, so that a model asked for by streaming is lazy for fusion.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import weakref
from pathlib import Path
from typing import Any

from ...config import settings
from ...moe import fusion, streaming
from ...moe.checkpoint import header
from ...moe.layers import switch_layers
from ...moe.reader import StreamingError
from ...patching import report
from ...patching.guard import is_on, shield
from ...patching.host import Host
from ...patching.patch import State, Verdict
from ..arguments import named, replaced

log = logging.getLogger("thunder_patches")

HOST_SWITCH = "OMLX_QWEN35_MOE_GATE_UP"
"""oMLX's own switch for its own fusion; 0 turns ours off as well."""


def fuse_loaded(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``load_model(model_path, lazy=False, ...) -> (model, config)``."""
    if not is_on("moe_fusion") or _asked_lazily(wrapped, args, kwargs):
        # Lazily: to be sharded, converted or streamed. Experts read now might not be needed.
        return wrapped(*args, **kwargs)
    args, kwargs = replaced(wrapped, args, kwargs, lazy=True)
    result = wrapped(*args, **kwargs)
    _fuse(result[0])
    _evaluate(result[0])
    return result


def stream_loaded(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``load_model`` too: the model comes without its experts."""
    if not is_on("expert_streaming") or _asked_lazily(wrapped, args, kwargs):
        return wrapped(*args, **kwargs)
    args, kwargs = replaced(wrapped, args, kwargs, lazy=True)
    result = wrapped(*args, **kwargs)
    model = result[0]
    with shield("expert_streaming", "load"):
        _stream(model, Path(named(wrapped, args, kwargs)["model_path"]))
    if streaming.streamer_of(model) is None and is_on("moe_fusion"):
        _fuse(model)
    _evaluate(model)
    return result


def release_adapted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``load_adapters(model, adapter_path) -> model``: layers whose experts got an adapter
    go back to the host's form."""
    model = wrapped(*args, **kwargs)
    with shield("moe_fusion", "adapters"):
        if fusion.undo_adapted(model):
            _say_fused(fusion.report(model))
    return model


def bring_in_adapted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``load_adapters`` too: experts that an adapter is for can't stay on disk. The host
    would not find them: it refuses the adapter then, or, before 0.32, leaves that part out."""
    given = named(wrapped, args, kwargs)
    brought = _bring_in(given["model"], Path(given["adapter_path"]))
    model = wrapped(*args, **kwargs)
    if brought:
        _evaluate(model)
    return model


def fail_requests(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``BatchGenerator.next()``: experts that can't be read end the requests that were being
    computed, each with the error, instead of the generation thread."""
    try:
        return wrapped(*args, **kwargs)
    except StreamingError as error:
        results = _results_of_server()
        if results is None:
            raise
        waiting = {entry[0] for entry in instance._unprocessed_sequences}
        failed = [uid for uid in results if uid not in waiting]
        instance.remove(failed)
        for uid in failed:
            results.pop(uid)["rqueue"].put(error)
        log.error("thunder: %d requests failed: %s", len(failed), error)
        return [], []


def answer_failed(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wraps ``APIHandler.handle_completion(request, stop_words)``: the client gets the error, with
    status 500, or as the last event of a stream that has begun."""
    try:
        return wrapped(*args, **kwargs)
    except StreamingError as error:
        told = {"error": {"message": str(error), "type": "expert_streaming", "code": 500}}
        text = json.dumps(told).encode()
        if instance.stream:
            text = b"data: " + text + b"\n\ndata: [DONE]\n\n"
        else:
            instance._headers_buffer = []  # the host had prepared its 200
            instance._set_completion_headers(500)
            instance.send_header("Content-Length", str(len(text)))
            instance.end_headers()
        instance.wfile.write(text)
        instance.wfile.flush()
        return None


def _fuse(model: Any) -> None:
    with shield("moe_fusion", "load"):
        if os.environ.get(HOST_SWITCH) == "0":
            report.note("moe_fusion", State.OFF, f"{HOST_SWITCH}=0")
        else:
            _say_fused(fusion.fuse(model, any_family=settings().allow_untested))


def _say_fused(found: fusion.Report) -> None:
    """Once a load in the log; in the status, where nothing was fused, the reason."""
    if found.fused or found.left_alone:
        log.info("thunder: %s", found)
    report.note("moe_fusion", None if found.fused else State.NOT_ELIGIBLE, str(found))


def _stream(model: Any, folder: Path) -> None:
    fuse = is_on("moe_fusion") and os.environ.get(HOST_SWITCH) != "0"
    found, streamer = streaming.attach(
        model, folder, fuse=fuse, any_family=settings().allow_untested
    )
    log.info("thunder: %s", found)
    report.note(
        "expert_streaming", None if streamer is not None else State.NOT_ELIGIBLE, str(found)
    )
    if streamer is None:
        return
    if found.fused:
        report.note("moe_fusion", None)
    else:
        report.note("moe_fusion", State.NOT_ELIGIBLE, found.not_fused)
    told = {"fused_layers": found.fused, "expert_bytes": found.expert_bytes}
    alive = weakref.ref(streamer)

    def section() -> dict[str, Any]:
        streamer = alive()
        return told | streamer.told() if streamer is not None else {"layers": 0}

    report.add_section("expert_streaming", section)


def _bring_in(model: Any, adapter: Path) -> bool:
    file = adapter / "adapters.safetensors"
    if streaming.streamer_of(model) is None or not file.exists():
        return False
    names = [tensor.name for tensor in header(file)]
    paths = {
        layer.path
        for layer in switch_layers(model)
        if any(name.startswith(f"{layer.path}.") for name in names)
    }
    brought = streaming.detach(model, paths)
    if brought:
        log.warning("thunder: %d MoE layers are in memory: the adapter is on them", len(brought))
    return bool(brought)


def _asked_lazily(wrapped: Any, args: Any, kwargs: Any) -> bool:
    try:
        return bool(named(wrapped, args, kwargs).get("lazy", False))
    except TypeError:
        return True


def _evaluate(model: Any) -> None:
    """What `load_model` does at its end unless it is asked to be lazy."""
    import mlx.core as mx

    mx.eval(model.parameters())


def _results_of_server() -> dict[int, dict[str, Any]] | None:
    """The table of running requests of ``ResponseGenerator._generate``, which calls us. It is a
    local of that function; nothing else leads from a request's uid to its client."""
    frame = sys._getframe(1)
    for _ in range(12):
        if frame.f_code.co_name == "_generate" and "batch_results" in frame.f_locals:
            return frame.f_locals["batch_results"]
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def omlx_fuses(host: Host) -> Verdict | None:
    """Newer oMLX fuses gate and up of Qwen3.5 models itself, after loading: ours would be in its
    way."""
    return _omlx_has(host, "omlx.patches.qwen35_moe_gate_up", "fuses gate and up itself")


def omlx_streams(host: Host) -> Verdict | None:
    """Newer oMLX keeps experts on disk itself."""
    return _omlx_has(host, "omlx.patches.expert_streaming", "streams experts itself")


def _omlx_has(host: Host, module: str, what: str) -> Verdict | None:
    if host.file(module) is None:
        return None
    return Verdict(State.HOST_HAS_IT, f"{host.distribution} {host.version} {what}")
