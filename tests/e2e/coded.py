"""State in less than full precision: calibrations, how far answers are off, contexts handed so."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.e2e.folder import wait_for
from tests.e2e.handing import begun, call, hand_over
from tests.harness.client import Json
from tests.harness.compare import Answer, differences
from tests.harness.fleet import Fleet
from tests.harness.models import Model, text_of
from tests.harness.server import INDEX, TRACE, Server

CALIBRATE = "import sys; from thunder_patches.cli import main; sys.exit(main(sys.argv[1:]))"
FAR = 0.3
"""How far int8 may be off in tiny random models, whose attention is peaked; see also tests/bench."""


def calibrated(fleet: Fleet, model: Model, cache: Path) -> Json:
    """What `thunder calibrate` told when it calibrated the model, whose calibration is now in `cache`.

    It runs in the host's environment, once for each model; others get a copy of what it wrote.
    """
    place = fleet.folder / f"calibrated-{model.digest()[:12]}"
    told = place / "told.json"
    if not told.exists():
        place.mkdir(exist_ok=True)
        text = place / "text.txt"
        text.write_text(text_of(3000, seed=0))
        run = subprocess.run(
            [
                *(str(fleet.python), "-c", CALIBRATE, "calibrate", str(model.path), str(text)),
                *("--no-bundled", "--json"),
            ],
            env={
                "THUNDER_CACHE_DIR": str(place),
                "PATH": "",
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": str(TRACE),
                "HARNESS_INDEX": INDEX.name,
            },
            cwd=place,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, run.stderr
        told.write_text(run.stdout)
    shutil.copytree(place / "calibrations", cache / "calibrations", dirs_exist_ok=True)
    return dict(json.loads(told.read_text()))


def worst(expected: Answer, found: Answer) -> float:
    """Largest difference of the logprobs up to the first other token."""
    return max(_off(expected, found), default=99.0)


def mean(expected: Answer, found: Answer, least: int = 4) -> float:
    """Mean difference of the logprobs up to the first other token, of which `least` come before it."""
    off = _off(expected, found)
    return sum(off) / len(off) if len(off) >= least else 99.0


def _off(expected: Answer, found: Answer) -> list[float]:
    same = [a == b for a, b in zip(expected.tokens, found.tokens, strict=True)]
    count = same.index(False) if False in same else len(same)
    return [abs(a - b) for a, b in zip(expected.logprobs[:count], found.logprobs, strict=False)]


def goes_on_near(
    server: Server, handed: Json, expected: Answer, messages: list[Json], precision: str
) -> Answer:
    """The answer that goes on from a coded context: near the exact one, not equal, and it says so.

    That the context was used is proven by the tokens that went through the model.
    """
    with server.watch() as calls:
        answer = server.chat(messages, thunder={"handoff": handed["id"]})
    assert answer.cached_tokens == handed["tokens"] and answer.prompt_tokens is not None
    run = calls.prompt_tokens_run(answer.usage["completion_tokens"])
    assert run == answer.prompt_tokens - handed["tokens"]
    assert answer.usage["context_pilot"]["lossy"] == precision
    assert differences(expected, answer), "a coded state gave the exact answer"
    return answer


def smaller(server: Server, read: list[Json], precision: str, share: float) -> Json:
    """A coded handoff, of less than this share of the exact one's bytes, and of other ones."""
    exact = hand_over(server, messages=read)
    handed = hand_over(server, messages=read, precision=precision)
    assert handed["precision"] == precision and handed["checksum"] != exact["checksum"]
    assert handed["tokens"] == handed["stored_tokens"] == exact["tokens"]
    assert handed["size"] < exact["size"] * share
    return handed


def in_another_process(
    fleet: Fleet, model: Model, cache: Path, read: list[Json], messages: list[Json]
) -> tuple[Server, Json, Path]:
    """A coded context whose cache is gone, in a second server that answers from it as the first did.

    Returns that server, the descriptor and the context's file.
    """
    server = fleet.server(model, cache_dir=cache)
    handed = hand_over(server, messages=read, precision="int8")
    first = server.chat(messages, thunder={"handoff": handed["id"]})
    server.stop()
    for kind in ("blocks", "snapshots"):
        for file in cache.glob(f"v1/{kind}/**/*.safetensors"):
            file.unlink()
    other = fleet.server(model, cache_dir=cache)
    again = other.chat(messages, thunder={"handoff": handed["id"]})
    assert (again.tokens, again.logprobs) == (first.tokens, first.logprobs)
    (file,) = cache.glob("v1/contexts/handoff/*.safetensors")
    return other, handed, file


def spoiled(file: Path) -> Iterator[None]:
    """Damages a file in one way after another."""
    whole = file.read_bytes()
    for damaged in (whole[:-9], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        file.write_bytes(damaged)
        yield


@contextlib.contextmanager
def promised(
    server: Server, body: Json, blocks: int
) -> Iterator[tuple[Json, str, Callable[[], bytes]]]:
    """A coded context of an answer that is still generated, once as many of its blocks are coded.

    Gives the promise, its route, and a way to read the rest of the answer.
    """
    with begun(server, body) as (id, rest):
        order = {"request": id, "precision": "int8", "wait": False}
        status, promise = call(server, "POST", "/thunder/handoff", order)
        assert (status, promise["state"]) == (202, "pending"), promise
        path = f"/thunder/handoff/{promise['id']}"

        def coded() -> Any:
            found = call(server, "GET", path)[1]
            return found.get("coded_blocks", 99) >= blocks and found

        told = wait_for(coded, "coded blocks")
        assert told.get("state") == "pending", told
        yield promise, path, rest
