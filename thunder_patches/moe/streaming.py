"""Experts stay on disk: each forward pass reads the ones it routes to (after Flash-MoE).

`attach` takes the expert arrays of a lazily loaded model out of it before any was read, and notes
where each expert's bytes lie in the checkpoint. When a layer is called, the router's result is
read back, the routed experts are read in parallel into a bank of slots that all layers share, and
the host's own code computes on the bank. The operating system's page cache is the only cache.

* Few routes, as in decode: their experts go to the first slots, and the routes are renumbered.
* From 64 routes on, as in prefill, the host sorts them, and its choice of kernel depends on the
  number of experts. So there is a second bank with a slot for every expert, and nothing is
  renumbered. Each routed expert is read once.

The kernels see the same numbers in the same shapes as in the resident model, so the bits are the
same. Before a bank's slots are overwritten, the newest output that needs them is computed.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from thunder_patches.moe import fusion
from thunder_patches.moe.banks import DTYPES, Bank, Part
from thunder_patches.moe.checkpoint import CheckpointError, Tensor, tensors, weight_files
from thunder_patches.moe.families import why_not_family
from thunder_patches.moe.halves import SHARED, arrays, join, like, stack
from thunder_patches.moe.layers import Layer, host_class, switch_layers, why_not
from thunder_patches.moe.reader import PIECE_BYTES, OpenFile, Pool, Read, StreamingError
from thunder_patches.moe.residency import Residency

log = logging.getLogger("thunder_patches")

SORTED_FROM = 64
"""Routes from which mlx-lm's SwitchGLU sorts them."""
SAMPLED = 16
"""Of so many layer calls, one asks which of its pages are in the page cache."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass
class Phase:
    """What was streamed for one kind of call."""

    calls: int = 0
    """Layer calls."""
    tokens: float = 0.0
    """Rows that passed all layers."""
    bytes_read: int = 0
    experts_read: int = 0
    seconds_computing: float = 0.0
    """Waiting for the previous layer's experts to be computed."""
    seconds_router: float = 0.0
    """Waiting for the router's result: the layer's attention and router, and the read-back."""
    seconds_disk: float = 0.0
    pages_seen: int = 0
    pages_cached: int = 0

    def told(self) -> dict[str, Any]:
        """The figures, as JSON types."""
        rate = self.pages_cached / self.pages_seen if self.pages_seen else None
        return {
            "tokens": round(self.tokens),
            "bytes_read": self.bytes_read,
            "bytes_a_token": round(self.bytes_read / self.tokens) if self.tokens else 0,
            "experts_read": self.experts_read,
            "page_cache_hit_rate": None if rate is None else round(rate, 4),
            "seconds_computing": round(self.seconds_computing, 4),
            "seconds_router": round(self.seconds_router, 4),
            "seconds_disk": round(self.seconds_disk, 4),
        }


@dataclass
class Report:
    """What `attach` did."""

    streamed: int = 0
    fused: int = 0
    left_alone: dict[str, str] = field(default_factory=dict)
    """Path of the layer, which then is resident -> reason."""
    expert_bytes: int = 0
    """On disk, of the streamed layers."""
    not_fused: str = ""

    def __str__(self) -> str:
        total = self.streamed + len(self.left_alone)
        if not total:
            return "the model has no SwitchGLU layers"
        text = f"experts of {self.streamed} of {total} MoE layers stay on disk"
        text += f" ({self.expert_bytes / 1e9:.2f} GB)"
        reasons = Counter(self.left_alone.values())
        return "; ".join([text, *(f"{n}: {reason}" for reason, n in reasons.items())])


@dataclass(frozen=True, slots=True)
class Source:
    """Where one array's experts lie: those of expert e from `offset` + e * `nbytes` on."""

    file: OpenFile
    offset: int
    nbytes: int
    part: str
    start: int
    """First byte within the part of the bank's slot."""


