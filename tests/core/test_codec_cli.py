"""``thunder calibrate`` on a model folder: a private file beside the cache, found again by identity."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from codec_samples import calibration_for

from tests.harness.models import ModelFactory, text_of
from thunder_patches.cache.record import TensorSpec
from thunder_patches.cli.doctor import _codec
from thunder_patches.codec.calibration import Shelf
from thunder_patches.config import Settings


def test_doctor_tells_what_was_measured(tmp_path: Path) -> None:
    wanted = replace(Settings(), codec="kvtc", cache_dir=tmp_path)
    (missing,) = _codec(wanted)
    assert missing.level == "warning" and "thunder calibrate" in missing.advice
    spec = TensorSpec("k0", "BF16", (2, 256, 16))
    row = {"kl": 0.0051, "top1": 0.961, "ratio": 12.4}
    known = calibration_for(spec, layers=1)
    Shelf(tmp_path / "calibrations").add(replace(known, measured={"held_out": {"balanced": row}}))
    (found,) = _codec(wanted)
    assert found.level == "ok" and "12.4 times smaller at KL 0.0051, 96.1%" in found.text
    assert list(_codec(replace(wanted, codec="auto"))) == []


@pytest.mark.slow
def test_calibrates_a_model_folder(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(text_of(3000, seed=0))
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from thunder_patches.cli import main; sys.exit(main(sys.argv[1:]))",
            "calibrate",
            str(ModelFactory(tmp_path / "models").get("qwen3").path),
            str(text),
            "--no-bundled",
            "--json",
        ],
        env={"THUNDER_CACHE_DIR": str(tmp_path / "cache"), "PATH": "", "HF_HUB_OFFLINE": "1"}
        | {"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    path = Path(found["file"])
    assert path.parent == tmp_path / "cache" / "calibrations"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    calibration = Shelf(path.parent).of_model(found["model"])
    assert calibration is not None and calibration.id == found["id"]
    assert set(calibration.steps) == {"high", "balanced", "small"}
    assert not list(path.parent.glob(".*.partial")), "the interrupted state is cleaned up"
