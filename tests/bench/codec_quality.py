"""How much each codec saves of real keys and values, how fast, and what it does to the answers.

    python -m tests.bench.codec_quality MODEL [--calibration FILE] [--bases groups|layer|all]
        [--texts FOLDER] [--only PARTS] [--out FILE.json]

MODEL is a model folder; the calibration is made from the bundled texts when none is given, with KVTC's
bases for groups of layers, as the package has them, for each layer or for all layers together. FOLDER
holds documents that no tuning has seen, one a file. For each: 1,536 tokens of context in blocks of
256, rounded to BF16, go through a codec; then 255 tokens are predicted (KL divergence to the
prediction on exact KV, in nats; share of equal first choices) and 64 are continued greedily (tokens
before the first difference). Ratios are to BF16, first 4 tokens and
calibration left out; speeds are MB of BF16 a second of CPU time, all threads added up. Rows are added to
those of an existing FILE.json.
"""

from __future__ import annotations

import argparse
import fractions
import inspect
import json
import platform
import textwrap
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import mlx.core as mx
import numpy as np

from thunder_patches.cache.record import Buffer, Coded, Header, Record, TensorSpec, flat
from thunder_patches.codec import fit
from thunder_patches.codec.base import Refused
from thunder_patches.codec.calibration import Calibration
from thunder_patches.codec.codecs import CODECS
from thunder_patches.codec.kvtc import Kvtc
from thunder_patches.tensors.quality import Document, Quality, sink_bytes

BASES = {"groups": fit.MOST_FEATURES, "layer": 1, "all": 1 << 30}
"""Features that may share a basis, for KVTC's forms."""


class Zlib:
    """What lossless codecs are compared with."""

    name, lossy = "zlib", False

    def encode(self, spec: TensorSpec, data: Buffer, header: Header) -> Coded:
        return Coded("zlib", zlib.compress(flat(data), 6))

    def decode(self, spec: TensorSpec, coded: Coded, header: Header) -> Buffer:
        return zlib.decompress(coded.data)


class HostQuantised:
    """mlx-lm's own quantised KV (`mx.quantize`, groups of 64 along the channels), for comparison."""

    lossy = True

    def __init__(self, bits: int) -> None:
        self.bits, self.name = bits, f"mlx quantized {bits} bit"

    def encode(self, spec: TensorSpec, data: Buffer, header: Header) -> Coded:
        x = mx.array(np.frombuffer(data, np.uint8)).view(mx.bfloat16).reshape(spec.shape)
        parts = mx.quantize(x, group_size=64, bits=self.bits)
        back = mx.dequantize(*parts, group_size=64, bits=self.bits).view(mx.uint8)
        return Coded(self.name, bytes(sum(p.nbytes for p in parts)), {"back": np.array(back)})

    def decode(self, spec: TensorSpec, coded: Coded, header: Header) -> Buffer:
        return coded.params["back"].data


class Mixed:
    """One codec for keys and another for values."""

    lossy = True

    def __init__(self, keys: str, values: str) -> None:
        self.name = f"keys {keys}, values {values}"
        self._of = {"k": CODECS[keys], "v": CODECS[values]}

    def encode(self, spec: TensorSpec, data: Buffer, header: Header) -> Coded:
        return self._of[spec.name[0]].encode(spec, data, header)

    def decode(self, spec: TensorSpec, coded: Coded, header: Header) -> Buffer:
        return self._of[spec.name[0]].decode(spec, coded, header)


def codecs(calibration: Calibration) -> dict[str, Any]:
    """What is measured, by name; KVTC without its error limits, so that each row is one setting."""
    free = {q: dict.fromkeys(calibration.bases, float("inf")) for q in calibration.steps}
    open_ = replace(calibration, limits=free)
    rows: dict[str, Any] = {"zlib": Zlib()}
    rows |= {name: CODECS[name] for name in ("planes+lz4", "planes+zstd", "int8")}
    rows["keys int8, values int4"] = Mixed("int8", "int4")
    rows["int4"] = CODECS["int4"]
    rows |= {host.name: host for host in map(HostQuantised, (8, 4, 2))}
    for mode in ("steps", "groups"):
        for quality in ("high", "balanced", "small"):
            rows[f"kvtc {mode} {quality}"] = Kvtc(lambda id: open_, open_, quality, mode)
    return rows


def through(codec: Any, clock: list[float]) -> Callable[[Record], tuple[Record, int, int]]:
    """Put a record through a codec, adding the seconds of encoding and decoding to the clock.

    Raises:
        AssertionError: a codec that says it is lossless brings other bytes back.
    """

    def run(record: Record) -> tuple[Record, int, int]:
        header, start = record.header, time.process_time()
        pairs = list(zip(header.tensors, record.data, strict=True))
        coded = [codec.encode(spec, data, header) for spec, data in pairs]
        middle = time.process_time()
        back = [
            codec.decode(spec, tensor, header)
            for (spec, _), tensor in zip(pairs, coded, strict=True)
        ]
        clock[0] += middle - start
        clock[1] += time.process_time() - middle
        if not codec.lossy:
            assert all(flat(a) == flat(b) for a, b in zip(back, record.data, strict=True))
        return Record(header, tuple(back)), sum(c.nbytes for c in coded), sink_bytes(record, coded)

    return run


