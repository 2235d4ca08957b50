"""Settings: environment first, then ``config.toml``, then defaults.

A bad value or an unknown name never raises: the default is used and ``Settings.problems`` says so,
because a typing mistake must not stop a server.
"""

from __future__ import annotations

import difflib
import functools
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

APP = "thunder_patches"
PREFIX = "THUNDER_"
MASTER = "THUNDER"
"""The switch for everything; its field is ``enabled``."""


def default_cache_dir() -> Path:
    """The platform's user cache directory for this package."""
    import platformdirs

    return platformdirs.user_cache_path(APP, appauthor=False)


def default_config_file() -> Path:
    """``config.toml`` in the platform's user config directory."""
    import platformdirs

    return platformdirs.user_config_path(APP, appauthor=False) / "config.toml"


def variable(name: str) -> str:
    """The environment variable of a setting: ``ssd_cache`` -> ``THUNDER_SSD_CACHE``."""
    return MASTER if name == "enabled" else PREFIX + name.upper()


class _ExpectedError(ValueError):
    """Its message says what a value should have been."""


def _switch(text: str) -> bool:
    match text.lower():
        case "1" | "true" | "on" | "yes":
            return True
        case "0" | "false" | "off" | "no":
            return False
    raise _ExpectedError("0 or 1")


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise _ExpectedError(f"a whole number from {low} to {high}")
        return value

    return parse


def _gigabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise _ExpectedError("a number of gigabytes above 0")
    return value


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in names:
            raise _ExpectedError("one of " + ", ".join(names))
        return text.lower()

    return parse


def _auto(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The same, or ``auto`` for None."""

    def parse_or_auto(text: str) -> Any:
        if text.lower() == "auto":
            return None
        try:
            return parse(text)
        except _ExpectedError as expected:
            raise _ExpectedError(f"auto or {expected}") from None

    return parse_or_auto


def _folder(text: str) -> Path:
    if not text:
        raise _ExpectedError("a folder")
    return Path(text).expanduser().absolute()


def _setting(default: Any, parse: Callable[[str], Any]) -> Any:
    return field(default=default, metadata={"parse": parse})


@dataclass(frozen=True)
class Settings:
    """What the user asked for. A field is a variable's name without ``THUNDER_``, lower case."""

    enabled: bool = _setting(True, _switch)
    ssd_cache: bool = _setting(True, _switch)
    ram_cache_mb: int | None = _setting(None, _auto(_whole(0, 1 << 24)))
    prefetch: bool = _setting(True, _switch)
    skip_logic: bool = _setting(True, _switch)
    approx_skip: bool = _setting(False, _switch)
    snapshot_stride: int = _setting(8, _whole(1, 4096))
    """Blocks between two snapshots of layers whose state can't be cut."""
    chunked_prefill: bool = _setting(True, _switch)
    progress: bool = _setting(True, _switch)
    context_pilot: bool = _setting(True, _switch)
    stabilize: bool = _setting(False, _switch)
    ushape: bool = _setting(False, _switch)
    codec: str = _setting("auto", _choice("auto", "raw", "lossless", "int8", "kvtc"))
    codec_quality: str = _setting("balanced", _choice("high", "balanced", "small"))
    """For lossy codecs only."""
    calibrate_after: int = _setting(0, _whole(0, 1 << 24))
    """Requests after which kvtc calibrates itself from stored prompts in idle time; 0: never."""
    moe_fusion: bool = _setting(True, _switch)
    expert_streaming: bool = _setting(False, _switch)
    handoff: bool = _setting(True, _switch)
    named_caches: bool = _setting(True, _switch)
    engine_thread: bool = _setting(True, _switch)
    cache_dir: Path = field(default_factory=default_cache_dir, metadata={"parse": _folder})
    cache_max_gb: float | None = _setting(None, _auto(_gigabytes))
    """None: a tenth of the disk, at most 50."""
    block_tokens: int = _setting(256, _whole(8, 8192))
    log: str = _setting("text", _choice("text", "json"))
    allow_untested: bool = _setting(False, _switch)
    show_text: bool = _setting(False, _switch)
    """Pieces of prompts in the status page and in the index of recent prompts."""
    memory_limit_gb: float | None = _setting(None, _auto(_gigabytes))
    """Memory that prompts may fill; None: the device's recommended working set and what is free."""
    salt: str = _setting("", str)
    distributed: bool = _setting(False, _switch)
    """Every rank of a distributed server has this plugin and these settings."""

    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where a field that isn't at its default came from, as the user wrote it:
    ``{"ssd_cache": "THUNDER_SSD_CACHE=0"}``."""
    problems: tuple[str, ...] = field(default=(), compare=False)
    """One sentence for each unknown name and bad value."""


_PARSERS: dict[str, Callable[[str], Any]] = {
    entry.name: entry.metadata["parse"] for entry in fields(Settings) if "parse" in entry.metadata
}
NAMES: tuple[str, ...] = tuple(_PARSERS)
"""The settings' names, in the order of the fields."""


def load(environ: Mapping[str, str], file: Path | None = None) -> Settings:
    """Settings from `environ` and the TOML `file` (None or a missing file: environment only).

    Keys of the file are the field names (``ssd_cache = false``). Never raises.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    problems: list[str] = []

    def take(name: str, text: str, said: str) -> None:
        try:
            values[name] = _PARSERS[name](text.strip())
            sources[name] = said
        except _ExpectedError as expected:
            problems.append(f"{said}: expected {expected}; not used")

    for key, value in _read_file(file, problems).items():
        if key not in _PARSERS:
            nearest = _nearest(key)
            hint = f"; did you mean {nearest}?" if nearest else ""
            problems.append(f"{key} in {file} is not a setting{hint}")
        elif isinstance(value, bool | int | float | str):
            text = str(int(value)) if isinstance(value, bool) else str(value)
            take(key, text, f"{key} = {text} in {file}")
        else:
            problems.append(f"{key} in {file}: expected one value, found {type(value).__name__}")

    known = {variable(name): name for name in NAMES}
    for key, text in environ.items():
        if key in known:
            shown = "***" if known[key] == "salt" else text
            take(known[key], text, f"{key}={shown}")
        elif key.startswith(PREFIX):
            nearest = _nearest(key.removeprefix(PREFIX).lower())
            hint = f"; did you mean {variable(nearest)}?" if nearest else ""
            problems.append(f"{key} is not a setting{hint}")

    return Settings(**values, sources=sources, problems=tuple(problems))


def _read_file(file: Path | None, problems: list[str]) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{file} can't be read and is not used: {error}")
        return {}


def _nearest(name: str) -> str | None:
    """The setting that was probably meant."""
    return next(iter(difflib.get_close_matches(name, NAMES, n=1)), None)


@functools.cache
def settings() -> Settings:
    """The process's settings, read once; ``settings.cache_clear()`` has them read again."""
    return load(os.environ, default_config_file())