class StreamedLayer:
    """One SwitchGLU whose experts are on disk."""

    def __init__(
        self,
        streamer: Streamer,
        glu: nn.Module,
        sources: list[Source],
        parts: dict[str, Part],
        experts: int,
    ) -> None:
        self.streamer = streamer
        self.sources = sources
        self.parts = parts
        self.experts = experts
        self.base: type[nn.Module] = type(glu)
        self.projections: dict[str, nn.Module] = {name: glu[name] for name in PROJECTIONS}
        self.keys = {name: tuple(arrays(module)) for name, module in self.projections.items()}
        self.files = list({id(source.file): source.file for source in sources}.values())
        self._on: dict[bool, tuple[Bank, nn.Module]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamedLayer:
        return self  # open files and buffers: a copy of the model shares them

    def run(self, glu: nn.Module, x: mx.array, routes: mx.array) -> mx.array:
        """What the host's SwitchGLU returns for activations `x` [..., dims] and `routes` [..., k].

        Raises:
            StreamingError: the experts can't be read.
        """
        streamer = self.streamer
        many = routes.size >= SORTED_FROM
        phase = streamer.prefill if many else streamer.decode
        clock = time.perf_counter
        bank = streamer.bank(self, many, min(self.experts, routes.size))
        begin = clock()
        bank.settle()
        computed = clock()
        ids = np.asarray(_read_back(routes))
        routed = clock()
        wanted, renumbered = np.unique(ids, return_inverse=True)
        slots = wanted if many else np.arange(len(wanted))
        self._read(bank, wanted, slots, phase)
        done = clock()
        phase.calls += 1
        phase.experts_read += len(wanted)
        phase.tokens += ids.size / ids.shape[-1] / streamer.layers
        phase.seconds_computing += computed - begin
        phase.seconds_router += routed - computed
        phase.seconds_disk += done - routed
        if not many:
            routes = mx.array(renumbered.reshape(ids.shape).astype(ids.dtype))
        output = self.base.__call__(self._glu(glu, bank, many), x, routes)
        bank.last = output
        return output

    def _read(self, bank: Bank, experts: np.ndarray, slots: np.ndarray, phase: Phase) -> None:
        reads = list(self._reads(bank, experts.tolist(), slots.tolist()))
        if phase.calls % SAMPLED == 0:
            self.streamer.sample(reads, phase)
        self.streamer.pool.read(reads)
        for file in self.files:
            file.check()
        phase.bytes_read += sum(read.nbytes for read in reads)

    def _reads(self, bank: Bank, experts: list[int], slots: list[int]) -> Iterator[Read]:
        """Neighbouring experts of one source are one read, as long as it isn't too long."""
        for source in self.sources:
            most = max(1, PIECE_BYTES // source.nbytes)
            first = 0
            for i in range(1, len(experts) + 1):
                if i < len(experts) and experts[i] == experts[i - 1] + 1 and i - first < most:
                    continue
                start, stop = source.start, source.start + source.nbytes
                targets = [bank.target(source.part, s, start, stop) for s in slots[first:i]]
                offset = source.offset + experts[first] * source.nbytes
                yield Read(source.file, offset, targets, source.nbytes * (i - first))
                first = i

    def _glu(self, glu: nn.Module, bank: Bank, many: bool) -> nn.Module:
        """A module of the host's class whose projections are the bank's arrays."""
        known = self._on.get(many)
        if known is None or known[0] is not bank:
            known = self._on[many] = (bank, on_bank(glu, self, bank))
        if known[1].training != glu.training:
            known[1].train(glu.training)
        return known[1]


class Streamer:
    """What the streamed layers of one model share: open files, reading threads, banks, figures."""

    def __init__(self, folder: Path, pool: Pool | None = None) -> None:
        self.folder = folder
        self.pool = pool or Pool()
        self.layers = 0
        self.prefill = Phase()
        self.decode = Phase()
        self.files: dict[Path, OpenFile] = {}
        self._banks: dict[tuple[Any, bool], Bank] = {}
        self._residency: dict[int, Residency | None] = {}

    def open(self, path: Path) -> OpenFile:
        """The file, opened once."""
        if path not in self.files:
            self.files[path] = OpenFile(path)
        return self.files[path]

    def bank(self, layer: StreamedLayer, many: bool, slots: int) -> Bank:
        """The bank for a call of `layer`: with a slot for every expert, or with `slots` or more."""
        key = (tuple(layer.parts.items()), many)
        bank = self._banks.get(key)
        wanted = layer.experts if many else min(layer.experts, 1 << (slots - 1).bit_length())
        if bank is None or bank.slots < wanted:
            if bank is not None:
                bank.settle()
            bank = self._banks[key] = Bank(layer.parts, wanted)
        return bank

    @property
    def bank_bytes(self) -> int:
        """Memory that the banks take."""
        return sum(bank.nbytes for bank in self._banks.values())

    def sample(self, reads: list[Read], phase: Phase) -> None:
        """Count which pages of `reads` are in the page cache, where the system says."""
        for read in reads:
            known = self._residency
            if read.file.fd not in known:
                try:
                    known[read.file.fd] = Residency(read.file.fd)
                except (OSError, ValueError):
                    known[read.file.fd] = None
            residency = known[read.file.fd]
            if residency is None:
                continue
            try:
                cached, pages = residency.pages(read.offset, read.nbytes)
            except OSError:
                known[read.file.fd] = None
                continue
            phase.pages_cached += cached
            phase.pages_seen += pages

    def told(self) -> dict[str, Any]:
        """Live figures for the status, as JSON types."""
        return {
            "layers": self.layers,
            "bank_bytes": self.bank_bytes,
            "threads": self.pool.threads,
            "prefill": self.prefill.told(),
            "decode": self.decode.told(),
        }


def attach(
    model: nn.Module, folder: Path, *, fuse: bool = True, any_family: bool = False
) -> tuple[Report, Streamer | None]:
    """Take the experts of `model`, loaded lazily from `folder`, out of it and stream them.

    Layers that can't be streamed stay as they are, lazy. Nothing is changed before all that can
    go wrong has been tried.

    Args:
        fuse: lay gate and up together in the banks, where fusion is proven and holds here.
        any_family: fuse families that compat/moe_families.toml doesn't name, too.

    Raises:
        CheckpointError: the files aren't well-formed safetensors.
    """
    report = Report()
    origins = _origins(model, folder)
    streamer = Streamer(folder)
    fusable: dict[tuple, str | None] = {}
    planned: list[tuple[Layer, StreamedLayer]] = []
    kept_out = None if any_family else why_not_family(model)
    for layer in switch_layers(model):
        try:
            homes = _homes(layer, origins)
        except LookupError as reason:
            report.left_alone[layer.path] = str(reason.args[0])
            continue
        reason_not = "switched off" if not fuse else kept_out or why_not(layer)
        if reason_not is None:
            reason_not = _fused_form(model, layer, homes, streamer, fusable)
        report.not_fused = reason_not or report.not_fused
        report.fused += reason_not is None
        planned.append((layer, _plan(streamer, layer, homes, reason_not is None)))
        report.expert_bytes += sum(home.nbytes for home in homes.values())
    for layer, streamed in planned:
        _swap(layer.glu, streamed)
        streamer.layers += 1
    report.streamed = len(planned)
    return report, streamer if planned else None


def detach(model: nn.Module, paths: set[str] | None = None) -> list[str]:
    """Give streamed layers (`paths`, None: all) their arrays back, loaded lazily; returns the
    paths of those that were streamed."""
    layers = [
        layer
        for layer in switch_layers(model)
        if streamed_of(layer.glu) and (paths is None or layer.path in paths)
    ]
    if layers:
        folder = streamed_of(layers[0].glu).streamer.folder  # type: ignore[union-attr]
        weights = _sanitised(model, _loaded(folder))
        for layer in layers:
            glu = layer.glu
            streamed = streamed_of(glu)
            assert streamed is not None
            for name, module in streamed.projections.items():
                for key in streamed.keys[name]:
                    module[key] = weights[f"{layer.path}.{name}.{key}"]
                glu[name] = module
            glu.__class__ = streamed.base
            streamed.streamer.layers -= 1
            del glu._thunder_stream
    return [layer.path for layer in layers]


def streamed_of(glu: nn.Module) -> StreamedLayer | None:
    """The streamed layer behind a SwitchGLU, or None."""
    return vars(glu).get("_thunder_stream")


def streamer_of(model: nn.Module) -> Streamer | None:
    """What the streamed layers of `model` share, or None if it has none."""
    for layer in switch_layers(model):
        streamed = streamed_of(layer.glu)
        if streamed is not None:
            return streamed.streamer
    return None


def _loaded(folder: Path) -> dict[str, mx.array]:
    weights: dict[str, mx.array] = {}
    for file in weight_files(folder):
        weights.update(mx.load(str(file)))  # type: ignore[arg-type]
    return weights


def _sanitised(model: nn.Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    return model.sanitize(dict(weights)) if hasattr(model, "sanitize") else weights


def _origins(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """For each parameter that the host takes from the checkpoint as it is, its tensor. What the
    model's `sanitize` makes anew (stacked, split or transposed experts) isn't there."""
    known = tensors(folder)
    weights = _loaded(folder)
    names = {id(array): name for name, array in weights.items()}
    return {
        path: known[names[id(array)]]
        for path, array in _sanitised(model, weights).items()
        if id(array) in names
    }


def _homes(layer: Layer, origins: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer's projections, by ``gate_proj.weight``.

    Raises:
        LookupError: the reason why the layer can't be streamed.
    """
    glu = layer.glu
    if type(glu) is not host_class("SwitchGLU"):
        raise LookupError(f"{type(glu).__name__} isn't mlx-lm's own SwitchGLU")
    if getattr(layer.parent, "sharding_group", None) is not None:
        raise LookupError("sharded over several machines")
    homes = {}
    for name in PROJECTIONS:
        projection = glu.get(name, nn.Module())
        if type(projection) not in (
            host_class("SwitchLinear"),
            host_class("QuantizedSwitchLinear"),
        ):
            raise LookupError(f"{name} is a {type(projection).__name__}")
        for key, array in arrays(projection).items():
            home = origins.get(f"{layer.path}.{name}.{key}")
            if home is None:
                raise LookupError(
                    "its experts aren't in the checkpoint as the model holds them: mlx_lm.convert "
                    "writes one that can be streamed"
                )
            if DTYPES.get(home.dtype) != array.dtype or home.shape != array.shape:
                raise LookupError(f"{home.name} is {home.dtype} {home.shape} in the checkpoint")
            homes[f"{name}.{key}"] = home
    return homes


def _plan(streamer: Streamer, layer: Layer, homes: dict[str, Tensor], fused: bool) -> StreamedLayer:
    parts: dict[str, Part] = {}
    sources: list[Source] = []
    experts = 0
    for name, home in homes.items():
        experts = home.shape[0]
        nbytes = home.nbytes // experts
        projection, key = name.split(".", 1)
        part, start, shape = name, 0, home.shape[1:]
        if fused and projection != "down_proj":
            part = f"gate_up.{key}"
            if key not in SHARED:
                start = 0 if projection == "gate_proj" else nbytes
                shape = (2 * shape[0], *shape[1:])
            elif projection == "up_proj":
                continue
        size = nbytes * (2 if shape != home.shape[1:] else 1)
        parts[part] = Part(home.dtype, tuple(shape), size)
        sources.append(Source(streamer.open(home.file), home.offset, nbytes, part, start))
    return StreamedLayer(streamer, layer.glu, sources, parts, experts)


def _fused_form(
    model: nn.Module,
    layer: Layer,
    homes: dict[str, Tensor],
    streamer: Streamer,
    verdicts: dict[tuple, str | None],
) -> str | None:
    """Whether gate and up of such a layer give the same bits together: tried out on its first
    experts, once for each form. Returns the reason if not."""
    key = fusion.form(layer.glu)
    if key not in verdicts:
        trial = _plan(streamer, layer, homes, False)
        bank = Bank(trial.parts, min(trial.experts, 16))
        slots = np.arange(bank.slots)
        trial._read(bank, slots, slots, Phase(calls=1))
        glu = on_bank(layer.glu, trial, bank)
        stacked = stack(glu.gate_proj, glu.up_proj)
        dtype = fusion.activation_dtype(model)
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        verdicts[key] = fusion.try_out(glu, stacked, dtype, on_gpu)
    return verdicts[key]


def on_bank(glu: nn.Module, streamed: StreamedLayer, bank: Bank) -> nn.Module:
    """A module of the host's class with everything of `glu` but its experts, which are the
    bank's."""
    twin = like(glu, streamed.base)
    for name, value in glu.items():
        twin[name] = value
    for name, module in streamed.projections.items():
        twin[name] = like(module, type(module))
    stacked = like(streamed.projections["gate_proj"], type(streamed.projections["gate_proj"]))
    for part, array in bank.arrays.items():
        projection, key = part.split(".", 1)
        (stacked if projection == "gate_up" else twin[projection])[key] = array
    if "weight" in stacked:
        join(twin["gate_proj"], twin["up_proj"], stacked)
    return twin


def _swap(glu: nn.Module, streamed: StreamedLayer) -> None:
    """Take the expert arrays out of `glu` and let it read them."""
    for name, module in streamed.projections.items():
        # The emptied modules stay, out of the parameters' sight, for their group size and bits.
        del glu[name]
        for key in streamed.keys[name]:
            del module[key]
    glu._thunder_stream = streamed
    glu.__class__ = _streamed_class(type(glu))


def _read_back(routes: mx.array) -> mx.array:
    """The router's result, computed."""
    try:
        mx.eval(routes)
    except ValueError as error:
        raise StreamingError(
            f"experts can't be streamed while mlx traces the model ({error})"
        ) from error
    return routes


@functools.cache
def _streamed_class(base: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        result: mx.array = self._thunder_stream.run(self, x, indices)
        return result

    return type(f"Streamed{base.__name__}", (base,), {"__call__": call, "__module__": __name__})


__all__ = ["CheckpointError", "Report", "Streamer", "StreamingError", "attach", "detach"]
