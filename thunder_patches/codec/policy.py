"""Which codec each tensor of a record gets: when it is new, and when it has aged.

The default is never lossy. A record with a lossy tensor says so (`Stored.lossy`); the store keeps
that flag and never serves such a record to an exact look-up. Nothing is encoded a second time: the
rows of a snapshot stay exact, since they become part of the block that a longer prompt fills up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from thunder_patches.cache.record import Buffer, Header, Record, TensorSpec, flat

from .base import Codec, CodecError, Coded, Refused
from .calibration import Calibration, Shelf
from .codecs import CODECS, decode
from .kvtc import Kvtc, Numbers
from .layout import rows_of

Mode = Literal["auto", "raw", "lossless", "int8", "kvtc"]
Quality = Literal["high", "balanced", "small"]
UNCALIBRATED = "the model isn't calibrated, so its blocks stay exact; run: thunder calibrate MODEL"
WORTH_IT = 0.95  # a codec that leaves more than this of a tensor isn't used


class Counts(Protocol):
    def add(self, name: str, n: int = 1) -> None: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A record as it is written: one `Coded` for each of the header's tensors, in their order."""

    header: Header
    tensors: tuple[Coded, ...]
    lossy: str | None

    @property
    def nbytes(self) -> int:
        return sum(coded.nbytes for coded in self.tensors)