def measure(codec: Any, documents: Sequence[Document]) -> dict[str, Any]:
    clock = [0.0, 0.0]
    decoder = through(codec, clock)
    found = [d.measure(decoder) if codec.lossy else unchanged(d, decoder) for d in documents]
    whole = sum(spec.nbytes for d in documents for r in d.records for spec in r.header.tensors)
    greedy = [q.greedy for q in found if q.greedy is not None]
    return {
        "ratio": sum(q.raw for q in found) / sum(q.stored for q in found),
        "kl": float(np.mean([q.kl for q in found])),
        "kl_each": [q.kl for q in found],
        "ratio_each": [q.ratio for q in found],
        "top1": float(np.mean([q.top1 for q in found])),
        "greedy": float(np.mean(greedy)) if greedy else None,
        "greedy_each": greedy,
        "encode_mb_s": whole / 1e6 / max(clock[0], 1e-9),
        "decode_mb_s": whole / 1e6 / max(clock[1], 1e-9),
    }


def unchanged(document: Document, decoder: Callable[[Record], tuple[Record, int, int]]) -> Quality:
    """Of a codec that brings the same bytes back: the model needn't be asked."""
    sizes = [decoder(record)[1] for record in document.records]
    raw = sum(spec.nbytes for record in document.records for spec in record.header.tensors)
    return Quality(0.0, 1.0, document.greedy or None, sum(sizes), raw)


def refused(codec: Kvtc, documents: Sequence[Document]) -> float:
    """Share of tensors that a codec with its limits leaves to the next better one."""
    found = []
    for record in (record for document in documents for record in document.records):
        for spec, data in zip(record.header.tensors, record.data, strict=True):
            try:
                codec.encode(spec, data, record.header)
                found.append(0)
            except Refused:
                found.append(1)
    return float(np.mean(found))


def line(name: str, row: dict[str, Any]) -> str:
    greedy = "" if row["greedy"] is None else f"{row['greedy']:.1f}"
    return (
        f"| {name} | {row['ratio']:.2f} | {row['kl']:.5f} | {row['top1']:.3f} | {greedy} "
        f"| {row['encode_mb_s']:.0f} / {row['decode_mb_s']:.0f} |"
    )


def held_out(folder: Path | None) -> dict[str, str]:
    """Documents by name; without a folder, five that every checkout and every Python has."""
    if folder is not None:
        return {path.stem: path.read_text() for path in sorted(folder.glob("*.txt"))}
    chinese = Path(__file__).parent / "held_out" / "zh1.txt"
    return {
        "en1": topics["types"],
        "en2": topics["specialnames"],
        "zh1": chinese.read_text(),
        "code1": inspect.getsource(textwrap),
        "code2": inspect.getsource(fractions),
    }


def main() -> None:
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model
    from tokenizers import Tokenizer

    from thunder_patches.cli.calibrate import bundled_texts
    from thunder_patches.tensors.calibrate import calibrate

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--bases", choices=list(BASES), default="groups")
    parser.add_argument("--keep", type=Path, help="folder for the calibration that is made")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--only", default="", help="codecs whose names hold one of these: int,lz4")
    parser.add_argument("--greedy", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    model, _ = load_model(options.model)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    make_cache = lambda: make_prompt_cache(model)  # noqa: E731
    if options.calibration:
        calibration = Calibration.read(options.calibration)
    else:
        learned = [tokenizer.encode(text).ids for text in bundled_texts()]
        started, fit.MOST_FEATURES = time.monotonic(), BASES[options.bases]
        calibration = calibrate(model, make_cache, "bench", learned)
        if options.keep:
            calibration = calibration.write(options.keep)
        print(f"calibrated in {time.monotonic() - started:.0f} s: {calibration.measured}")
    texts = held_out(options.texts)
    documents = [
        Document(model, make_cache, tokenizer.encode(text).ids, greedy=options.greedy)
        for text in texts.values()
    ]
    print("documents:", ", ".join(texts))
    print("| codec | ratio | KL | top-1 | same greedy tokens | MB/s enc / dec |")
    print("|---|---|---|---|---|---|", flush=True)
    told = conditions(options.model, list(texts), calibration, options.greedy)
    known, rows = codecs(calibration), {}
    if options.bases != "groups":
        known = {f"{name}, bases: {options.bases}": codec for name, codec in known.items()}
    if options.out and options.out.exists():
        rows = json.loads(options.out.read_text())["rows"]
    for name in chosen(list(known), options.only):
        rows[name] = measure(known[name], documents)
        print(line(name, rows[name]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(told | {"rows": rows}, indent=1) + "\n")
    for quality in calibration.steps:
        codec = Kvtc(lambda id: calibration, calibration, quality)
        print(f"{quality}: {refused(codec, documents):.1%} of tensors above their error limit")


def chosen(names: list[str], only: str) -> list[str]:
    """The names that hold one of the parts, in the order of the parts."""
    found = [name for part in only.split(",") for name in names if part in name]
    return list(dict.fromkeys(found))


def conditions(
    model: Path, documents: list[str], calibration: Calibration, greedy: int
) -> dict[str, Any]:
    """What the figures were taken with."""
    return {
        "what": f"tests/bench/codec_quality.py on {model.name}, {mx.default_device()}",
        "python": platform.python_version(),
        "mlx": mx.__version__,
        "documents": documents,
        "context": 1536,
        "predicted": 255,
        "greedy": greedy,
        "calibration": dict(calibration.measured),
    }


if __name__ == "__main__":
    main()
