"""Train a small model of another architecture, so that codecs meet more than one real set of keys and values.

    python -m tests.bench.trained_model ARCHITECTURE FOLDER [--seconds 200]
    python -m tests.bench.codec_quality FOLDER

Package indexes carry hardly any small model but SmolLM2. This trains one, of the architectures below, in the
time that it is given (meant for a GPU; two CPU cores learn next to nothing in minutes), from what every
Python has: its own and its packages' source and their readmes, without the modules that `codec_quality`
predicts. It is a poor model, of code for the most part; but its keys and values are learnt ones, which those
of random weights are not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten

_COMMON = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 1536,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    # 4 query heads to a KV head of 128 channels, keys normalised before the rotation
    "qwen3": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
    },
    # multi-head latent attention: the cache holds 192 latent channels and 32 rotated ones a layer
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "kv_lora_rank": 192,
        "q_lora_rank": None,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "first_k_dense_replace": 8,
        "rope_theta": 1e5,
    },
}
VOCABULARY = 8192
LENGTH = 2048
BATCH = 8
PREDICTED = ("pydoc_data", "textwrap.py", "fractions.py")
"""Paths with one of these in them are what `codec_quality` predicts."""
MOST_BYTES = 120_000_000


def corpus() -> list[str]:
    """Files' texts: Python source and packages' readmes, in an order of chance."""
    roots = {sysconfig.get_paths()[name] for name in ("stdlib", "purelib")}
    roots |= {path for path in sys.path if Path(path).is_dir() and "python" in path}
    files = sorted({file for root in roots for file in Path(root).rglob("*.py")})
    prose = sorted({file for root in roots for file in Path(root).rglob("METADATA")})
    wanted = [file for file in files if not any(part in str(file) for part in PREDICTED)]
    np.random.default_rng(0).shuffle(wanted)  # type: ignore[arg-type]
    texts, size = [], 0
    for file in [*prose, *wanted]:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if size < MOST_BYTES:
            texts.append(text)
            size += len(text)
    return texts


def tokeniser(texts: list[str], path: Path) -> Any:
    """A byte-level BPE tokeniser of these texts, written to a file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts[::8], trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet)
    )
    made.save(str(path))
    return made


def batches(tokens: np.ndarray) -> Iterator[mx.array]:
    rng = np.random.default_rng(1)
    while True:
        starts = rng.integers(0, len(tokens) - LENGTH - 1, BATCH)
        yield mx.array(np.stack([tokens[i : i + LENGTH + 1] for i in starts]))


def loss(model: Any, batch: mx.array) -> mx.array:
    logits = model(batch[:, :-1]).astype(mx.float32)
    return nn.losses.cross_entropy(logits, batch[:, 1:], reduction="mean")


def train(model: Any, tokens: np.ndarray, seconds: float) -> tuple[int, float]:
    """Adam with a warm-up and a cosine down to nothing at the end of the time; steps and last loss."""
    optimiser = optim.AdamW(learning_rate=0.0, weight_decay=0.01)
    gradient = nn.value_and_grad(model, loss)
    state = [model.state, optimiser.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step(batch: mx.array) -> mx.array:
        found, slopes = gradient(model, batch)
        slopes, _ = optim.clip_grad_norm(slopes, 1.0)
        optimiser.update(model, slopes)
        return found

    started, done, smooth = time.monotonic(), 0, 0.0
    for batch in batches(tokens):
        spent = (time.monotonic() - started) / seconds
        if spent >= 1:
            break
        warm = min(1.0, (done + 1) / 50)
        optimiser.learning_rate = mx.array(1e-3 * warm * (0.5 + 0.5 * math.cos(math.pi * spent)))
        found = step(batch)
        mx.eval(found, state)
        smooth = 0.95 * smooth + 0.05 * found.item() if done else found.item()
        done += 1
        if done % 100 == 0:
            print(f"step {done}, {spent:.0%} of the time, loss {smooth:.3f}", flush=True)
    return done, smooth


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("architecture", choices=list(ARCHITECTURES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=200)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    texts = corpus()
    encoder = tokeniser(texts, options.folder / "tokenizer.json")
    ids = [encoding.ids for encoding in encoder.encode_batch(texts)]
    tokens = np.concatenate([np.array(part, np.int32) for part in ids])
    print(
        f"{len(texts)} files, {sum(map(len, texts)) / 1e6:.0f} MB, {len(tokens)} tokens", flush=True
    )
    name = options.architecture
    config = {"model_type": name, "vocab_size": VOCABULARY, **_COMMON, **ARCHITECTURES[name]}
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    size = sum(array.size for _, array in tree_flatten(model.parameters()))
    steps, end = train(model, tokens, options.seconds)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(options.folder / "model.safetensors"), weights, {"format": "mlx"})
    about = {
        "parameters": size,
        "tokens_seen": steps * BATCH * LENGTH,
        "loss": round(end, 3),
        "seconds": options.seconds,
        "device": str(mx.default_device()),
    }
    (options.folder / "trained.json").write_text(json.dumps(about) + "\n")
    (options.folder / "config.json").write_text(json.dumps(config) + "\n")
    print(json.dumps(about))


if __name__ == "__main__":
    main()
