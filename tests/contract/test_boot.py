"""The start of the interpreter: light, silent, once, and only where it may."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.contract.conftest import QUICK, ROOT, Environment, make

FINDERS = (
    "import sys; print(sum(getattr(f, '__name__', '') == 'HostFinder' for f in sys.meta_path))"
)
COVERED = "import mlx_lm.server as s; print(hasattr(s.LRUPromptCache.__init__, '_thunder_trigger'))"
MODULES = "import sys; print(*sorted(sys.modules))"

LOOK = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
cache = importlib.import_module("mlx_lm.models.cache")
init = cache.LRUPromptCache.__init__
registry = sys.modules.get("thunder_patches.patching.registry")
print(json.dumps({
    "covered": hasattr(init, "_thunder_trigger"),
    "activated": bool(registry and registry.active()),
    "wrapt": "wrapt" in sys.modules,
    "loader": type(cache.__spec__.loader).__name__,
    "own": sorted(set(vars(cache.__spec__.loader)) - {"name", "path"}),
    "same": cache.__loader__ is cache.__spec__.loader,
}))
"""


def test_the_wheel_carries_what_it_must(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "thunder_patches.pth",
        "thunder_patches.start",
        "thunder_patches/compat/hosts.toml",
        "thunder_patches/compat/families.toml",
        "thunder_patches/compat/fingerprints/mlx-lm-0.32.2.json",
    } <= names
    assert not [name for name in names if name.startswith(("tests/", "compat/", "hatch_build"))]


def test_start_files_are_placed(environment: Environment) -> None:
    pth = (environment.site / "thunder_patches.pth").read_text()
    assert len(pth.splitlines()) == 1 and pth.startswith("import ")
    start = (environment.site / "thunder_patches.start").read_text().strip()
    module, _, function = start.partition(":")
    call = f"import {module} as m; print(callable(m.{function}))"
    assert environment.says(call) == "True"
    # Python reads one or the other.
    alone = f"import sys; sys.meta_path.pop(0); import {module} as m; m.{function}(); "
    assert environment.says(alone + COVERED) == "True"


def test_compat_is_found(environment: Environment) -> None:
    code = "from thunder_patches.patching import compat; print(*compat.recorded('mlx-lm'))"
    assert "0.32.2" in environment.says(code).split()


@pytest.mark.parametrize("option", [(), ("-I",), ("-E",), ("-O",)], ids=str)
def test_one_finder_in_every_interpreter(environment: Environment, option: tuple[str]) -> None:
    assert environment.says(FINDERS, *option) == "1"


def test_none_without_site(environment: Environment) -> None:
    assert environment.says(FINDERS, "-S") == "0"


def test_none_without_the_package(bare: Environment) -> None:
    assert bare.says(FINDERS) == "0"


def test_nothing_is_covered_when_switched_off(environment: Environment) -> None:
    for value in ("0", "off", "False"):
        assert environment.says(COVERED, env={"THUNDER": value, **QUICK}) == "False"
    assert environment.says(COVERED, env={"THUNDER": "1", **QUICK}) == "True"


def test_installing_again_adds_nothing(environment: Environment) -> None:
    again = "from thunder_patches import boot; boot.start(); boot.start(); " + FINDERS
    assert environment.says(again) == "1"


def test_two_start_files_do_no_harm(from_wheel: Environment) -> None:
    second = from_wheel.site / "thunder_patches_copy.pth"
    shutil.copy(from_wheel.site / "thunder_patches.pth", second)
    try:
        assert from_wheel.says(COVERED, env=QUICK) == "True"
    finally:
        second.unlink()


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_uninstalling_leaves_nothing(tmp_path: Path, wheel: Path, kind: str) -> None:
    what = [str(wheel)] if kind == "wheel" else ["--editable", str(ROOT)]
    gone = make(tmp_path / "gone", what)
    assert gone.says(FINDERS) == "1"
    pip = [sys.executable, "-m", "pip", "--python", str(gone.python)]
    subprocess.run([*pip, "uninstall", "-q", "-y", "thunder-patches"], check=True, timeout=240)
    assert gone.says(FINDERS) == "0"
    assert not [file.name for file in gone.site.iterdir() if "thunder" in file.name]


def test_no_module_is_loaded(environment: Environment, bare: Environment) -> None:
    added = set(environment.says(MODULES).split()) - set(bare.says(MODULES).split())
    assert added == set()


def test_a_torn_installation_leaves_the_host_alone(from_wheel: Environment) -> None:
    boot = from_wheel.site / "thunder_patches" / "boot.py"
    text = boot.read_text()
    boot.write_text("import nothing_of_that_name\n")
    try:
        assert (
            from_wheel.says("import mlx_lm.server as s; print(s.__name__)", env=QUICK)
            == "mlx_lm.server"
        )
    finally:
        boot.write_text(text)


def test_an_unrelated_process_says_nothing(environment: Environment) -> None:
    assert environment.says("import json, email, asyncio") == ""


@pytest.mark.parametrize(
    ("imports", "covered"),
    [((), False), (("mlx_lm",), False), (("mlx_lm.server",), True)],
    ids=["a model's module", "the package", "the server module"],
)
def test_a_script_that_imports_the_host_gets_no_patches(
    environment: Environment, imports: tuple[str, ...], covered: bool
) -> None:
    done = environment.run("-c", LOOK, *imports, env=QUICK)
    assert done.returncode == 0, done.stderr
    assert "thunder" not in done.stderr
    assert json.loads(done.stdout) == {
        "covered": covered,
        "activated": False,
        "wrapt": False,
        "loader": "SourceFileLoader",
        "own": [],
        "same": True,
    }


FINDING = """
import importlib.util, sys
spec = importlib.util.find_spec("mlx_lm.server")   # a look that loads nothing
assert spec.loader.get_source("mlx_lm.server")
class Other:
    def find_spec(self, name, path=None, target=None):
        seen.append(name)
        return None
seen = []
sys.meta_path.insert(0, Other())
sys.meta_path.append(Other())
import mlx_lm.server as server
assert seen.count("mlx_lm.server") in (1, 2), seen
print(hasattr(server.LRUPromptCache.__init__, "_thunder_trigger"), server.__spec__.origin)
"""


def test_other_finders_and_mere_looks_do_not_matter(environment: Environment) -> None:
    covered, origin = environment.says(FINDING, env=QUICK).split()
    assert covered == "True" and origin.endswith("server.py")


FAILING = """
import sys
def explode(*args): raise RuntimeError("ours")
from thunder_patches.patching import trigger
trigger.arm = explode
import mlx_lm.server
print(mlx_lm.server.__name__)
"""


def test_a_fault_of_ours_never_breaks_the_import(environment: Environment) -> None:
    done = environment.run("-c", FAILING, env=QUICK)
    assert done.stdout.strip() == "mlx_lm.server"
    assert done.stderr.strip() == "thunder: off, because of RuntimeError: ours"


def test_a_host_that_can_t_be_imported_raises_its_own_error(environment: Environment) -> None:
    package = environment.folder / "broken"
    (package / "mlx_lm").mkdir(parents=True, exist_ok=True)
    (package / "mlx_lm" / "__init__.py").write_text("")
    (package / "mlx_lm" / "server.py").write_text("raise KeyError('theirs')")
    code = f"""
import sys; sys.path.insert(0, {str(package)!r})
for _ in range(2):
    try:
        import mlx_lm.server
    except KeyError as error:
        print(error)
"""
    assert environment.says(code).split() == ["'theirs'", "'theirs'"]
