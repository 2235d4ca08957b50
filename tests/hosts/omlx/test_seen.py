"""The page, its data and the metrics on oMLX, which asks for a key."""

from __future__ import annotations

import http.client
import importlib.util
import json
import time

from tests.e2e.test_page_data import chat
from tests.harness.models import Model, text_of
from tests.hosts.omlx.serving import OmlxFleet


def test_the_page_is_open_and_its_data_is_not(fleet: OmlxFleet, full: Model, seed: int) -> None:
    server = fleet.server(full, args=["--api-key", "secret"])

    def get(path: str, key: str = "") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        answer = connection.getresponse()
        found = answer.status, answer.read().decode()
        connection.close()
        return found

    assert get("/thunder/")[0] == 200
    for path in ("/thunder/status", "/thunder/metrics"):
        assert get(path)[0] == get(path, "wrong")[0] == 401
    assert get("/thunder/status", "secret")[0] == 200
    status, text = get("/thunder/metrics", "secret")
    if importlib.util.find_spec("prometheus_client") is None:
        assert status == 501 and "pip install" in text
    else:
        assert status == 200 and 'host="omlx"' in text


def test_requests_are_told_with_their_first_token(fleet: OmlxFleet, full: Model, seed: int) -> None:
    server = fleet.server(full)
    system = text_of(200, seed)
    for text in (1, 1, 2):
        server.chat(chat(system, text_of(20, seed + text)))
    time.sleep(2.1)
    told = json.loads(server.get("/thunder/status")[1])
    assert [each["result"] for each in told["requests"]] == ["partial", "full", "miss"]
    assert all(0 < each["first_token_s"] < 60 for each in told["requests"])
    assert told["requests"][0]["messages"] == 2 and told["requests"][0]["miss"]["reason"]
    last = {result: each["counts"][-1] for result, each in told["first_tokens"].items()}
    assert last == {"full": 1, "approximate": 0, "partial": 1, "miss": 1}
    assert any(each.get("systems") for each in told["prefixes"]["stretches"])
