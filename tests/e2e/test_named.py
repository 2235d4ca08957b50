"""Named caches: a prefix that stays until it is dropped, by the routes of the server."""

from __future__ import annotations

import http.client
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.folder import CacheFolder, wait_for
from tests.e2e.handing import call, conversation, hand_over
from tests.e2e.steps import MISS, served
from tests.harness.client import Json
from tests.harness.fleet import Fleet
from tests.harness.models import Model, text_of
from tests.harness.server import Server

NEXT = [{"role": "user", "content": text_of(20, 77)}]
SMALL = {"THUNDER_CACHE_MAX_GB": "0.002", "THUNDER_RAM_CACHE_MB": "0"}
"""Room for some 2,000 tokens of the full-attention model."""


def pin(server: Server, name: str, **body: Any) -> Json:
    status, told = call(server, "POST", f"/thunder/caches/{name}", body)
    assert status == 200, told
    return told


@pytest.mark.one_hybrid
def test_pin_list_use_and_drop(fleet: Fleet, model: Model, seed: int) -> None:
    server = fleet.server(model)
    read = conversation(seed)
    told = pin(server, "agent-1.base", messages=read)
    assert (told["name"], told["expires"], told["precision"]) == ("agent-1.base", None, "exact")
    assert call(server, "GET", "/thunder/caches")[1]["caches"] == [told]
    assert call(server, "GET", "/thunder/caches/agent-1.base")[1] == told
    # Used as the prefix that it is, and by its name.
    whole = [*read, *NEXT]
    served(fleet, server, model, messages=whole, cached=range(told["tokens"], 999))
    answer = server.chat(NEXT, thunder={"cache": "agent-1.base"})
    assert answer.tokens == fleet.expected(model, messages=whole).tokens
    assert answer.raw["thunder"]["cache"]["used"] is True
    server.restart()
    assert call(server, "GET", "/thunder/caches")[1]["caches"] == [told]
    served(fleet, server, model, messages=whole, cached=range(told["tokens"], 999))
    assert call(server, "DELETE", "/thunder/caches/agent-1.base")[1]["released"] is True
    assert call(server, "GET", "/thunder/caches/agent-1.base")[0] == 404


def flood(server: Server, seed: int, count: int = 8) -> None:
    for i in range(count):
        server.complete(text_of(500, seed + 100 + i), max_tokens=1)
    wait_for(lambda: server.status()["cache"]["queue"]["blocks"] == 0, "the writes")


def test_what_is_pinned_outlives_the_rest(fleet: Fleet, full: Model, seed: int) -> None:
    """A folder too small for all: the pinned prefix stays, one that isn't goes (the control)."""
    server = fleet.server(full, env=SMALL)
    prompts = [text_of(200, seed), text_of(200, seed + 1)]
    served(fleet, server, full, prompt=prompts[0], cached=MISS)
    pin(server, "kept", prompt=prompts[1])
    flood(server, seed)
    assert server.status()["cache"]["counts"]["blocks_evicted"] > 0
    served(fleet, server, full, prompt=prompts[0] + " time", cached=MISS)
    served(fleet, server, full, prompt=prompts[1] + " time", cached=200)
    call(server, "DELETE", "/thunder/caches/kept")
    flood(server, seed + 50)
    served(fleet, server, full, prompt=prompts[1] + " year", cached=MISS)


def test_pinned_by_another_process(fleet: Fleet, full: Model, seed: int, tmp_path: Path) -> None:
    """Who evicts asks the folder what others keep there; also when the other one has ended."""
    prompt = text_of(200, seed)
    maker = fleet.server(full, cache_dir=tmp_path, env=SMALL)
    other = fleet.server(full, cache_dir=tmp_path, env=SMALL)
    pin(maker, "kept", prompt=prompt)
    handed = hand_over(maker, prompt=text_of(150, seed + 1))
    maker.kill()
    flood(other, seed)
    assert other.status()["cache"]["counts"]["blocks_evicted"] > 0
    served(fleet, other, full, prompt=prompt + " time", cached=200)
    answer = other.complete(" time", thunder={"handoff": handed["id"]})
    assert answer.cached_tokens == 150
    assert CacheFolder(tmp_path).bytes() < 2_000_000 * 1.1


def test_not_more_than_its_share(fleet: Fleet, full: Model, seed: int) -> None:
    """What is kept leaves room for what isn't; one context too many is refused."""
    server = fleet.server(full, env=SMALL)
    pin(server, "one", prompt=text_of(500, seed))
    status, told = call(server, "POST", "/thunder/caches/two", {"prompt": text_of(900, seed + 1)})
    assert (status, told["reason"]) == (507, "budget")
    assert [c["name"] for c in call(server, "GET", "/thunder/caches")[1]["caches"]] == ["one"]
    assert server.healthy()


