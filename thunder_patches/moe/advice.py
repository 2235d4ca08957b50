"""Before a model is loaded: does it fit, would streaming its experts help, how fast could that be.

Reads the checkpoint's headers and, where streaming is in question, a sample of its bytes.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from thunder_patches.moe.checkpoint import CheckpointError, Tensor, tensors
from thunder_patches.moe.reader import THREADS

WORKSPACE = 0.10
"""Of the memory: for the KV state, activations and other programs."""
MEASURED_BYTES = 256 << 20
"""At most so much of the checkpoint is read to measure the disk."""

_EXPERTS = re.compile(
    r"\.(?:switch_mlp|switch_glu|experts(?:\.\d+)?(?:\.switch_(?:glu|mlp))?)\."
    r"(?:gate_proj|up_proj|down_proj|gate_up_proj|w[123])(?:\.|$|_)"
)
_STACKED = re.compile(r"\.experts\.\d+\.")
_TOP = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts",
        "moe_k", "num_experts_per_topk")  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing to know."""

    level: Literal["ok", "note", "warning", "error"]
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Size:
    """What a checkpoint needs, in bytes."""

    dense: int
    experts: int
    layers: int
    """MoE layers."""
    count: int
    """Experts of a layer."""
    top: int
    """Experts that a token is routed to; 0: the configuration doesn't say."""
    bits: tuple[int, ...]
    """Bits of the quantised experts; empty: not quantised."""
    streamable: bool
    """Whether each projection's experts are one tensor, as the model holds them."""

    @property
    def a_token(self) -> int:
        """Bytes of experts that one token needs."""
        return self.experts * self.top // self.count if self.count else 0

    @property
    def bank(self) -> int:
        """Memory that streaming takes for a layer's experts."""
        return self.experts // self.layers if self.layers else 0