class Policy:
    """What the store calls. Safe in several threads; bytes in, bytes out, no MLX.

    Args:
        mode: `THUNDER_CODEC`. "auto": new records raw, aged ones lossless. "raw", "lossless": that.
            "int8", "kvtc": keys and values of blocks lossy, everything else lossless.
        quality: of lossy modes. "int8" keeps keys in 8 bits, and values in 8 or ("small") 4.
        shelf: where "kvtc" finds calibrations; without it there is none. See `use_model`.
        codecs: the codecs by name, "kvtc" left out.
        fast_disk: in mode "auto", whether new records stay raw.
        counts: told of `codec_fallbacks`, tensors for which the wanted codec wasn't good enough.
    """

    def __init__(
        self,
        mode: Mode = "auto",
        *,
        quality: Quality = "balanced",
        shelf: Shelf | None = None,
        codecs: Mapping[str, Codec] = CODECS,
        fast_disk: bool = True,
        counts: Counts | None = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(
                f"expected one of {', '.join(get_args(Mode))} as codec, found {mode!r}"
            )
        if quality not in get_args(Quality):
            raise ValueError(f"quality: expected one of {get_args(Quality)}, found {quality!r}")
        self.mode = mode
        self.quality = quality
        self.fast_disk = fast_disk
        self._shelf = shelf
        self._codecs = dict(codecs)
        if shelf is not None:
            self._codecs.setdefault("kvtc", Kvtc(shelf.get))
        self._models: dict[str, Kvtc] = {}
        self._met_lossy = False
        self._counts = counts

    @property
    def allows_lossy(self) -> bool:
        """Whether look-ups may be answered by lossy records."""
        return self.mode in ("int8", "kvtc")

    @property
    def lossy(self) -> str | None:
        """The lossy codec that state from the store may have gone through by now, if any."""
        may = self.mode == "int8" or self._met_lossy or bool(self._kvtc())
        return self.mode if self.allows_lossy and may else None

    def use_model(self, model: str) -> Calibration | None:
        """Encode with the newest calibration of the model with this identity from now on.

        Without one, "kvtc" leaves tensors lossless. Decoding needs no such call. In other modes
        nothing is looked for.
        """
        if self._shelf is None or self.mode != "kvtc":
            return None
        found = self._shelf.of_model(model)
        if found is not None:
            threading.Thread(target=found.prepare, name="thunder-bases", daemon=True).start()
        self._models[model] = Kvtc(self._shelf.get, found, self.quality)
        return found

    def is_calibrated(self, model: str) -> bool:
        """Whether "kvtc" can encode the blocks of a model that `use_model` was called for."""
        codec = self._models.get(model)
        return codec is not None and codec.calibrated

    def learn(self, calibration: Calibration) -> Calibration:
        """Keep a new calibration, and encode with it from now on; returns it with its id."""
        assert self._shelf is not None
        made = self._shelf.add(calibration)
        self.use_model(made.model)
        return made

    def describe(self) -> dict[str, Any]:
        """For the status: the setting, what it does now, and the calibrations with their quality."""
        known = [codec.calibration for codec in list(self._models.values())]
        missing = self.mode == "kvtc" and None in known
        return {
            "mode": self.mode,
            "quality": self.quality if self.allows_lossy else None,
            "lossy": self.lossy,
            "reason": UNCALIBRATED if missing else "",
            "calibrations": [{"id": c.id, "model": c.model, **c.measured} for c in known if c],
        }

    def encode(self, record: Record) -> Stored:
        """A new record as it goes to disk."""
        if self.mode == "raw" or (self.mode == "auto" and self.fast_disk):
            return self._stored(record, lambda spec: ())
        if self.mode in ("auto", "lossless"):
            return self._stored(record, self._lossless)
        return self._stored(record, lambda spec: self._lossy(spec, record.header))

    def ages(self, codecs: Iterable[str]) -> bool:
        """Whether `age` may help a record stored with these codecs: nothing is encoded twice."""
        return self.mode != "raw" and all(name == "raw" for name in codecs)

    def age(self, record: Record) -> Stored | None:
        """The record, smaller and still exact, for idle time; None when nothing is gained."""
        stored = self._stored(record, self._lossless)
        return stored if stored.nbytes < sum(s.nbytes for s in record.header.tensors) else None

    def decode(self, spec: TensorSpec, coded: Coded, header: Header) -> Buffer:
        """One tensor's bytes; raises CodecError, which the store treats as a bad file."""
        self._note(coded)
        return decode(spec, coded, header, self._codecs)

    def unpack(self, spec: TensorSpec, coded: Coded, header: Header) -> Numbers | None:
        """The first half of decoding "kvtc" (see `kvtc`), None for other codecs; CodecError."""
        codec = self._codecs.get(coded.codec)
        if isinstance(codec, Kvtc) and spec.nbytes:
            self._note(coded)
            return codec.unpack(spec, coded, header)
        return None

    def record(self, stored: Stored) -> Record:
        """All of a record decoded; raises CodecError."""
        header = stored.header
        if len(stored.tensors) != len(header.tensors):
            raise CodecError(f"expected {len(header.tensors)} tensors, found {len(stored.tensors)}")
        pairs = zip(header.tensors, stored.tensors, strict=True)
        return Record(header, tuple(self.decode(spec, coded, header) for spec, coded in pairs))

    def _lossless(self, spec: TensorSpec) -> tuple[str, ...]:
        return ("planes+zstd",)

    def _lossy(self, spec: TensorSpec, header: Header) -> tuple[str, ...]:
        rows = rows_of(header.layout).get(spec.name)
        if rows is None or not rows.attention or header.kind != "block":
            return self._lossless(spec)
        if self.mode == "kvtc":
            ready = self._kvtc()
            return ("kvtc", "int8", *self._lossless(spec)) if ready else self._lossless(spec)
        halved = self.quality == "small" and rows.role == "v"
        return ("int4" if halved else "int8", *self._lossless(spec))

    def _stored(self, record: Record, wanted: Callable[[TensorSpec], tuple[str, ...]]) -> Stored:
        header = record.header
        tensors = tuple(
            self._best(spec, data, header, wanted(spec))
            for spec, data in zip(header.tensors, record.data, strict=True)
        )
        used = (self._codecs[coded.codec] for coded in tensors)
        lossy = next((codec.name for codec in used if codec.lossy), None)
        return Stored(header, tensors, lossy)

    def _best(
        self, spec: TensorSpec, data: Buffer, header: Header, wanted: tuple[str, ...]
    ) -> Coded:
        """The first of the wanted codecs that takes the tensor and is worth it, else raw."""
        for i, name in enumerate(wanted if spec.nbytes else ()):
            found = self._encoded(name, spec, data, header)
            if found is not None and found.nbytes <= WORTH_IT * spec.nbytes:
                return found
            if self._counts is not None and i + 1 < len(wanted):
                self._counts.add("codec_fallbacks")
        return Coded("raw", flat(data))

    def _encoded(self, name: str, spec: TensorSpec, data: Buffer, header: Header) -> Coded | None:
        """The tensor in a codec, or None when that doesn't take it.

        A record doesn't say whose it is. Of several models' calibrations that of the right one codes
        it in fewest bytes, and is the only one to stay within its error limit on most.
        """
        codecs = self._kvtc() if name == "kvtc" else [self._codecs[name]]
        found = []
        for codec in codecs:
            with suppress(Refused):
                found.append(codec.encode(spec, data, header))
        return min(found, key=lambda coded: coded.nbytes, default=None)

    def _kvtc(self) -> Sequence[Codec]:
        """What "kvtc" encodes with: one codec for each model that is calibrated."""
        given = self._codecs.get("kvtc")
        if isinstance(given, Kvtc) and given.calibrated:
            return [given]
        return [codec for codec in list(self._models.values()) if codec.calibrated]

    def _note(self, coded: Coded) -> None:
        codec = self._codecs.get(coded.codec)
        self._met_lossy |= codec is not None and codec.lossy
