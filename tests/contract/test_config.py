"""Settings: where they come from, and that no mistake in them stops anything."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from thunder_patches import config
from thunder_patches.config import NAMES, Settings, load

DESIGN_DEFAULTS = {
    "THUNDER": True,
    "THUNDER_SSD_CACHE": True,
    "THUNDER_RAM_CACHE_MB": None,
    "THUNDER_PREFETCH": True,
    "THUNDER_SKIP_LOGIC": True,
    "THUNDER_APPROX_SKIP": False,
    "THUNDER_SNAPSHOT_STRIDE": 8,
    "THUNDER_CHUNKED_PREFILL": True,
    "THUNDER_PROGRESS": True,
    "THUNDER_CONTEXT_PILOT": True,
    "THUNDER_STABILIZE": False,
    "THUNDER_USHAPE": False,
    "THUNDER_CODEC": "auto",
    "THUNDER_MOE_FUSION": True,
    "THUNDER_EXPERT_STREAMING": False,
    "THUNDER_HANDOFF": True,
    "THUNDER_NAMED_CACHES": True,
    "THUNDER_ENGINE_THREAD": True,
    "THUNDER_CACHE_MAX_GB": None,
    "THUNDER_BLOCK_TOKENS": 256,
    "THUNDER_LOG": "text",
    "THUNDER_ALLOW_UNTESTED": False,
    "THUNDER_SALT": "",
}


def test_defaults_are_the_promised_ones() -> None:
    plain = load({})
    names = {config.variable(name): name for name in NAMES}
    assert {key: getattr(plain, names[key]) for key in DESIGN_DEFAULTS} == DESIGN_DEFAULTS
    assert set(names) >= {*DESIGN_DEFAULTS, "THUNDER_CACHE_DIR"}
    assert plain == Settings()
    assert plain.cache_dir.name == "thunder_patches"
    assert plain.problems == () and plain.sources == {}


def test_every_setting_has_a_field_and_a_parser() -> None:
    assert [entry.name for entry in fields(Settings)] == [*NAMES, "sources", "problems"]


@pytest.mark.parametrize("text", ["0", "false", "OFF", " no "])
def test_switch_off(text: str) -> None:
    found = load({"THUNDER_SSD_CACHE": text})
    assert found.ssd_cache is False
    assert found.sources == {"ssd_cache": f"THUNDER_SSD_CACHE={text}"}


def test_environment_goes_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('ssd_cache = false\nblock_tokens = 64\ncodec = "raw"\nenabled = true\n')
    found = load({"THUNDER_BLOCK_TOKENS": "128"}, file)
    assert (found.ssd_cache, found.block_tokens, found.codec) == (False, 128, "raw")
    assert found.sources["ssd_cache"] == f"ssd_cache = 0 in {file}"
    assert found.problems == ()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("SSD_CACHE", "maybe", "expected 0 or 1"),
        ("BLOCK_TOKENS", "many", "expected a whole number from 8 to 8192"),
        ("BLOCK_TOKENS", "7", "expected a whole number from 8 to 8192"),
        ("RAM_CACHE_MB", "-1", "expected auto or a whole number"),
        ("CACHE_MAX_GB", "0", "expected auto or a number of gigabytes above 0"),
        ("CACHE_MAX_GB", "nan", "expected auto or a number of gigabytes above 0"),
        ("CODEC", "zip", "expected one of auto, raw"),
        ("CACHE_DIR", " ", "expected a folder"),
    ],
)
def test_a_bad_value_is_said_and_not_used(name: str, text: str, expected: str) -> None:
    found = load({f"THUNDER_{name}": text})
    assert found == Settings()
    [problem] = found.problems
    assert problem.startswith(f"THUNDER_{name}={text}: {expected}")


def test_an_unknown_name_is_said_with_the_nearest() -> None:
    found = load({"THUNDER_SSDCACHE": "0", "THUNDER_ZZZ": "1", "OTHER": "1"})
    assert found == Settings()
    assert found.problems == (
        "THUNDER_SSDCACHE is not a setting; did you mean THUNDER_SSD_CACHE?",
        "THUNDER_ZZZ is not a setting",
    )


def test_automatic_and_given_budgets() -> None:
    assert load({"THUNDER_CACHE_MAX_GB": "AUTO"}).cache_max_gb is None
    assert load({"THUNDER_CACHE_MAX_GB": "1.5"}).cache_max_gb == 1.5
    assert load({"THUNDER_RAM_CACHE_MB": "0"}).ram_cache_mb == 0


def test_the_salt_is_never_shown() -> None:
    found = load({"THUNDER_SALT": "secret"})
    assert found.salt == "secret"
    assert "secret" not in str(dict(found.sources))


@pytest.mark.parametrize(
    "text", ["not toml", "ssd_cache = [1]", "ssdcache = 1", b"\xff\xfe"], ids=repr
)
def test_a_bad_file_is_said_and_does_no_harm(tmp_path: Path, text: str | bytes) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    found = load({}, file)
    assert found == Settings()
    assert len(found.problems) == 1 and str(file) in found.problems[0]


def test_no_file_is_fine(tmp_path: Path) -> None:
    assert load({}, tmp_path / "none" / "config.toml").problems == ()
    assert load({}, tmp_path).problems != (), "a folder in its place is said"


def test_the_process_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config.settings.cache_clear()
    monkeypatch.setenv("THUNDER_BLOCK_TOKENS", "32")
    try:
        assert config.settings().block_tokens == 32
        monkeypatch.setenv("THUNDER_BLOCK_TOKENS", "64")
        assert config.settings().block_tokens == 32
    finally:
        config.settings.cache_clear()
