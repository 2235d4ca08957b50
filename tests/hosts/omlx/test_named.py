"""Named caches under oMLX: pinned by the command, and from one machine to another."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.handing import call
from tests.e2e.steps import MISS, served
from tests.e2e.test_named import raw, thunder
from tests.harness.models import Model, text_of
from tests.hosts.omlx.serving import OmlxFleet
from tests.hosts.omlx.test_handoff import NEXT, reading


def test_from_one_machine_to_another(
    fleet: OmlxFleet, model: Model, seed: int, tmp_path: Path
) -> None:
    """Pinned, exported and imported by the command; then the same file by the routes."""
    here, there, third = (tmp_path / name for name in ("here", "there", "third"))
    server = fleet.server(model, cache_dir=here)
    read = reading(seed, system=100)
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps({"messages": read}))
    url = f"http://127.0.0.1:{server.port}"
    thunder(fleet, here, "cache", "pin", "base", str(chat), "--server", url)
    (told,) = json.loads(thunder(fleet, here, "cache", "names", "--json"))
    file = tmp_path / "base.safetensors"
    thunder(fleet, here, "cache", "export", "base", str(file))
    status, data = raw(server, "GET", "/thunder/caches/base?file")
    assert (status, len(data)) == (200, file.stat().st_size)
    server.stop()

    there.mkdir()
    thunder(fleet, there, "cache", "import", str(file), "--name", "brought")
    whole, cached = [*read, *NEXT], range(told["tokens"], told["tokens"] + 4)
    server = fleet.server(model, cache_dir=there)
    served(fleet, server, model, messages=whole, cached=cached)
    assert [c["name"] for c in call(server, "GET", "/thunder/caches")[1]["caches"]] == ["brought"]
    server.stop()

    server = fleet.server(model, cache_dir=third)
    served(fleet, server, model, prompt=text_of(40, seed + 9), cached=MISS)
    status, answer = raw(server, "POST", "/thunder/caches/bad", data[:-7])
    assert (status, json.loads(answer)["reason"]) == (422, "file")
    spoiled = data[:-7] + bytes([data[-7] ^ 1]) + data[-6:]
    assert raw(server, "POST", "/thunder/caches/bad", spoiled)[0] == 422
    served(fleet, server, model, messages=whole, thunder={"keep": False}, cached=MISS)
    status, answer = raw(server, "POST", "/thunder/caches/sent", data)
    assert (status, json.loads(answer)["tokens"]) == (200, told["tokens"])
    served(fleet, server, model, messages=whole, cached=cached)
    answered = server.chat(NEXT, thunder={"cache": "sent"})
    assert answered.tokens == fleet.expected(model, messages=whole).tokens


def test_files_need_the_key(fleet: OmlxFleet, full: Model, seed: int) -> None:
    server = fleet.server(full, args=["--api-key", "secret"])
    for method, path in (("GET", "/thunder/caches/x?file"), ("POST", "/thunder/caches/x")):
        assert raw(server, method, path, b"x")[0] == 401
    assert call(server, "GET", "/thunder/caches", headers={"Authorization": "Bearer secret"})[
        1
    ] == {"caches": []}
