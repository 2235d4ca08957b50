"""What the status tells of requests, times and cached prefixes, from a server that really serves."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.fleet import BLOCK, Fleet
from tests.harness.models import Model, text_of
from tests.harness.server import Server

SECRET = "time year people way day man"


def chat(system: str, *texts: str) -> list[dict[str, Any]]:
    roles = ["user", "assistant"] * len(texts)
    said = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return [{"role": "system", "content": system}, *said]


def drawn(server: Server) -> dict[str, Any]:
    """The status with a map of all that is cached: it may be two seconds old."""
    time.sleep(2.1)
    return server.status()


def test_each_request_is_told_with_its_reason_and_its_first_token(
    fleet: Fleet, full: Model, seed: int
) -> None:
    server = fleet.server(full)
    system, question = text_of(200, seed), text_of(20, seed + 1)
    server.chat(chat(system, question))
    server.chat(chat(system, question))
    server.stream(messages=chat(system, text_of(20, seed + 2)))
    server.stream(prompt=text_of(5 * BLOCK, seed + 3))

    told = server.status()
    found = told["requests"]
    assert [each["result"] for each in found] == ["miss", "partial", "full", "miss"]
    assert [each["source"] for each in found] == [None, "ram", "ram", None]
    assert [each["messages"] for each in found] == [0, 2, 2, 2]
    assert all(0 < each["first_token_s"] < 60 for each in found)
    assert found[1]["miss"]["role"] == "user" and found[1]["miss"]["reason"]
    assert found[1]["system"] == found[3]["system"] != found[0]["system"]

    columns = zip(*told["over_time"]["rows"], strict=True)
    sums = dict(zip(told["over_time"]["columns"], columns, strict=True))
    counts = told["cache"]["counts"]
    assert sum(sums["requests"]) == 4 and sum(sums["hits"]) == 2
    assert sum(sums["skipped"]) == counts["tokens_skipped"] > 0
    assert sum(sums["computed"]) == counts["tokens_computed"]
    last = {result: each["counts"][-1] for result, each in told["first_tokens"].items()}
    assert last == {"full": 1, "approximate": 0, "partial": 1, "miss": 2}


def test_the_map_shows_the_shared_system_prompt_and_its_branches(
    fleet: Fleet, full: Model, seed: int
) -> None:
    server = fleet.server(full)
    assert drawn(server)["prefixes"]["stretches"] == []
    system = text_of(10 * BLOCK, seed)
    for i in range(3):
        server.chat(chat(system, text_of(4 * BLOCK, seed + 1 + i)))

    told = drawn(server)
    root, shared, *branches = told["prefixes"]["stretches"]
    assert (root["parent"], shared["parent"], shared["blocks"]) == (None, 0, 10)
    assert shared["systems"] == [told["requests"][0]["system"]]
    assert [each["parent"] for each in branches] == [1, 1, 1]
    assert all(each["blocks"] >= 4 and each["requests"] == 1 for each in branches)
    on_disk = list(Path(server.cache_dir, "v1").rglob("*.safetensors"))
    assert on_disk
    stretches = told["prefixes"]["stretches"]
    assert sum(each["blocks"] + each["snapshots"] for each in stretches) == len(on_disk)


@pytest.mark.parametrize("shown", ["0", "1"])
def test_no_text_of_a_prompt_is_told_unless_the_user_allows_it(
    fleet: Fleet, full: Model, seed: int, shown: str
) -> None:
    server = fleet.server(full, env={"THUNDER_SHOW_TEXT": shown})
    system = text_of(8 * BLOCK, seed)
    server.chat(chat(system, f"{SECRET}{text_of(40, seed + 1)}"))
    server.chat(chat(system, f"{SECRET}{text_of(40, seed + 2)}"))
    told = json.dumps(drawn(server))
    assert server.status()["process"]["text_shown"] is (shown == "1")
    assert (SECRET in told) is (shown == "1")
    server.stop()
    kept = (server.cache_dir / "prompts.jsonl").read_text()
    assert (SECRET in kept) is (shown == "1")


def test_the_status_file_leaves_the_details_out(fleet: Fleet, full: Model, seed: int) -> None:
    server = fleet.server(full)
    server.complete(text_of(50, seed))
    time.sleep(2.5)
    [file] = (server.cache_dir / "run").glob("*.json")
    told = json.loads(file.read_text())
    assert told["cache"]["counts"]["miss"] == 1
    assert not {"requests", "over_time", "prefixes"} & told.keys()
