"""Decides which features a host gets, applies their patches, watches and undoes them."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from thunder_patches.config import Settings, settings, variable
from thunder_patches.patching import catalogue, compat, fingerprints, guard, report
from thunder_patches.patching import host as hosts
from thunder_patches.patching.host import Host
from thunder_patches.patching.patch import Feature, Patch, State, Verdict
from thunder_patches.patching.target import Layer, Target

_READY = Verdict(State.PENDING, "applied when the server starts")


class Registry:
    """The features of one host in this process, each with a verdict."""

    def __init__(
        self,
        host_name: str,
        host: Host | None,
        wanted: Settings,
        patches: Sequence[Patch] = catalogue.PATCHES,
        features: Sequence[Feature] = catalogue.FEATURES,
    ) -> None:
        self.host_name = host_name
        self.host = host
        self.settings = wanted
        self.patches = [patch for patch in patches if patch.host == host_name]
        self.features: list[Feature] = []
        for feature in features:
            if host_name in feature.hosts and (
                feature.eligibility
                or any(patch.feature == feature.name for patch in self.patches)
                or any(parent.name == feature.requires for parent in self.features)
            ):
                self.features.append(feature)
        self.verdicts: dict[str, Verdict] = {}
        self.patch_verdicts: dict[str, Verdict] = {}
        self.fingerprint: str | None = None
        """One digest for what the host's targets look like; None where they can't be read."""
        self._sources: dict[str, fingerprints.Source] = {}
        self._targets: dict[str, Target] = {}
        self._layers: dict[str, list[tuple[Target, Layer]]] = {}
        self._lock = threading.RLock()

    # Deciding: reads files, changes nothing in the host.

    def decide(self) -> None:
        """Give every patch and feature a verdict: `PENDING` where it would be applied."""
        self._read_sources()
        for patch in self.patches:
            self.patch_verdicts[patch.id] = self._judge(patch)
        for feature in self.features:
            self.verdicts[feature.name] = self._judge_feature(feature)

    def _read_sources(self) -> None:
        if self.host is None:
            return
        for module in sorted({patch.module for patch in self.patches}):
            file = self.host.file(module)
            attributes = [patch.attribute for patch in self.patches if patch.module == module]
            try:
                found = fingerprints.read(file, attributes) if file else {}
            except (OSError, SyntaxError, UnicodeError):
                found = {}
            self._sources |= {f"{module}:{name}": source for name, source in found.items()}
        if self._sources:
            parts = (f"{key} {source.fingerprint}" for key, source in self._sources.items())
            self.fingerprint = fingerprints.combined(parts)

    def _judge_feature(self, feature: Feature) -> Verdict:
        off = self._switched_off(feature)
        if off is not None:
            return off
        if self.host is None:
            install = compat.hosts()[self.host_name]["install"]
            return Verdict(State.HOST_ABSENT, f"{self.host_name} is not installed ({install})")
        kept_out = _eligible(feature.eligibility, self.host)
        if kept_out is not None:
            return kept_out
        own = [self.patch_verdicts[p.id] for p in self.patches if p.feature == feature.name]
        for verdict in own:
            if verdict.state is not State.PENDING:
                return verdict
        parent = self.verdicts.get(feature.requires, _READY)
        if parent.state is not State.PENDING:
            return Verdict(parent.state, f"needs {feature.requires}: {parent.reason}")
        return _READY

    def _switched_off(self, feature: Feature) -> Verdict | None:
        for switch in ("enabled", feature.switch):
            if switch and not getattr(self.settings, switch):
                said = self.settings.sources.get(switch)
                default = f"not asked for; {variable(switch)}=1 turns it on"
                return Verdict(State.OFF, said or default)
        return None

    def _judge(self, patch: Patch) -> Verdict:
        host = self.host
        if host is None:
            return Verdict(State.HOST_ABSENT, f"{patch.host} is not installed")
        trust = self.settings.allow_untested
        build = f"{host.distribution} {host.version}"
        recorded = compat.fingerprints(host.distribution, host.version)
        if recorded is None and not trust:
            known = ", ".join(compat.recorded(host.distribution)) or "none"
            return Verdict(State.UNKNOWN_VERSION, f"{build} is not known here (known: {known})")
        if not trust and not _in_range(host.version, patch.versions):
            return Verdict(State.UNKNOWN_VERSION, f"{build} is outside {patch.versions}")
        source = self._sources.get(patch.target)
        if patch.adds:
            if source is not None:
                return Verdict(State.HOST_HAS_IT, f"{build} has {patch.target} itself")
        elif source is None:
            return Verdict(State.UNKNOWN_FINGERPRINT, f"{build} has no {patch.target}")
        elif not trust and source.fingerprint not in (recorded or {}).get(patch.target, ()):
            return Verdict(
                State.UNKNOWN_FINGERPRINT,
                f"{patch.target} is not that of a known {build} ({source.fingerprint[:8]})",
            )
        return _eligible(patch.eligibility, host) or _READY

    # Applying and undoing.

    def apply(self) -> None:
        """Decide, then apply every feature that is `PENDING`. Never raises for a patch's fault."""
        with self._lock:
            self.decide()
            waiting = [f for f in self.features if self.verdicts[f.name] == _READY]
            try:
                if waiting:
                    self._start_host()
            except Exception as error:
                for feature in waiting:
                    self.verdicts[feature.name] = _failure(error)
                waiting = []
            for feature in waiting:
                self._apply_feature(feature)
            self._tell_guard()

    def _start_host(self) -> None:
        """Let the host's adapter set itself up before the first patch."""
        name = f"thunder_patches.hosts.{self.host_name}"
        try:
            adapter = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.rpartition(".")[0]):
                raise
            return
        with contextlib.suppress(OSError):  # the adapter makes do without
            self.settings.cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        start = getattr(adapter, "start", None)
        if start is not None:
            start(self.settings)

    def _apply_feature(self, feature: Feature) -> None:
        patches = [patch for patch in self.patches if patch.feature == feature.name]
        parent = self.verdicts.get(feature.requires, Verdict(State.APPLIED))
        verdict = Verdict(State.APPLIED)
        if parent.state is not State.APPLIED:
            verdict = Verdict(parent.state, f"needs {feature.requires}: {parent.reason}")
        else:
            try:
                # Everything that can go wrong comes before the first change.
                wrappers = [_load(patch.wrapper) for patch in patches]
                targets = [self._live_target(patch) for patch in patches]
                for wrapper, target in zip(wrappers, targets, strict=True):
                    self._layers.setdefault(feature.name, []).append((target, target.add(wrapper)))
            except _ConflictError as conflict:
                verdict = Verdict(State.CONFLICT, str(conflict))
            except Exception as error:
                self._remove_layers(feature.name)
                verdict = _failure(error)
        self.verdicts[feature.name] = verdict
        self.patch_verdicts |= {patch.id: verdict for patch in patches}

    def _live_target(self, patch: Patch) -> Target:
        assert self.host is not None
        if patch.target in self._targets:
            return self._targets[patch.target]
        parent: Any = self.host.module(patch.module)
        *owners, name = patch.attribute.split(".")
        for owner in owners:
            parent = getattr(parent, owner)
        target = Target(parent, name)
        if patch.adds:
            if not target.absent:
                raise _ConflictError(f"{patch.target} was added by other code")
        else:
            file = self.host.file(patch.module)
            assert file is not None
            if not fingerprints.matches(target.original, file, self._sources[patch.target]):
                other = fingerprints.origin(target.original)
                # A host may patch what it stands on; that is part of its version.
                if other.partition(".")[0] != self.host.name:
                    raise _ConflictError(f"{patch.target} was patched before us, by {other}")
        self._targets[patch.target] = target
        return target

    def undo(self, feature: str | None = None) -> None:
        """Take the patches of `feature` (None: all) and of the features that need it off."""
        with self._lock:
            for entry in self.features:
                if (
                    feature in (None, entry.name, entry.requires)
                    and self.verdicts.get(entry.name, _READY).state in _HOOKED
                ):
                    self._remove_layers(entry.name)
                    undone = Verdict(State.OFF, "undone")
                    self.verdicts[entry.name] = undone
                    for patch in self.patches:
                        if patch.feature == entry.name:
                            self.patch_verdicts[patch.id] = undone
            self._tell_guard()

    def _remove_layers(self, feature: str) -> None:
        for target, layer in reversed(self._layers.pop(feature, [])):
            target.remove(layer)

    def _tell_guard(self) -> None:
        children = {
            feature.name: tuple(f.name for f in self.features if f.requires == feature.name)
            for feature in self.features
        }
        on = {name: verdict.state in _HOOKED for name, verdict in self.verdicts.items()}
        guard.set_features(on, children)

    # Watching.

    def check(self) -> None:
        """Notice plugins that patched our targets after us. A feature that lost one of its patches
        for good goes off as a whole."""
        with self._lock:
            for target in self._targets.values():
                target.settle()
            for feature, layers in self._layers.items():
                found = [(target, target.displaced_by()) for target, _ in layers]
                displaced = [(target, by) for target, by in found if by is not None]
                if not displaced:
                    if self.verdicts[feature].state is State.DISPLACED and guard.is_on(feature):
                        self.verdicts[feature] = Verdict(State.APPLIED)
                    continue
                # Name a target that is lost before one that is merely wrapped.
                target, (module, inside) = min(displaced, key=lambda entry: entry[1][1])
                name = f"{target.parent.__name__}.{target.name}"
                if inside:
                    reason = f"{name} was wrapped again by {module}; ours still runs inside"
                else:
                    reason = f"{name} was replaced by {module}; the feature is switched off"
                    guard.turn_off(feature, reason)
                self.verdicts[feature] = Verdict(State.DISPLACED, reason)

    def current(self) -> dict[str, Verdict]:
        """The verdict on each feature now, faults while running included."""
        with self._lock:
            verdicts = dict(self.verdicts)
        for name, verdict in verdicts.items():
            reason = guard.off_reason(name)
            if reason is not None and verdict.state is State.APPLIED:
                verdicts[name] = Verdict(State.FAILED, reason)
        return verdicts


