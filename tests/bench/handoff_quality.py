"""What a context in less than full precision does to the answers that go on from it, and what it saves.

    python -m tests.bench.handoff_quality MODEL [--calibration FILE] [--texts FOLDER] [--context N]
        [--only NAMES] [--out FILE.json]

MODEL is a model folder, FOLDER holds documents, one a file (without it: five that every checkout and
every Python has; those that are too short for N are left out). For each: N tokens of context, rounded to
BF16, go through the precision as a handoff does it; then 255 tokens of the same text are predicted and 64
are continued greedily. Told are the KL divergence to the prediction on the exact context (nats), the
perplexity of the continuation against the exact one's, the share of equal first choices, the greedy tokens
before the first difference, and bytes against BF16, exact first tokens included and the calibration left
out. kvtc, in its three qualities, needs a calibration. Documents are added to those of an existing
FILE.json. "mixed" is also made as large as int8, and with units chosen at random, the control: what is left
of the difference is worth of the choice.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.bench.codec_quality import held_out
from thunder_patches.cache.record import Coded, Record
from thunder_patches.codec.base import Codec
from thunder_patches.codec.calibration import Calibration
from thunder_patches.codec.codecs import CODECS, decode
from thunder_patches.codec.kvtc import Kvtc
from thunder_patches.codec.layout import rows_of
from thunder_patches.handoff import mixed
from thunder_patches.tensors.quality import Document

Encode = Callable[[Record], list[Coded]]


class Continued(Document):
    """A document that also tells the perplexity of its own next tokens."""

    def perplexity(self, logprobs: np.ndarray) -> float:
        wanted = np.asarray(self._next[1:])
        return float(np.exp(-logprobs[np.arange(len(wanted)), wanted].mean()))


def uniform(codec: Codec) -> Encode:
    return lambda record: [
        codec.encode(spec, data, record.header)
        for spec, data in zip(record.header.tensors, record.data, strict=True)
    ]


class Mixes:
    """One record in mixed precision, with as many bits as asked for."""

    def __init__(self, record: Record) -> None:
        names = rows_of(record.header.layout)
        pairs = zip(record.header.tensors, record.data, strict=True)
        self._data = dict(zip([s.name for s in record.header.tensors], record.data, strict=True))
        self._rows = [mixed.values_of(s, names[s.name].role, d) for s, d in pairs]
        self._gains = {rows.spec.name: mixed.gain(rows) for rows in self._rows}
        rng = np.random.default_rng(0)
        self._luck = {name: rng.random(gain.shape) for name, gain in self._gains.items()}

    def of(self, bits: float, *, by_luck: bool = False) -> Encode:
        chosen = mixed.choose(self._rows, bits, self._luck if by_luck else self._gains)
        return lambda record: [
            mixed.CODEC.encode_units(r, self._data[r.spec.name], chosen[r.spec.name])
            for r in self._rows
        ]

    def as_large(self, record: Record, size: int) -> Encode:
        """With as many bits as make it about as large; entropy coding leaves a little open."""
        nominal = 8 * size / sum(rows.values.size for rows in self._rows)
        first = sum(c.nbytes for c in self.of(nominal)(record))
        return self.of(nominal * size / first)


def measure(document: Continued, make: Encode, codecs: Mapping[str, Codec]) -> dict[str, Any]:
    record = document.records[0]
    coded = make(record)
    pairs = zip(record.header.tensors, coded, strict=True)
    back = Record(record.header, tuple(decode(s, c, record.header, codecs) for s, c in pairs))
    stored = sum(c.nbytes for c in coded)
    logprobs, answer = document._run(document._with_rows([back]))
    exact = document._logprobs
    same = [a == b for a, b in zip(document._answer, answer, strict=True)]
    raw = sum(spec.nbytes for spec in back.header.tensors)
    return {
        "bytes": stored,
        "of_bf16": stored / raw,
        "kl": float((np.exp(exact) * (exact - logprobs)).sum(-1).mean()),
        "perplexity": document.perplexity(logprobs) / document.perplexity(exact) - 1,
        "top1": float((exact.argmax(-1) == logprobs.argmax(-1)).mean()),
        "greedy": same.index(False) if False in same else len(same),
    }


def mean(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def main() -> None:
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--context", type=int, default=1536)
    parser.add_argument("--only", default="", help="documents: en1,zh1")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, _ = load_model(options.model)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    codecs: dict[str, Codec] = {**CODECS, mixed.CODEC.name: mixed.CODEC}
    qualities: dict[str, Encode] = {}
    if options.calibration:
        calibration = Calibration.read(options.calibration)
        for quality in calibration.steps:
            codecs["kvtc"] = codec = Kvtc(lambda id: calibration, calibration, quality)
            qualities[f"kvtc {quality}"] = uniform(codec)
    told: dict[str, Any] = {
        "what": f"tests/bench/handoff_quality.py on {options.model.name}, {mx.default_device()}",
        "mlx": mx.__version__,
        "context": options.context,
        "predicted": 255,
        "greedy": 64,
        "documents": {},
    }
    if options.out and options.out.exists():
        told["documents"] = json.loads(options.out.read_text())["documents"]
    for name, text in held_out(options.texts).items():
        ids = tokenizer.encode(text).ids
        if len(ids) < options.context + 255 or name not in (options.only or name).split(","):
            continue
        document = Continued(
            model,
            lambda: make_prompt_cache(model),
            ids,
            context=options.context,
            block=options.context,
            greedy=64,
        )
        record, bits = document.records[0], mixed.BITS
        mixes = Mixes(record)
        size = sum(c.nbytes for c in uniform(CODECS["int8"])(record))
        makes: dict[str, Encode] = {
            "exact": uniform(CODECS["raw"]),
            "int8": uniform(CODECS["int8"]),
            f"mixed, {bits:g} bits": mixes.of(bits),
            "int4": uniform(CODECS["int4"]),
            **qualities,
            f"random, {bits:g} bits": mixes.of(bits, by_luck=True),
            "mixed, as large as int8": mixes.as_large(record, size),
        }
        rows = told["documents"][name] = {}
        for precision, make in makes.items():
            row = rows[precision] = measure(document, make, codecs)
            print(name, precision, {k: round(v, 5) for k, v in row.items()}, flush=True)
            if options.out:
                options.out.write_text(json.dumps(told, indent=1) + "\n")
    print("| precision | of BF16 | KL | perplexity | top-1 | greedy of 64 |")
    print("|---|---|---|---|---|---|")
    for precision in makes:
        row = mean([found[precision] for found in told["documents"].values()])
        print(
            f"| {precision} | {row['of_bf16']:.3f} | {row['kl']:.5f} | {row['perplexity']:+.2%} "
            f"| {row['top1']:.3f} | {row['greedy']:.1f} |"
        )


if __name__ == "__main__":
    main()
