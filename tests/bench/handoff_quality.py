"""What a context in less than full precision does to the answers that go on from it, and what it saves.

    python -m tests.bench.handoff_quality MODEL [--texts FOLDER] [--context N] [--out FILE.json]

MODEL is a model folder, FOLDER holds documents, one a file (without it: three that every checkout and
every Python has). For each: N tokens of context, rounded to BF16, go through the precision as a handoff
does it; then 255 tokens of the same text are predicted and 64 are continued greedily. Told are the KL
divergence to the prediction on the exact context (nats), the perplexity of the continuation against the
exact one's, the share of equal first choices, the greedy tokens before the first difference, and bytes
against BF16. "mixed" is also made as large as uniform int8 and int4 are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.bench.codec_quality import held_out
from thunder_patches.cache.record import Coded, Record
from thunder_patches.codec.codecs import CODECS
from thunder_patches.codec.codecs import decode as decode_one
from thunder_patches.handoff import mixed
from thunder_patches.handoff.precision import decoded, encode
from thunder_patches.tensors.quality import Document

Encode = Callable[[Record], list[Coded]]


class Continued(Document):
    """A document that also tells the perplexity of its own next tokens."""

    def perplexity(self, logprobs: np.ndarray) -> float:
        wanted = np.asarray(self._next[1:])
        return float(np.exp(-logprobs[np.arange(len(wanted)), wanted].mean()))


def uniform(name: str) -> Encode:
    codec = CODECS[name]
    return lambda record: [
        codec.encode(spec, data, record.header)
        for spec, data in zip(record.header.tensors, record.data, strict=True)
    ]


def of_mixed(bits: float) -> Encode:
    return lambda record: encode(record, "mixed", bits=bits)


def as_large(document: Document, size: int) -> Encode:
    """Mixed precision with as many bits as make it just no larger than `size`."""
    low, high = 4.0, 16.0
    for _ in range(9):
        bits = (low + high) / 2
        fits = sum(c.nbytes for c in of_mixed(bits)(document.records[0])) <= size
        low, high = (bits, high) if fits else (low, bits)
    return of_mixed(low)


def measure(document: Continued, make: Encode) -> dict[str, Any]:
    stored = [0]

    def through(record: Record) -> tuple[Record, int, int]:
        coded = make(record)
        stored[0] = sum(c.nbytes for c in coded)
        if any(c.codec == "int4" for c in coded):
            pairs = zip(record.header.tensors, coded, strict=True)
            back = tuple(decode_one(spec, c, record.header) for spec, c in pairs)
            return Record(record.header, back), stored[0], 0
        return decoded(record.header, coded), stored[0], 0

    back, _, _ = through(document.records[0])
    logprobs, answer = document._run(document._with_rows([back]))
    exact = document._logprobs
    same = [a == b for a, b in zip(document._answer, answer, strict=True)]
    raw = sum(spec.nbytes for spec in back.header.tensors)
    return {
        "bytes": stored[0],
        "of_bf16": stored[0] / raw,
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
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--context", type=int, default=1536)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, _ = load_model(options.model)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, text in held_out(options.texts).items():
        document = Continued(
            model,
            lambda: make_prompt_cache(model),
            tokenizer.encode(text).ids,
            context=options.context,
            block=options.context,
            greedy=64,
        )
        sizes = {u: measure(document, uniform(u)) for u in ("int8", "int4")}
        found = sizes | {
            f"mixed, {mixed.BITS:g} bits": measure(document, of_mixed(mixed.BITS)),
            "mixed, as large as int8": measure(
                document, as_large(document, sizes["int8"]["bytes"])
            ),
            "mixed, as large as int4": measure(
                document, as_large(document, sizes["int4"]["bytes"])
            ),
        }
        for precision, row in found.items():
            rows.setdefault(precision, []).append(row)
            print(name, precision, {k: round(v, 5) for k, v in row.items()}, flush=True)
    table = {precision: mean(found) for precision, found in rows.items()}
    print("| precision | of BF16 | KL | perplexity | top-1 | greedy of 64 |")
    print("|---|---|---|---|---|---|")
    for precision, row in table.items():
        print(
            f"| {precision} | {row['of_bf16']:.3f} | {row['kl']:.5f} | {row['perplexity']:+.2%} "
            f"| {row['top1']:.3f} | {row['greedy']:.1f} |"
        )
    if options.out:
        options.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    main()