_HOOKED = (State.APPLIED, State.DISPLACED)

_active: dict[str, Registry] = {}
_activating = threading.RLock()


def activate(host_name: str, server: dict[str, Any] | None = None) -> Registry:
    """Patch the host in this process, once. `server`: the globals of its server module, which runs
    as ``__main__`` under ``python -m``; None: it isn't loaded."""
    with _activating:
        if host_name in _active:
            return _active[host_name]
        host = hosts.find(host_name)
        if host is not None and server is not None:
            loaded = sys.modules[server["__name__"]]
            spec_name = getattr(server.get("__spec__"), "name", loaded.__name__)
            host.modules[spec_name] = loaded
        registry = Registry(host_name, host, settings())
        registry.apply()
        _active[host_name] = registry
    report.publish(registry)
    return registry


def deactivate(host_name: str) -> None:
    """Undo everything in this process: every host attribute is the host's own object again."""
    with _activating:
        registry = _active.pop(host_name, None)
        if registry is not None:
            registry.undo()
            report.withdraw()


def active() -> Registry | None:
    """The registry of the host that runs in this process, or None."""
    return next(iter(_active.values()), None)


class _ConflictError(Exception):
    """Another plugin came first."""


def _failure(error: Exception) -> Verdict:
    return Verdict(State.FAILED, f"{type(error).__name__}: {error}")


def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _eligible(path: str, host: Host) -> Verdict | None:
    """Ask an eligibility function; one that fails keeps its patch out."""
    if not path:
        return None
    try:
        return _load(path)(host)
    except Exception as error:
        return _failure(error)


def _in_range(version: str, allowed: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(allowed).contains(version, prereleases=True)
    except InvalidVersion:
        return False
