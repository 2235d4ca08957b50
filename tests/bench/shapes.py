"""Models of a given shape with random weights, for speed, and what every benchmark of servers needs."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thunder_patches.cli._play.blas import openblas, preload
from thunder_patches.cli._play.model import small_model
from thunder_patches.cli._play.texts import Count

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Shape:
    """A llama of float32 weights; head dimension 64.

    The default: 59 M parameters (237 MB) and 8 KiB of KV a token, so that at 8K tokens the weights
    weigh 3.5 times the KV. In an 8B model with 8 KV heads of 128 it is 15 times.
    """

    hidden: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    feed_forward: int = 2048

    def build(self, folder: Path) -> Path:
        """Write a model folder with the real small model's tokenizer and weights from a seed."""
        import mlx.core as mx
        from mlx.utils import tree_flatten
        from mlx_lm.models import llama

        folder.mkdir(parents=True)
        real = small_model("4bit")
        for name in TOKENIZER:
            shutil.copy(real / name, folder / name)
        config: dict[str, Any] = json.loads((real / "config.json").read_text())
        del config["quantization"]
        config |= {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.feed_forward,
            "max_position_embeddings": 1 << 17,
        }
        mx.random.seed(0)
        weights = dict(tree_flatten(llama.Model(llama.ModelArgs.from_dict(config)).parameters()))
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
        (folder / "config.json").write_text(json.dumps(config))
        return folder


def environment() -> dict[str, str]:
    """This process's environment with an OpenBLAS in front, where the system has one."""
    return {**preload(os.environ, openblas()), "HF_HUB_OFFLINE": "1"}


def counter(model: Path) -> Count:
    """Counts tokens as the model's tokenizer does."""
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(model)
    return lambda text: len(tokenizer.encode(text))