def size_of(folder: Path) -> Size:
    """The sizes of the checkpoint in `folder`.

    Raises:
        CheckpointError: it can't be read.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: expected config.json: {error}") from error
    text = config | (config.get("text_config") or {})
    known = tensors(folder)
    experts = [tensor for tensor in known.values() if _EXPERTS.search(tensor.name)]
    singles = [tensor for tensor in experts if _STACKED.search(tensor.name)]
    layers = {_EXPERTS.split(tensor.name)[0] for tensor in experts}
    total = sum(tensor.nbytes for tensor in known.values())
    in_experts = sum(tensor.nbytes for tensor in experts)
    shapes = [tensor.shape[0] for tensor in experts if len(tensor.shape) >= 3]
    numbers = [int(n[1]) for t in singles if (n := re.search(r"\.experts\.(\d+)\.", t.name))]
    return Size(
        dense=total - in_experts,
        experts=in_experts,
        layers=len(layers),
        count=max(shapes, default=max(numbers, default=-1) + 1),
        top=next((int(text[name]) for name in _TOP if text.get(name)), 0),
        bits=_bits(config, experts),
        streamable=bool(experts)
        and not singles
        and not any("gate_up_proj" in tensor.name for tensor in experts),
    )


def _bits(config: dict[str, Any], experts: list[Tensor]) -> tuple[int, ...]:
    """Bits of the expert weights: of the shape of weight and scales, and the group size."""
    scales = {t.name.removesuffix(".scales"): t for t in experts if t.name.endswith(".scales")}
    quantised = config.get("quantization") or config.get("quantization_config") or {}
    found = set()
    for tensor in experts:
        of = scales.get(tensor.name.removesuffix(".weight"))
        if of is None or not tensor.name.endswith(".weight") or tensor.dtype != "U32":
            continue
        own = quantised.get(tensor.name.removesuffix(".weight"))
        group = (own if isinstance(own, dict) else quantised).get("group_size", 64)
        found.add(tensor.shape[-1] * 32 // (of.shape[-1] * group))
    return tuple(sorted(found))


def disk_bandwidth(folder: Path, limit: int = MEASURED_BYTES) -> float | None:
    """Bytes a second when pieces of a megabyte are read at random from the checkpoint, in
    parallel, after asking the system to forget them. None: nothing there, or the system doesn't
    take such advice, so that a figure would be that of the page cache."""
    if not hasattr(os, "posix_fadvise"):
        return None
    piece = 1 << 20
    places = [
        (tensor.file, tensor.offset + start)
        for tensor in tensors(folder).values()
        for start in range(0, tensor.nbytes - piece, piece)
    ]
    chosen = random.Random(0).sample(places, min(len(places), limit // piece))
    if not chosen:
        return None
    files = {file: os.open(file, os.O_RDONLY) for file in {file for file, _ in chosen}}
    try:
        for file, offset in chosen:
            os.posix_fadvise(files[file], offset, piece, os.POSIX_FADV_DONTNEED)
        with ThreadPoolExecutor(THREADS) as pool:
            start = time.perf_counter()
            done = sum(pool.map(lambda p: len(os.pread(files[p[0]], piece, p[1])), chosen))
            return done / (time.perf_counter() - start)
    finally:
        for fd in files.values():
            os.close(fd)


def advise(
    folder: Path, *, memory: int | None = None, bandwidth: float | None = None
) -> list[Finding]:
    """What to expect of the model in `folder` on this machine.

    Args:
        memory: bytes of memory to plan with; None: what the machine has.
        bandwidth: bytes a second of the disk; None: measured where it matters.
    """
    try:
        size = size_of(folder)
        return list(_findings(folder, size, memory or _memory(), bandwidth))
    except (CheckpointError, OSError) as error:
        return [Finding("error", str(error), "download the model again")]


def _findings(folder: Path, size: Size, memory: int, bandwidth: float | None) -> Iterator[Finding]:
    usable = int(memory * (1 - WORKSPACE))
    whole = size.dense + size.experts
    if not size.experts:
        if whole <= usable:
            yield Finding("ok", f"{_gb(whole)} of {_gb(memory)} memory; no experts")
        else:
            yield Finding(
                "error",
                f"needs {_gb(whole)} of {_gb(memory)} memory and has no experts to leave on disk",
                "choose a smaller model or fewer bits",
            )
        return
    yield Finding(
        "note",
        f"{_gb(size.experts)} of {_gb(whole)} are experts: {size.layers} layers of {size.count}, "
        f"{size.top or 'an unknown number'} for each token",
    )
    if 2 in size.bits:
        yield Finding(
            "warning",
            "the experts have 2 bits: such models answer, but get the JSON of tool calls wrong",
            "use 4 bits where tools are called",
        )
    if whole <= usable:
        yield Finding("ok", f"fits: {_gb(whole)} of {_gb(memory)} memory; streaming would slow it")
        return
    resident = size.dense + size.bank
    if not size.streamable:
        yield Finding(
            "error",
            f"needs {_gb(whole)} of {_gb(memory)} memory, and its experts can't be streamed from "
            "this checkpoint",
            "mlx_lm.convert writes one whose experts can be",
        )
        return
    if resident > usable:
        yield Finding(
            "error",
            f"needs {_gb(whole)} of {_gb(memory)} memory, and {_gb(resident)} even with its "
            "experts on disk",
            "choose a smaller model or fewer bits",
        )
        return
    yield Finding(
        "note",
        f"doesn't fit ({_gb(whole)} of {_gb(memory)} memory); with its experts on disk it needs "
        f"{_gb(resident)}",
        "THUNDER_EXPERT_STREAMING=1",
    )
    bandwidth = bandwidth or disk_bandwidth(folder)
    if bandwidth is None or not size.a_token:
        yield Finding("note", "its speed can't be told from here: the disk wasn't measured")
        return
    cached = min(1.0, (usable - resident) / size.experts)
    cold = size.a_token / bandwidth
    yield Finding(
        "note",
        f"a token needs {size.a_token / 1e6:.0f} MB of experts; the disk reads "
        f"{bandwidth / 1e9:.2f} GB/s, so at most {1 / cold:.1f} tokens/s with nothing cached, and "
        f"{1 / (cold * (1 - cached)) if cached < 1 else float('inf'):.1f} if the "
        f"{cached:.0%} of the experts that fit beside it were all that is asked for evenly; "
        "the time to compute comes on top",
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _memory() -> int:
    import psutil

    return psutil.virtual_memory().total
