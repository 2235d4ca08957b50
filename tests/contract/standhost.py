"""A stand-in host on disk: a package, its distribution, and a compat folder that knows it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from thunder_patches.config import Settings
from thunder_patches.patching import compat, fingerprints, guard, host
from thunder_patches.patching.patch import Feature, Patch
from thunder_patches.patching.registry import Registry

CORE = '''
class Engine:
    """The host's engine."""

    def step(self, value):
        return [f"step {value}"]

    @staticmethod
    def size(value):
        return [f"size {value}"]


class Handler:
    def do_GET(self):
        return ["get"]


def serve(value):
    return [f"serve {value}"]
'''

HOSTS = ("standhost",)
FEATURES = (
    Feature("base", "wraps two targets", hosts=HOSTS),
    Feature("child", "works through base", requires="base", hosts=HOSTS),
    Feature("static", "wraps a static method", hosts=HOSTS),
    Feature("routes", "adds a method", hosts=HOSTS),
)


def patch(feature: str, attribute: str, wrapper: str, **more: bool | str) -> Patch:
    """A patch of the stand-in, with a wrapper of this module."""
    fields = {
        "id": f"{feature}.{attribute}",
        "feature": feature,
        "host": "standhost",
        "module": "standhost.core",
        "attribute": attribute,
        "wrapper": f"{__name__}:{wrapper}",
        "versions": ">=1,<2",
    }
    return Patch(**(fields | more))  # type: ignore[arg-type]


PATCHES = (
    patch("base", "Engine.step", "base"),
    patch("base", "serve", "base"),
    patch("child", "Engine.step", "child"),
    patch("static", "Engine.size", "static"),
    patch("routes", "Handler.do_DELETE", "delete", adds=True),
)


def base(wrapped, instance, args, kwargs):  # type: ignore[no-untyped-def]
    return [*wrapped(*args, **kwargs), "base"]


def child(wrapped, instance, args, kwargs):  # type: ignore[no-untyped-def]
    return [*wrapped(*args, **kwargs), "child"]


def static(wrapped, instance, args, kwargs):  # type: ignore[no-untyped-def]
    return [*wrapped(*args, **kwargs), "static"]


def delete(wrapped, instance, args, kwargs):  # type: ignore[no-untyped-def]
    assert wrapped is None
    return [type(instance).__name__, *args]


class StandHost:
    """The stand-in as installed in `site`, and what a test needs of it."""

    def __init__(self, site: Path) -> None:
        self.site = site

    def install(self, core: str = CORE, version: str = "1.0", name: str = "standhost") -> None:
        """Write package and distribution, another one than before too."""
        package = self.site / "standhost"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text("")
        (package / "core.py").write_text(core)
        for old in self.site.glob("*.dist-info"):
            (old / "METADATA").unlink()
            old.rmdir()
        info = self.site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        importlib.invalidate_caches()
        for module in ("standhost", "standhost.core"):
            sys.modules.pop(module, None)

    def record(self, version: str = "1.0", name: str = "standhost") -> None:
        """Have compat/ know what is installed now under that name and version."""
        found = fingerprints.read(
            self.site / "standhost" / "core.py", [each.attribute for each in PATCHES]
        )
        targets = {f"standhost.core:{key}": [value.fingerprint] for key, value in found.items()}
        compat.file(name, version).write_text(json.dumps({"targets": targets}))

    @property
    def core(self) -> ModuleType:
        """The live module."""
        return importlib.import_module("standhost.core")

    def registry(self, patches: tuple[Patch, ...] = PATCHES, **wanted: object) -> Registry:
        """A fresh registry for what is installed."""
        settings = replace(Settings(), **wanted)  # type: ignore[arg-type]
        return Registry("standhost", host.find("standhost"), settings, patches, FEATURES)


@contextmanager
def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandHost]:
    """The stand-in, installed and recorded as version 1.0."""
    site, known = folder / "site", folder / "compat"
    site.mkdir()
    (known / "fingerprints").mkdir(parents=True)
    (known / "hosts.toml").write_text(
        '[hosts.standhost]\ndistributions = ["standhost", "fork"]\ninstall = "pip install it"\n'
    )
    monkeypatch.setattr(compat, "folder", lambda: known)
    monkeypatch.syspath_prepend(str(site))
    compat.hosts.cache_clear()
    guard.reset()
    stand = StandHost(site)
    stand.install()
    stand.record()
    yield stand
    compat.hosts.cache_clear()
    guard.reset()
    for module in ("standhost", "standhost.core"):
        sys.modules.pop(module, None)
