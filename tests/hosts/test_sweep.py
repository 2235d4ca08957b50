"""Exact reuse for every architecture of the installed mlx-lm, and the table that says for which.

`python -m tests.zoo.sweep --write` writes that table, compat/families.toml.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import pytest
from packaging.version import Version

from tests.zoo import configs, models, quantised
from tests.zoo import sweep as zoo

INSTALLED = Version(version("mlx-lm"))
VARIANTS = {
    "llama+sliding": "exact",
    "mixtral+max_kv_size": "no",
    "nemotron_h+moe": "exact",
    "minimax_m3_vl+dense": "exact",
}
QUANTISED = ("llama", "qwen3_moe", "llama+sliding", "gemma3_text", "qwen3_5")


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> None:
    """Equality to the bit is a fact of the CPU backend."""
    mx.set_default_device(mx.cpu)


def test_every_module_has_a_configuration() -> None:
    assert not models.unknown()
    assert not set(configs.CONFIGS) & set(configs.NOT_MODELS)


def test_table_holds_what_is_installed() -> None:
    listed = zoo.table()
    assert set(models.names()) <= set(listed)
    older = {name for name, entry in listed.items() if entry.since}
    assert all(Version(listed[name].since) > Version("0.31") for name in older)


def test_table_is_as_the_generator_writes_it() -> None:
    file = zoo.compat.folder() / zoo.TABLE
    assert file.read_text(encoding="utf-8") == zoo.render(zoo.table())


def test_nearly_all_are_exact() -> None:
    entries = zoo.table().values()
    assert sum(entry.result == "exact" for entry in entries) >= 0.95 * len(entries)


@pytest.mark.parametrize("name", models.names())
def test_family(name: str, tmp_path: Path) -> None:
    """Restored at block boundaries, inside the last block and at the end: the logits of a cold run."""
    outcome = zoo.sweep(name, tmp_path)
    print(zoo.line(name, outcome))
    assert not outcome.problems
    assert zoo.disagreement(outcome.entry, zoo.table().get(name)) == ""


@pytest.mark.parametrize("name", models.variants())
def test_variant(name: str, tmp_path: Path) -> None:
    """Other layer mixes of a family, and the window that `max_kv_size` puts over any model."""
    outcome = zoo.sweep(name, tmp_path)
    print(zoo.line(name, outcome))
    assert not outcome.problems
    assert outcome.entry.result == VARIANTS[name]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_kv(name: str, bits: int, tmp_path: Path) -> None:
    """Full, sliding, hybrid and mixed layers; the stock server fails on the sliding ones."""
    found = quantised.sweep(name, bits, tmp_path)
    assert found.pop("control") > zoo.SEEN
    assert len(found) >= 3
    assert set(found.values()) == {0.0}


def test_attention_sinks_are_never_quantised(tmp_path: Path) -> None:
    """The host's quantised attention refuses them with a clear error; nothing of ours changes that."""
    with pytest.raises(quantised.HostFails, match="does not support attention sinks"):
        quantised.sweep("gpt_oss", 8, tmp_path)


def test_a_last_bit_is_seen(tmp_path: Path) -> None:
    """The comparison itself: one key that is off by its last bit shows in the logits."""
    model = models.build("llama")
    ids = models.tokens(40)
    cache = models.make_cache("llama", model)
    zoo.run(model, cache, ids[:30], [])
    want = zoo.run(model, zoo.reference.load(zoo.reference.dump(cache)), ids[30:], [])
    bits = cache[0].keys.view(mx.uint32)
    bits[0, 0, 7, 3] ^= 1
    cache[0].keys = bits.view(mx.float32)
    assert zoo.difference(zoo.run(model, cache, ids[30:], []), want) > 0
