"""Tiny random-weight models in float32, made the same on every machine from a seed.

Each is a folder as mlx-lm loads it: config.json, model.safetensors, tokenizer.json with a chat
template. The weights are scaled so that answers depend on the whole prompt: attention is peaked,
logits are spread (a standard deviation of about 3), and the ids of special tokens and of bytes
outside ASCII are never the greedy choice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
IMAGE_TOKENS = ("<|image_start|>", "<|patch|>", "<|image_end|>")
"""Of mlx-lm's image processor; only the template "images" has them, in the last ids."""
VOCABULARY = 404  # what the words below train to; checked when written
WINDOW = 64

WORDS = (  # noqa: SIM905
    "time year people way day man life child world state hand part place case week point night "
    "home water room area money story fact month right study book eye job word side kind head "
    "line end law car city name team idea body back face door art war air the and that with"
).split()

# Qwen's conventions, shortened: thinking is kept only after the last user message, and the
# generation prompt opens a thinking marker where the template is the thinking one.
_TEMPLATE = """\
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}\
{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{% endif %}
{{- '# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- set text = message.content or '' %}
{%- if message.role == 'assistant' and '</think>' in text and loop.index0 < ns.last_user %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- text }}
{%- for tool_call in message.tool_calls or [] %}
{%- set tool_call = tool_call.function or tool_call %}
{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}THINK{% endif %}"""

_PARTS = """\
{%- if message.content is string %}{{- text }}{% else %}\
{%- for part in message.content %}\
{{- part.text if part.type == 'text' else '<|patch|>' }}\
{%- endfor %}{% endif %}"""

TEMPLATES = {
    "plain": _TEMPLATE.replace("THINK", ""),
    "images": _TEMPLATE.replace("THINK", "").replace("{{- text }}", _PARTS),
    "thinking": _TEMPLATE.replace(
        "THINK", "{% if enable_thinking | default(true) %}{{- '<think>\\n' }}{% endif %}"
    ),
}


def text_of(words: int, seed: int) -> str:
    """`words` words drawn by `seed`, a space before each: one token a word.

    Texts made so join without changing the tokens of either part.
    """
    rng = np.random.default_rng(seed)
    return "".join(f" {word}" for word in rng.choice(WORDS, size=words))


_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": _QWEN3,
    "llama": {**_QWEN3, "model_type": "llama"},
    "qwen3_next": {**_QWEN3, **_LINEAR, "model_type": "qwen3_next"},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            **_QWEN3,
            **_LINEAR,
            "model_type": "qwen3_5_moe_text",
            "rope_parameters": {
                "type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
        },
    },
    "gemma3": {
        **_QWEN3,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 1000.0,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
}


@dataclass(frozen=True)
class Spec:
    """What a model folder is made from; equal specs give equal bytes.

    Attributes:
        arch: a key of CONFIGS.
        seed: other seeds give other weights of the same shapes.
        template: a key of TEMPLATES.
        bits: None for float32, 4 or 8 for weights quantised in groups of 32.
        config: entries that replace those of the configuration (the text part where it has one).
    """

    arch: str
    seed: int = 0
    template: str = "thinking"
    bits: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def full_config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(json.dumps(CONFIGS[self.arch]))
        text = config.get("text_config", config)
        text |= {"vocab_size": VOCABULARY, **self.config}
        if self.bits:
            config["quantization"] = {"group_size": 32, "bits": self.bits}
        return config | {"eos_token_id": 0}


