"""Fingerprints: what changes them, what doesn't, and that a live object is what was read."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from thunder_patches.patching import fingerprints

SOURCE = '''
def deco(f):
    return f


class A:
    @deco
    def method(self, a, *, b=1):
        """Text."""
        return a

    @staticmethod
    def still(a):
        return a

    @property
    def value(self):
        return 1


async def function(a):
    return a


def twice():
    return 1


def twice():
    return 2
'''
NAMES = ["A.method", "A.still", "A.value", "function", "twice", "A.none", "none", "None.method"]


def load(tmp_path: Path, source: str, name: str = "probe") -> tuple[Path, ModuleType]:
    file = tmp_path / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return file, module


def digest(tmp_path: Path, source: str, name: str = "A.method") -> str:
    file = tmp_path / "digest.py"
    file.write_text(source)
    return fingerprints.read(file, [name])[name].fingerprint


def test_reads_what_is_there_and_matches_the_live_objects(tmp_path: Path) -> None:
    file, module = load(tmp_path, SOURCE)
    found = fingerprints.read(file, NAMES)
    assert set(found) == set(NAMES[:5])
    assert len({source.fingerprint for source in found.values()}) == 5
    for name, source in found.items():
        owner, _, attribute = name.rpartition(".")
        live = vars(getattr(module, owner) if owner else module)[attribute]
        assert fingerprints.matches(live, file, source), name
    assert not fingerprints.matches(module.function, file, found["A.method"])
    assert not fingerprints.matches(print, file, found["function"])


def test_the_definition_in_force_counts(tmp_path: Path) -> None:
    one = "def twice():\n    return 2\n"
    assert digest(tmp_path, SOURCE, "twice") == digest(tmp_path, one, "twice")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self, a, *, b=1", "self, a, *, b=2"),
        ("self, a, *, b=1", "self, a, b=1"),
        ("self, a, *, b=1", "self, a, *, b=1, c=2"),
        ("    @deco\n", ""),
        ("Text.", "Other text."),
        ("return a\n\n    @static", "return (a)\n\n    @static"),
    ],
)
def test_a_change_in_the_target_changes_it(tmp_path: Path, old: str, new: str) -> None:
    assert old in SOURCE
    changed = SOURCE.replace(old, new, 1)
    assert digest(tmp_path, SOURCE) != digest(tmp_path, changed)


def test_place_and_indentation_do_not(tmp_path: Path) -> None:
    moved = "import os\n\n" + SOURCE.replace("async def function(a):\n    return a\n", "")
    spaced = SOURCE.replace("return a\n\n    @static", "return a   \n\n    @static")
    tops = SOURCE.replace("class A:", "class A:\n    x = 1\n")
    assert {digest(tmp_path, text) for text in (SOURCE, moved, spaced, tops)} == {
        digest(tmp_path, SOURCE)
    }


def test_file_that_is_no_python(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("def (")
    with pytest.raises(SyntaxError):
        fingerprints.read(file, ["a"])
