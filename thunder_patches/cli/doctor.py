"""``thunder doctor``: is everything in place, and if not, what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from thunder_patches import __version__, config
from thunder_patches.config import Settings
from thunder_patches.patching import compat, host, report
from thunder_patches.patching.patch import State
from thunder_patches.patching.registry import Registry

from ._output import console, tell
from ._play.figures import folder_size

Level = Literal["ok", "note", "warning", "error"]

_COLOURS = {"ok": "green", "note": "dim", "warning": "yellow", "error": "red"}
_GIB = 1 << 30
_LITTLE_DISK = 2 * _GIB

_ADVICE = {
    State.UNKNOWN_VERSION: "install a known version, or try this one with THUNDER_ALLOW_UNTESTED=1",
    State.UNKNOWN_FINGERPRINT: "the host's code differs from the release of that name; reinstall "
    "it, or try this one with THUNDER_ALLOW_UNTESTED=1",
    State.CONFLICT: "remove the other plugin, or report the conflict",
    State.DISPLACED: "another plugin patched the same function later; remove one of the two",
    State.FAILED: "report this as a bug, with the server's log",
    State.HOST_ABSENT: "install the host into this environment",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Level
    about: str
    text: str
    advice: str = ""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Check the host, every patch, the cache folder, the settings. Exit status 1 on an error."""
    findings = list(examine(config.settings()))
    bad = any(finding.level == "error" for finding in findings)
    if as_json:
        told = [asdict(finding) for finding in findings]
        tell({"version": __version__, "ok": not bad, "findings": told})
    else:
        _show(findings)
    raise typer.Exit(int(bad))


def examine(wanted: Settings) -> Iterator[Finding]:
    """Everything there is to say, without importing a host."""
    yield Finding("ok", "package", f"thunder {__version__}, Python {sys.version.split()[0]}")
    yield from _copies()
    yield from _start(wanted)
    yield from _settings(wanted)
    yield from _mlx()
    yield from _hosts(wanted)
    yield from _servers(wanted)
    yield from _cache_folder(wanted)
    yield from _codec(wanted)
    yield from _memory(wanted)
    yield from _extras()


def _start(wanted: Settings) -> Iterator[Finding]:
    if not wanted.enabled:
        said = wanted.sources["enabled"]
        yield Finding("warning", "start", f"everything is off: {said}", "take that setting away")
    elif any(getattr(finder, "__name__", "") == "HostFinder" for finder in sys.meta_path):
        yield Finding("ok", "start", "starts with this environment's Python")
    else:
        yield Finding(
            "error",
            "start",
            f"does not start with {sys.executable}: thunder_patches.pth is in no site folder of it",
            "pip install thunder-patches again, with this Python; python -S never reads such files",
        )


def _copies() -> Iterator[Finding]:
    found = importlib.metadata.distributions(name="thunder-patches")
    places = sorted({str(each.locate_file("")) for each in found})
    if len(places) > 1:
        text = f"installed more than once: {', '.join(places)}; the first on the path runs"
        yield Finding("warning", "package", text, "pip uninstall thunder-patches from all but one")


def _settings(wanted: Settings) -> Iterator[Finding]:
    file = config.default_config_file()
    if wanted.sources:
        said = ", ".join(wanted.sources.values())
        yield Finding("ok", "settings", said)
    else:
        yield Finding("ok", "settings", f"all at their defaults; {file} may hold others")
    for problem in wanted.problems:
        yield Finding("warning", "settings", problem, f"correct it in the environment or in {file}")


def _mlx() -> Iterator[Finding]:
    version = _version("mlx")
    if version is None:
        yield Finding("error", "mlx", "mlx is not installed", "pip install mlx")
        return
    backends = [
        name for name in ("mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13") if _version(name)
    ]
    if not backends and sys.platform == "linux":
        yield Finding(
            "error",
            "mlx",
            f"mlx {version} has no backend",
            "pip install 'mlx[cpu]' or, for NVIDIA, pip install 'mlx[cuda13]'",
        )
    else:
        yield Finding("ok", "mlx", f"mlx {version} with {', '.join(backends) or 'its own backend'}")


def _hosts(wanted: Settings) -> Iterator[Finding]:
    found_any = False
    for name in compat.hosts():
        found = host.find(name)
        registry = Registry(name, found, wanted)
        if found is None or not registry.features:
            continue
        found_any = True
        registry.decide()
        known = ", ".join(compat.recorded(found.distribution)) or "none"
        yield Finding(
            "ok",
            name,
            f"{found.distribution} {found.version} in {found.root}, targets "
            f"{registry.fingerprint or 'unreadable'}; known versions: {known}",
        )
        for feature in registry.features:
            verdict = registry.verdicts[feature.name]
            yield _judged(feature.name, verdict.state, verdict.reason)
            for patch in registry.patches:
                if patch.feature == feature.name and verdict.state is not State.OFF:
                    judged = registry.patch_verdicts[patch.id]
                    yield Finding(
                        "ok" if judged.state is State.PENDING else "note",
                        f"  {patch.target}",
                        _words(judged.state, judged.reason if judged != verdict else ""),
                    )
    if not found_any:
        choices = "; ".join(f"{name}: {entry['install']}" for name, entry in compat.hosts().items())
        yield Finding("error", "host", f"no host is installed beside {sys.executable}", choices)