@dataclass(frozen=True)
class Model:
    """A model folder and its tokenizer."""

    path: Path
    spec: Spec

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.path / "tokenizer.json"))

    def tokens(self, text: str) -> list[int]:
        """The ids of a text, as the server's own tokenizer gives them."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def digest(self) -> str:
        """A digest of the folder's configuration and weights as they are now."""
        found = hashlib.sha256()
        for name in ("config.json", "model.safetensors"):
            found.update((self.path / name).read_bytes())
        return found.hexdigest()

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    def chat(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        """The prompt that the chat template makes of messages."""
        from jinja2 import Environment

        template = Environment(trim_blocks=True, lstrip_blocks=True).from_string(
            TEMPLATES[self.spec.template]
        )
        return template.render(messages=messages, tools=tools, add_generation_prompt=True)


class ModelFactory:
    """Makes model folders under one folder, each spec once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[str, Model] = {}

    def get(self, arch: str, **spec: Any) -> Model:
        """The model of this architecture; further arguments are those of Spec."""
        return self.make(Spec(arch, **spec))

    def make(self, spec: Spec) -> Model:
        name = f"{spec.arch}-{_digest(repr(spec))}"
        if name not in self._made:
            path = self.folder / name
            write_model(spec, path)
            self._made[name] = Model(path, spec)
        return self._made[name]

    def copy(self, model: Model, name: str) -> Model:
        """A folder of a test's own, to be changed in place."""
        path = self.folder / f"copy-{name}"
        write_model(model.spec, path)
        return Model(path, model.spec)


def write_model(spec: Spec, path: Path) -> None:
    """Writes the folder of a spec: configuration, weights, tokenizer and template."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(spec.full_config(), indent=1))
    _write_weights(spec, path / "model.safetensors")
    write_tokenizer(path, spec.template)


def replace_weights(model: Model, seed: int, *, keep_date: bool) -> None:
    """Other weights in the same file: the same size and, where asked, the same dates."""
    file = model.path / "model.safetensors"
    before = file.stat()
    _write_weights(replace(model.spec, seed=seed), file)
    if file.stat().st_size != before.st_size:
        raise AssertionError(f"expected {before.st_size} bytes, wrote {file.stat().st_size}")
    if keep_date:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def write_adapter(model: Model, path: Path, seed: int, scale: float = 8.0) -> Path:
    """A LoRA adapter of rank 4 for the attention layers, as `--adapter-path` takes it."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    parameters = {
        "rank": 4,
        "scale": scale,
        "dropout": 0.0,
        "keys": ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj"],
    }
    network, _ = load_model(model.path)
    network.freeze()
    layers = len(network.layers)
    linear_to_lora_layers(network, layers, parameters)
    tensors = {
        name: mx.array(_normal(name, value.shape, seed) / value.shape[0] ** 0.5)
        for name, value in tree_flatten(network.trainable_parameters())
    }
    path.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(path / "adapters.safetensors"), tensors)
    (path / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "num_layers": layers, "lora_parameters": parameters})
    )
    return path


def write_tokenizer(path: Path, template: str) -> None:
    """A byte-level BPE tokenizer of VOCABULARY entries, trained on the words of this file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    added = IMAGE_TOKENS if template == "images" else ()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(added),
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [f" {word}" * 8 for word in WORDS]
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in added])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise AssertionError(f"expected {VOCABULARY} tokens, got {tokenizer.get_vocab_size()}")
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "model_max_length": 1 << 20,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATES[template],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _write_weights(spec: Spec, file: Path) -> None:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten, tree_unflatten
    from mlx_lm.utils import _get_classes

    config = spec.full_config()
    model_class, args_class = _get_classes(config)
    network = model_class(args_class.from_dict(config))
    weights = {
        name: mx.array(_weight(name, value.shape, spec))
        for name, value in tree_flatten(network.parameters())
    }
    network.update(tree_unflatten(list(weights.items())))
    if spec.bits:
        nn.quantize(network, group_size=32, bits=spec.bits)
    # One writer for every mlx release; the file never exists half written.
    temporary = file.with_suffix(".new.safetensors")
    mx.save_safetensors(
        str(temporary), dict(tree_flatten(network.parameters())), metadata={"format": "mlx"}
    )
    temporary.replace(file)


def _weight(name: str, shape: tuple[int, ...], spec: Spec) -> np.ndarray:
    """One tensor's float32 values, from its name and the seed alone."""
    part = name.rsplit(".", 2)[-2] if "." in name else name
    values = _normal(name, shape, spec.seed)
    if part in ("q_norm", "k_norm"):
        peak = 0.8 if spec.arch == "gemma3" else 1.8  # gemma's norms multiply by 1 + weight
        return np.full(shape, peak, np.float32) + 0.1 * values
    if name.endswith("A_log"):
        # Decays between 0.5 and 0.999 a token: the state remembers hundreds of tokens.
        return np.log(np.geomspace(0.002, 0.5, int(np.prod(shape)), dtype=np.float32)).reshape(
            shape
        )
    if name.endswith("dt_bias"):
        return np.full(shape, 0.5, np.float32)
    if len(shape) == 1:
        center = 0.0 if spec.arch == "gemma3" and "norm" in part else 1.0
        return center + 0.1 * values
    if part == "embed_tokens":
        return values
    if part == "lm_head":
        values *= 3.0 / shape[-1] ** 0.5
        values[[*range(len(SPECIAL_TOKENS)), *_high_bytes()]] = 0.0
        return values
    if part == "conv1d":
        return values / shape[1] ** 0.5
    gain = 1.8 if spec.arch == "llama" and part in ("q_proj", "k_proj") else 1.0
    return values * np.float32(gain / shape[-1] ** 0.5)


def _high_bytes() -> list[int]:
    """Ids of the single bytes outside ASCII; the alphabet follows the special tokens in order."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    first = len(SPECIAL_TOKENS)
    return [first + i for i, char in enumerate(alphabet) if not "!" <= char <= "~"]


def _normal(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    rng = np.random.default_rng(np.frombuffer(key, np.uint32))
    return rng.standard_normal(shape, dtype=np.float32)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