@pytest.mark.parametrize("name", ["..", ".x", "A", "a%2fb", "a" * 65, "con.", "-a", "ä", "a b"])
def test_names(fleet: Fleet, full: Model, name: str) -> None:
    from urllib.parse import quote

    server = fleet.shared(full)
    path = f"/thunder/caches/{quote(name, safe='%')}"
    status, told = call(server, "POST", path, {"prompt": text_of(40, 1)})
    assert (status, told["reason"]) == (400, "name")
    assert call(server, "GET", path)[0] == 400


def test_each_key_has_its_own_names(fleet: Fleet, full: Model, seed: int) -> None:
    server = fleet.server(full, env={"THUNDER_SALT": "api-key"})
    mine, other = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
    body = {"prompt": text_of(60, seed)}
    assert call(server, "POST", "/thunder/caches/base", body, mine)[0] == 200
    assert call(server, "GET", "/thunder/caches", headers=other)[1] == {"caches": []}
    assert call(server, "DELETE", "/thunder/caches/base", headers=other)[0] == 404
    assert call(server, "GET", "/thunder/caches/base", headers=mine)[0] == 200


def test_time_to_live(fleet: Fleet, full: Model, seed: int, tmp_path: Path) -> None:
    import time

    server = fleet.server(full, cache_dir=tmp_path)
    pin(server, "short", prompt=text_of(60, seed), ttl=0.3)
    time.sleep(0.4)
    assert call(server, "GET", "/thunder/caches/short")[0] == 410
    pin(server, "other", prompt=text_of(60, seed))
    assert [f.name for f in tmp_path.glob("v1/contexts/named/*/*")] == ["other.json"]


def thunder(fleet: Fleet, cache_dir: Path, *words: str) -> str:
    """What the command prints, on a cache folder."""
    code = "import sys; from thunder_patches.cli import main; sys.exit(main())"
    done = subprocess.run(
        [str(fleet.python), "-c", code, *words],
        cwd=cache_dir,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cache_dir), "THUNDER_CACHE_DIR": str(cache_dir)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.one_hybrid
def test_from_one_machine_to_another(fleet: Fleet, model: Model, seed: int, tmp_path: Path) -> None:
    """Pinned, exported and imported by the command; then the same file by the routes."""
    here, there, third = (tmp_path / name for name in ("here", "there", "third"))
    server = fleet.server(model, cache_dir=here)
    read = conversation(seed)
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps({"messages": read}))
    url = f"http://127.0.0.1:{server.port}"
    thunder(fleet, here, "cache", "pin", "base", str(chat), "--server", url)
    assert "base" in thunder(fleet, here, "cache", "names")
    (told,) = json.loads(thunder(fleet, here, "cache", "names", "--json"))
    file = tmp_path / "base.safetensors"
    thunder(fleet, here, "cache", "export", "base", str(file))
    status, data = raw(server, "GET", "/thunder/caches/base?file")
    assert (status, len(data)) == (200, file.stat().st_size)
    server.stop()

    there.mkdir()
    thunder(fleet, there, "cache", "import", str(file), "--name", "brought")
    whole = [*read, *NEXT]
    server = fleet.server(model, cache_dir=there)
    served(fleet, server, model, messages=whole, cached=told["tokens"])
    status, listed = call(server, "GET", "/thunder/caches")
    assert [c["name"] for c in listed["caches"]] == ["brought"]
    thunder(fleet, there, "cache", "drop", "brought")
    assert call(server, "GET", "/thunder/caches")[1] == {"caches": []}
    server.stop()

    server = fleet.server(model, cache_dir=third)
    status, answer = raw(server, "POST", "/thunder/caches/sent", data)
    assert (status, json.loads(answer)["tokens"]) == (200, told["tokens"])
    served(fleet, server, model, messages=whole, cached=told["tokens"])
    status, answer = raw(server, "POST", "/thunder/caches/bad", data[:-7])
    assert (status, json.loads(answer)["reason"]) == (422, "file")


def raw(server: Server, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        headers = {"Content-Type": "application/octet-stream"}
        connection.request(method, path, body or None, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.one_hybrid
def test_a_branch_that_is_not_kept(fleet: Fleet, model: Model, seed: int) -> None:
    """``keep: false``: what is stored already serves, and the request leaves nothing behind."""
    server = fleet.server(model, host_cache=True)
    prompt = text_of(200, seed)
    branch = prompt + text_of(60, seed + 1)
    served(fleet, server, model, prompt=prompt, cached=MISS)
    for _ in range(2):
        answer = server.complete(branch, thunder={"keep": False})
        assert 150 < (answer.cached_tokens or 0) <= 200
    assert answer.tokens == fleet.expected(model, prompt=branch).tokens
    server.complete(branch)
    assert server.complete(branch).cached_tokens == 260
