"""What runs in this process and why: the start-up line and the status file.

The status file, ``<cache_dir>/run/<pid>.json``, is what ``thunder status`` reads, and has the form
of ``GET /thunder/status``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thunder_patches import __version__
from thunder_patches.config import Settings
from thunder_patches.observe.counters import NAMES
from thunder_patches.patching.patch import State, Verdict

if TYPE_CHECKING:
    from thunder_patches.patching.registry import Registry

REFRESH_S = 2.0
"""How old a status file may be."""

Section = Callable[[], Any]

_lock = threading.RLock()
_sections: dict[str, Section] = {}
_details: dict[str, Section] = {}
_notes: dict[str, Verdict] = {}
_registry: Registry | None = None
_writer: _Writer | None = None


def add_section(name: str, call: Section, *, detail: bool = False) -> None:
    """Put `call()` under `name` in the status. It runs on a thread of ours every few seconds: no
    MLX in it. What it raises is said in its place. A `detail` is told only to who asks the server
    itself: it is too long, or too dear, for the status file."""
    with _lock:
        (_details if detail else _sections)[name] = call


def note(feature: str, state: State | None, reason: str = "") -> None:
    """What a feature found out while running, such as `NOT_ELIGIBLE` for the loaded model. Shown
    instead of `APPLIED`; None takes it back."""
    with _lock:
        if state is None:
            _notes.pop(feature, None)
        else:
            _notes[feature] = Verdict(state, reason)


def status(registry: Registry | None = None, *, details: bool = False) -> dict[str, Any]:
    """The status, as JSON types, of `registry` or else of what `publish` made known."""
    registry = registry or _registry
    with _lock:
        sections = {**_sections, **_details} if details else dict(_sections)
    found: dict[str, Any] = {
        "version": __version__,
        "host": None,
        "features": {
            name: {"state": str(verdict.state), "reason": verdict.reason}
            for name, verdict in _verdicts(registry).items()
        },
        "cache": _empty_cache(),
        "model": {"identity": None, "family": None, "eligible": None, "reason": "no model loaded"},
        "problems": [],
    }
    if registry is not None:
        found["problems"] = list(registry.settings.problems)
        if registry.host is not None:
            found["host"] = {
                "name": registry.host_name,
                "distribution": registry.host.distribution,
                "version": registry.host.version,
                "fingerprint": registry.fingerprint,
            }
    for name, call in sections.items():
        try:
            found[name] = call()
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


def _verdicts(registry: Registry | None) -> dict[str, Verdict]:
    if registry is None:
        return {}
    verdicts = registry.current()
    with _lock:
        for name, verdict in _notes.items():
            if verdicts.get(name, Verdict(State.OFF)).state is State.APPLIED:
                verdicts[name] = verdict
    return verdicts


def _empty_cache() -> dict[str, Any]:
    tier = {"bytes": 0, "budget_bytes": 0, "blocks": 0}
    return {"ram": dict(tier), "ssd": dict(tier), "counts": dict.fromkeys(NAMES, 0)}


_UNSAID = (State.OFF, State.HOST_HAS_IT)


def startup_line(registry: Registry) -> str:
    """``thunder 0.1.0: 7 of 9 features on; prefetch off (THUNDER_PREFETCH=0)``.

    Features that are off by default or that the host has itself, and that nobody asked for, neither
    count nor show; of features that need another one, only that other one shows.
    """
    title = f"thunder {__version__}"
    if not registry.settings.enabled:
        return f"{title}: off ({registry.settings.sources['enabled']})"
    verdicts = _verdicts(registry)
    asked = registry.settings.sources
    counted = [
        feature
        for feature in registry.features
        if verdicts[feature.name].state not in _UNSAID or feature.switch in asked
    ]
    missing: dict[Verdict, list[str]] = {}
    for feature in counted:
        verdict = verdicts[feature.name]
        parent = verdicts.get(feature.requires, Verdict(State.APPLIED))
        if verdict.state is not State.APPLIED and parent.state is State.APPLIED:
            missing.setdefault(verdict, []).append(feature.name)
    on = sum(verdicts[feature.name].state is State.APPLIED for feature in counted)
    parts = [f"{title}: {on} of {len(counted)} features on"]
    for verdict, names in missing.items():
        reason = f" ({verdict.reason})" if verdict.reason else ""
        parts.append(f"{', '.join(names)} {verdict.state.replace('_', ' ')}{reason}")
    return "; ".join([*parts, *registry.settings.problems])


def publish(registry: Registry) -> None:
    """Say the start-up line and keep the status file up to date until the process ends."""
    global _registry, _writer
    line = startup_line(registry)
    if registry.settings.log == "json":
        line = json.dumps({"time": time.time(), "level": "info", "event": "start", "text": line})
    print(line, file=sys.stderr, flush=True)
    if not registry.settings.enabled:
        return
    with _lock:
        _registry = registry
        if _writer is None:
            _writer = _Writer(registry.settings)
            _writer.start()


def refresh() -> None:
    """Write the status file now, for instance before the process ends."""
    if _writer is not None:
        _writer.write()


def withdraw() -> None:
    """Remove the status file and forget the process's report."""
    global _registry, _writer
    with _lock:
        writer, _writer, _registry = _writer, None, None
        _sections.clear()
        _details.clear()
        _notes.clear()
    if writer is not None:
        writer.stop()


class _Writer:
    """Writes this process's status file when something changed, and removes it at the end."""

    def __init__(self, wanted: Settings) -> None:
        self._file = run_folder(wanted) / f"{os.getpid()}.json"
        self._pid = os.getpid()
        self._started = _start_time(self._pid)
        self._written: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thunder-report", daemon=True)

    def start(self) -> None:
        atexit.register(self.stop)
        self.write()
        self._thread.start()

    def stop(self) -> None:
        if os.getpid() != self._pid:  # a fork's exit is not ours
            return
        self._stopped.set()
        with self._lock, contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        while not self._stopped.wait(REFRESH_S):
            # Nothing in here may end the thread or reach the host.
            with contextlib.suppress(Exception):
                if _registry is not None:
                    _registry.check()
                self.write()

    def write(self) -> None:
        found = status()
        process = {"pid": self._pid, "started": self._started, "command": sys.argv[:1]}
        with self._lock, contextlib.suppress(OSError):
            if found == self._written or self._stopped.is_set():
                return
            for folder in (self._file.parent.parent, self._file.parent):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = self._file.with_suffix(f".{self._pid}.tmp")
            text = json.dumps(found | {"process": process, "updated": time.time()}, default=str)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as out:
                out.write(text)
            os.replace(temporary, self._file)
            self._written = found


def run_folder(wanted: Settings) -> Path:
    """Where the processes that share a cache folder leave their status files."""
    return wanted.cache_dir / "run"


def live_processes(wanted: Settings) -> list[dict[str, Any]]:
    """The status files of processes that still run, newest process first. Files that a killed
    process left are removed."""
    found = []
    for file in run_folder(wanted).glob("*.json"):
        try:
            status = json.loads(file.read_text(encoding="utf-8"))
            process = status["process"]
            alive = _start_time(process["pid"]) == process["started"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if alive:
            found.append(status)
        else:
            with contextlib.suppress(OSError):
                file.unlink()
    return sorted(found, key=lambda status: status["process"]["started"], reverse=True)


def _start_time(pid: int) -> float | None:
    """When a process started; tells it from a later one with the same number. None: gone."""
    import psutil

    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return None