def _servers(wanted: Settings) -> Iterator[Finding]:
    processes = report.live_processes(wanted)
    for status in processes:
        about = f"process {status['process']['pid']}"
        features = status["features"]
        on = sum(feature["state"] == State.APPLIED for feature in features.values())
        yield Finding("ok", about, f"runs with {on} features on; thunder status shows more")
        for name, feature in features.items():
            state = State(feature["state"])
            if state in (State.CONFLICT, State.DISPLACED, State.FAILED):
                yield _judged(f"{about}: {name}", state, feature["reason"])
        model, cache = status["model"], status["cache"]
        if model.get("eligible") is False:
            said = f"{model.get('family')} is not cached: {model.get('reason')}"
            yield Finding("note", f"{about}: model", said)
        if problem := cache.get("problem") or cache.get("error"):
            advice = (
                "free disk space, or correct the folder's owner and mode; it then goes on alone"
            )
            yield Finding("warning", f"{about}: cache", str(problem), advice)
    if not processes:
        yield Finding("note", "servers", "none runs with this cache folder now")


def _judged(name: str, state: State, reason: str) -> Finding:
    match state:
        case State.APPLIED | State.PENDING | State.HOST_HAS_IT:
            level: Level = "ok"
        case State.OFF | State.NOT_ELIGIBLE | State.HOST_ABSENT:
            level = "note"
        case State.DISPLACED:
            level = "warning"
        case _:
            level = "error"
    return Finding(level, name, _words(state, reason), _ADVICE.get(state, ""))


def _words(state: State, reason: str) -> str:
    return state.replace("_", " ") + (f": {reason}" if reason else "")


def _cache_folder(wanted: Settings) -> Iterator[Finding]:
    folder = wanted.cache_dir
    there = next(path for path in (folder, *folder.parents) if path.exists())
    change = "choose another with THUNDER_CACHE_DIR"
    if there == folder and not folder.is_dir():
        yield Finding("error", "cache folder", f"{folder} is not a folder", change)
        return
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".thunder-doctor-"):
            pass
    except OSError as error:
        text = f"{folder} can't be written: {error.strerror}; the server runs without the disk"
        yield Finding("error", "cache folder", text, f"correct its owner and mode, or {change}")
        return
    yield Finding("ok", "cache folder", f"{folder} can be written")
    mode = stat.S_IMODE(there.stat().st_mode)
    if there == folder and mode & 0o077:
        text = f"{folder} has mode {mode:03o}: others on this machine may read what it holds"
        yield Finding("warning", "cache folder", text, f"chmod 700 {folder}")
    free = shutil.disk_usage(there).free
    text = f"{free / _GIB:.1f} GiB free"
    if free < _LITTLE_DISK:
        yield Finding("warning", "disk", f"only {text}", f"free some, or {change}")
    else:
        yield Finding("ok", "disk", text)
    if wanted.cache_max_gb is not None and wanted.cache_max_gb * _GIB > free + _held(folder):
        said = f"the cache may grow to {wanted.cache_max_gb:g} GiB, more than the disk has room for"
        yield Finding("warning", "disk", said, "lower THUNDER_CACHE_MAX_GB, or free some")


def _held(folder: Path) -> int:
    return folder_size(folder) if folder.is_dir() else 0


def _codec(wanted: Settings) -> Iterator[Finding]:
    """The calibrations that are there, with what they measured, if the codec is one that needs them."""
    if wanted.codec != "kvtc":
        return
    from thunder_patches.codec.calibration import Shelf

    found = Shelf(wanted.cache_dir / "calibrations").all()
    for one in found:
        measured = one.measured.get("held_out", {}).get(wanted.codec_quality)
        if measured is None:
            continue
        yield Finding(
            "ok",
            "kvtc",
            f"model {one.model[:16]}: {measured['ratio']} times smaller at KL {measured['kl']}, "
            f"{measured['top1']:.1%} of first choices the same (quality {wanted.codec_quality}, "
            f"text held out, calibration {one.id})",
        )
    if not found:
        said = "no model is calibrated, so that blocks stay exact"
        yield Finding("warning", "kvtc", said, "thunder calibrate MODEL")


def _memory(wanted: Settings) -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB available"
    yield Finding("ok", "memory", f"{text}, {os.cpu_count()} processors")
    if wanted.ram_cache_mb is not None and wanted.ram_cache_mb << 20 > memory.total // 2:
        said = f"THUNDER_RAM_CACHE_MB={wanted.ram_cache_mb} is more than half of the memory"
        yield Finding("warning", "memory", said, "lower it: the model needs the rest")


def _extras() -> Iterator[Finding]:
    if _version("prometheus-client") is None:
        said = "/thunder/metrics needs prometheus-client: pip install 'thunder-patches[metrics]'"
        yield Finding("note", "metrics", said)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _show(findings: list[Finding]) -> None:
    out = console(markup=True)
    width = max(len(finding.about) for finding in findings)
    for finding in findings:
        colour = _COLOURS[finding.level]
        out.print(f"[{colour}]{finding.level:<8}[/] ", end="")
        out.print(f"{finding.about:<{width}}  {finding.text}", markup=False, soft_wrap=True)
        if finding.advice and finding.level in ("warning", "error"):
            said = " " * (width + 11) + "-> " + finding.advice
            out.print(said, markup=False, soft_wrap=True)
