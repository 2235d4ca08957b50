"""``thunder cache`` beside a server that serves from the same folder."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import Any

from tests.contract.test_cli import CLI
from tests.e2e.steps import MISS, served
from tests.e2e.test_page_data import chat
from tests.harness.fleet import BLOCK, Fleet
from tests.harness.models import Model, text_of
from tests.harness.server import Server

NONCE = "Session id: 3f0a{:04d}-1111-4222-8333-444455556666\n"


def thunder(server: Server, *words: str, status: int = 0) -> dict[str, Any]:
    """The command of the server's own environment, on its folder."""
    environ = {**os.environ, "THUNDER_CACHE_DIR": str(server.cache_dir)}
    done = subprocess.run(
        [server.python, "-c", CLI, *words, "--json"],
        cwd=server.folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, done.stderr
    return dict(json.loads(done.stdout))


def test_it_looks_and_clears_while_the_server_serves(fleet: Fleet, full: Model, seed: int) -> None:
    server = fleet.server(full, env={"THUNDER_RAM_CACHE_MB": "0"})
    prompt = text_of(6 * BLOCK, seed)
    served(fleet, server, full, prompt=prompt, cached=MISS)
    served(fleet, server, full, prompt=prompt, cached=6 * BLOCK)
    time.sleep(1)
    whole = thunder(server, "cache", "stat")
    assert whole["blocks"] >= 6 and whole["snapshots"] >= 1
    checked = thunder(server, "cache", "verify")
    assert checked["records"] == whole["blocks"] + whole["snapshots"] and checked["bad"] == []
    deepest = max(thunder(server, "cache", "ls")["stretches"], key=lambda one: one["blocks"])
    one = thunder(server, "cache", "stat", deepest["key"])
    assert one["kind"] == "block" and one["tokens"] == BLOCK
    on = [f for f in thunder(server, "status")["features"].values() if f["state"] == "applied"]
    assert on

    assert thunder(server, "cache", "clear", "--yes")["records"] == checked["records"]
    served(fleet, server, full, prompt=prompt, cached=MISS)
    served(fleet, server, full, prompt=prompt, cached=6 * BLOCK)


def test_explain_tells_of_a_nonce_and_of_the_stabiliser(
    fleet: Fleet, full: Model, seed: int
) -> None:
    server = fleet.server(full, env={"THUNDER_SHOW_TEXT": "1"})
    system = text_of(8 * BLOCK, seed)
    for i in range(2):
        server.chat(chat(NONCE.format(i) + system, text_of(20, seed + 1)))
    server.stop()
    found = thunder(server, "cache", "explain", "--text", "--with-stabiliser")
    newest, oldest = found["misses"]
    assert oldest["code"] == "never_seen" and oldest["stabiliser"] == "no change"
    assert newest["role"] == "system" and "3f0a0001" in newest["now"] + newest["before"]
    assert newest["stabiliser"].startswith("reused further: ")
    stable = fleet.server(full, env={"THUNDER_STABILIZE": "1"})
    for i in range(2):
        answer = stable.chat(chat(NONCE.format(i) + system, text_of(20, seed + 1)))
    assert (answer.cached_tokens or 0) > 7 * BLOCK  # and so it does
