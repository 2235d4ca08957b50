"""Real hosts, every way to launch them, in fresh environments."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.conftest import QUICK, Environment, free_port

SCRIPT = "#!{python}\nimport sys\nfrom {module} import main\nsys.exit(main())\n"

MLX_LM = {
    "script": ["mlx_lm.server"],
    "script and subcommand": ["mlx_lm", "server"],
    "module and subcommand": ["python", "-m", "mlx_lm", "server"],
    "module": ["python", "-m", "mlx_lm.server"],
    "isolated module": ["python", "-I", "-m", "mlx_lm.server"],
}
OMLX = {"script": ["omlx", "serve"], "module": ["python", "-m", "omlx.cli", "serve"]}


def script(environment: Environment, name: str, module: str) -> None:
    """A console script as pip writes it."""
    file = environment.folder / "bin" / name
    file.write_text(SCRIPT.format(python=environment.python, module=module))
    file.chmod(0o755)


@contextlib.contextmanager
def running(
    environment: Environment, command: list[str], ready: str, env: dict[str, str] | None = None
) -> Iterator[list[str]]:
    """A server that has printed a line with `ready`; gives its lines so far."""
    command = [str(environment.folder / "bin" / command[0]), *command[1:]]
    server = subprocess.Popen(
        command,
        env=environment.environ({"HF_HUB_OFFLINE": "1", **QUICK, **(env or {})}),
        cwd=environment.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    timer = threading.Timer(90, server.kill)
    timer.start()
    lines: list[str] = []
    try:
        assert server.stdout is not None
        for line in server.stdout:
            lines.append(line.rstrip())
            if ready in line:
                break
        else:
            pytest.fail(f"{command} ended early:\n" + "\n".join(lines))
        yield lines
    finally:
        timer.cancel()
        server.kill()
        server.wait()


def statuses(environment: Environment) -> list[dict[str, object]]:
    """What `thunder status --json` would find."""
    code = (
        "import json; from thunder_patches.config import settings\n"
        "from thunder_patches.patching import report\n"
        "print(json.dumps(report.live_processes(settings())))"
    )
    found: list[dict[str, object]] = json.loads(environment.says(code))
    return found


def own_lines(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("thunder")]


@pytest.mark.parametrize("way", MLX_LM)
def test_mlx_lm_server(environment: Environment, way: str) -> None:
    script(environment, "mlx_lm.server", "mlx_lm.server")
    script(environment, "mlx_lm", "mlx_lm.cli")
    command = [*MLX_LM[way], "--port", "0"]
    with running(environment, command, "Starting httpd") as lines:
        [line] = own_lines(lines)
        assert " features on" in line and " 0 of " not in line
        [status] = statuses(environment)
        assert status["host"]["name"] == "mlx_lm"  # type: ignore[index]
        assert {"ssd_cache", "routes"} <= set(status["features"])  # type: ignore[call-overload]
    assert statuses(environment) == []


@pytest.mark.parametrize("way", MLX_LM)
def test_switched_off_or_without_site_the_server_is_stock(
    from_wheel: Environment, way: str
) -> None:
    script(from_wheel, "mlx_lm.server", "mlx_lm.server")
    script(from_wheel, "mlx_lm", "mlx_lm.cli")
    command = [*MLX_LM[way], "--port", "0"]
    with running(from_wheel, command, "Starting httpd", {"THUNDER": "0"}) as lines:
        assert own_lines(lines) == []
        assert statuses(from_wheel) == []


@pytest.mark.skipif(importlib.util.find_spec("omlx") is None, reason="omlx is not installed here")
@pytest.mark.parametrize("way", OMLX)
def test_omlx(environment: Environment, tmp_path: Path, way: str) -> None:
    script(environment, "omlx", "omlx.cli")
    (tmp_path / "models").mkdir()
    options = ["--model-dir", str(tmp_path / "models"), "--base-path", str(tmp_path / "base")]
    command = [*OMLX[way], *options, "--host", "127.0.0.1", "--port", str(free_port())]
    with running(environment, command, "startup complete") as lines:
        [line] = own_lines(lines)
        assert " features on" in line
        [status] = statuses(environment)
        assert status["host"]["name"] == "omlx"  # type: ignore[index]


EMBEDDED = """
import argparse, importlib, json, sys, threading, time

from thunder_patches.patching import catalogue


def raw(target):
    module, _, path = target.partition(":")
    owner = importlib.import_module(module)
    *owners, name = path.split(".")
    for each in owners:
        owner = getattr(owner, each)
    return vars(owner).get(name)


from thunder_patches.config import Settings

off = {f.name for f in catalogue.FEATURES if f.switch and not getattr(Settings(), f.switch)}
on = [p for p in catalogue.PATCHES if p.host == "mlx_lm" and p.feature not in off]
targets = sorted({p.target for p in on})
before = {target: raw(target) for target in targets}
import mlx_lm.server as server
args = argparse.Namespace(
    model=None, adapter_path=None, draft_model=None, num_draft_tokens=3, trust_remote_code=False,
    chat_template="", use_default_chat_template=False, pipeline=False, prompt_cache_size=2,
    prompt_cache_bytes=None, decode_concurrency=1, prompt_concurrency=1, prefill_step_size=64,
    kv_bits=None, kv_group_size=64, quantized_kv_start=0, allowed_origins=["*"], max_tokens=8,
    temp=0.0, top_p=1.0, top_k=0, min_p=0.0, chat_template_args={}, log_level="INFO",
)
imported = [t for t in targets if raw(t) is not before[t]]
provider = server.ModelProvider(args)
threading.Thread(target=server.run, args=("127.0.0.1", 0, provider), daemon=True).start()
from thunder_patches.patching import registry
for _ in range(600):
    time.sleep(0.05)
    if registry.active():
        break
serving = [t for t in targets if raw(t) is not before[t]]
registry.deactivate("mlx_lm")
after = [t for t in targets if raw(t) is not before[t]]
init = hasattr(server.LRUPromptCache.__init__, "_thunder_trigger")
stock = [t for t in targets if t not in serving]
print(json.dumps([imported, stock, after, init]), flush=True)
import os
os._exit(0)
"""


def test_a_script_that_runs_the_server_itself(from_wheel: Environment) -> None:
    done = from_wheel.run("-c", EMBEDDED, env=QUICK)
    assert done.returncode == 0, done.stderr
    assert own_lines(done.stderr.splitlines()), done.stderr
    # Importing patches nothing, serving patches every target, undoing leaves none.
    assert json.loads(done.stdout) == [[], [], [], False], done.stderr
