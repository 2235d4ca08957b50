"""Who may import whom: the contracts of pyproject.toml, and that they cover every package."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ("cache", "codec", "pilot", "handoff")
TENSOR_SIDE = ("tensors", "moe", "prefill")
LINT = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache"],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_contracts_are_kept() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


def test_contracts_cover_every_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    sources = [set(each.get("source_modules", ())) for each in settings["contracts"]]
    for group in (CORE, TENSOR_SIDE):
        there = {
            f"thunder_patches.{name}"
            for name in group
            if (ROOT / "thunder_patches" / name / "__init__.py").is_file()
        }
        assert there in sources


def test_contracts_can_break(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    wrong = {
        "boot.py": "import numpy",
        "config.py": "",
        "observe/__init__.py": "import mlx",
        "patching/__init__.py": "",
        "patching/trigger.py": "",
        "hosts/__init__.py": "",
        "cli/__init__.py": "import thunder_patches.hosts",
    }
    for name in (*CORE, *TENSOR_SIDE):
        if (ROOT / "thunder_patches" / name / "__init__.py").is_file():
            wrong[f"{name}/__init__.py"] = "def late():\n    import mlx_lm, thunder_patches.cli"
    for name, text in {"__init__.py": "", **wrong}.items():
        file = tmp_path / "thunder_patches" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    done = lint(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "0 kept, 6 broken" in done.stdout
