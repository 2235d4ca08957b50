"""`omlx serve` in the place of the harness's mlx_lm.server, so that the same cases run on it.

oMLX serves the models of a folder, loads one when it is first asked for, and tells no logprobs: they
come from a file that the harness's trace module writes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.harness.client import answer_of, defaults
from tests.harness.compare import Answer
from tests.harness.fleet import NO_HOST_CACHE, Fleet
from tests.harness.models import Model
from tests.harness.server import Server

NAME = "tiny"


class OmlxServer(Server):
    """`omlx serve`; see `Server` for the arguments."""

    def __init__(self, python: Path, model: Path | None, folder: Path, **options: Any) -> None:
        args: Sequence[str] = tuple(options.pop("args", ()))
        env = dict(options.pop("env", None) or {})
        if args[: len(NO_HOST_CACHE)] == NO_HOST_CACHE:
            # The plugin puts the host's cache out of use by itself.
            stock = ("--no-cache",) if env.get("THUNDER") == "0" else ()
            args = (*stock, *args[len(NO_HOST_CACHE) :])
        if "--prefill-step-size" in args:
            at = args.index("--prefill-step-size")
            env["HARNESS_PREFILL_STEP"] = args[at + 1]
            args = (*args[:at], *args[at + 2 :])
        models = folder / "models"
        models.mkdir(parents=True)
        settings = options.pop("settings", None)
        if settings:
            (folder / "base").mkdir()
            (folder / "base" / "settings.json").write_text(json.dumps(settings))
        if model is not None:
            (models / NAME).symlink_to(model)
        self.answers_file = folder / "answers.jsonl"
        env["HARNESS_ANSWERS"] = str(self.answers_file)
        where = ["--model-dir", str(models), "--base-path", str(folder / "base")]
        launch = ("-m", "omlx.cli", "serve")
        super().__init__(
            python, None, folder, args=[*where, *args], env=env, launch=launch, **options
        )
        self.fields = {"model": NAME}

    def _ask(self, path: str, body: dict[str, Any], timeout: float | None) -> Answer:
        start = self.answers_file.stat().st_size if self.answers_file.exists() else 0
        response = self.post(path, {**defaults(), "logprobs": None, **body}, timeout)
        with self.answers_file.open() as file:
            file.seek(start)
            rows = [json.loads(line) for line in file]
        if len({row["answer"] for row in rows}) > 1:
            rows = []  # other requests ran as well
        tokens = tuple(row["token"] for row in rows)
        logprobs = tuple(row["logprob"] for row in rows)
        return dataclasses.replace(answer_of(response), tokens=tokens, logprobs=logprobs)


class OmlxFleet(Fleet):
    """Servers of oMLX."""

    def _make(self, model: Model | None, **options: Any) -> Server:
        self._started += 1
        path = None if model is None else model.path
        return OmlxServer(self.python, path, self.folder / f"server-{self._started}", **options)
