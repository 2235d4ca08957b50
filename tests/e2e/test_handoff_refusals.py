"""C24: what a context is not for is refused, clearly, and costs nothing else."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.handing import call, conversation, hand_over
from tests.e2e.steps import served
from tests.harness.client import HttpError
from tests.harness.compare import assert_same
from tests.harness.fleet import Fleet
from tests.harness.models import Model, ModelFactory, replace_weights, text_of, write_adapter
from tests.harness.server import Server

NEXT = [{"role": "user", "content": text_of(20, 77)}]


def refused(server: Server, status: int, words: str, **thunder: Any) -> None:
    """The request is refused with this status and words; with a text it is served from that."""
    with pytest.raises(HttpError) as caught:
        server.chat(NEXT, thunder=thunder)
    assert caught.value.status == status, caught.value.body
    assert words in json.loads(caught.value.body)["error"], caught.value.body
    answer = server.chat(NEXT, thunder={"fallback_text": text_of(30, 5), **thunder})
    told = next(iter(answer.raw["thunder"].values()))
    assert (told["used"], told["fallback"]) == (False, "text")
    assert words in told["error"]
    assert_same(server.chat([{"role": "user", "content": text_of(30, 5)}, *NEXT]), answer)


@pytest.mark.parametrize(
    "id", ["0" * 48, "x", "../../etc/passwd", "", 7, ["a"], "é" * 48, "0" * 47 + "/"]
)
def test_unknown_and_hostile_ids(fleet: Fleet, full: Model, id: Any) -> None:
    server = fleet.shared(full)
    refused(server, 404, "known" if id == "0" * 48 else "48 hex digits", handoff=id)


@pytest.mark.parametrize("path", ["x", "..%2f..%2fetc", "%00", "a" * 5000, "0" * 48])
def test_hostile_paths(fleet: Fleet, full: Model, path: str) -> None:
    server = fleet.shared(full)
    for method in ("GET", "DELETE", "POST"):
        status, told = call(server, method, f"/thunder/handoff/{path}", {})
        assert status == 404 and told["reason"] == "unknown", told


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"request": 7},
        {"messages": [], "prompt": "a"},
        {"prompt": "a b", "precision": "int2"},
        {"prompt": "a b", "ttl": -1},
        {"prompt": "a b", "ttl": "long"},
        {"prompt": "a b", "ttl": True},
        {"prompt": "a b", "thinking": "maybe"},
        {"prompt": "a b", "holder": "../x"},
        {"messages": "text"},
    ],
    ids=lambda body: json.dumps(body)[:40],
)
def test_bad_orders(fleet: Fleet, full: Model, body: Any) -> None:
    status, told = call(fleet.shared(full), "POST", "/thunder/handoff", body)
    assert 400 <= status < 500 and told["error"], told


def test_other_models(
    fleet: Fleet, models: ModelFactory, full: Model, seed: int, tmp_path: Path
) -> None:
    """Other weights, an adapter, another architecture, another block size, quantised KV."""
    folder = tmp_path / "cache"
    handed = hand_over(fleet.server(full, cache_dir=folder), messages=conversation(seed))
    other = models.copy(full, f"other-{seed}")
    replace_weights(other, 9, keep_date=True)
    adapter = write_adapter(full, tmp_path / "adapter", seed=3)
    blocks = {"THUNDER_BLOCK_TOKENS": "64"}
    for model, options, words in (
        (other, {}, "expected model"),
        (full, {"args": ("--adapter-path", str(adapter))}, "with adapter"),
        (models.get("llama"), {}, "expected model"),
        (full, {"env": blocks}, "expected block_tokens 32, found 64"),
        (full, {"args": ("--kv-bits", "8")}, "expected layout"),
    ):
        server = fleet.server(model, cache_dir=folder, **options)  # type: ignore[arg-type]
        refused(server, 409, words, handoff=handed["id"])
        server.stop()


def test_other_keys(fleet: Fleet, full: Model, seed: int) -> None:
    """With a salt for each API key, a context is its maker's alone."""
    server = fleet.server(full, env={"THUNDER_SALT": "api-key"})
    mine, other = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
    status, handed = call(
        server, "POST", "/thunder/handoff", {"messages": conversation(seed)}, mine
    )
    assert status == 200, handed
    path = f"/thunder/handoff/{handed['id']}"
    assert call(server, "GET", path, headers=mine)[0] == 200
    for headers in (other, {}):
        for method in ("GET", "DELETE", "POST"):
            status, told = call(server, method, path, {}, headers)
            assert (status, told["reason"]) == (403, "owner")
        body = {"messages": NEXT, "max_tokens": 2, "thunder": {"handoff": handed["id"]}}
        assert call(server, "POST", "/v1/chat/completions", body, headers)[0] == 403
    body = {"messages": NEXT, "max_tokens": 2, "thunder": {"handoff": handed["id"]}}
    assert call(server, "POST", "/v1/chat/completions", body, mine)[0] == 200


def test_expired_and_released(fleet: Fleet, full: Model, seed: int) -> None:
    server = fleet.shared(full)
    handed = hand_over(server, messages=conversation(seed), ttl=0.3)
    time.sleep(0.4)
    refused(server, 410, "expired", handoff=handed["id"])
    handed = hand_over(server, messages=conversation(seed))
    assert call(server, "DELETE", f"/thunder/handoff/{handed['id']}")[1]["released"] is True
    refused(server, 404, "released", handoff=handed["id"])


def test_tampered(fleet: Fleet, full: Model, seed: int, tmp_path: Path) -> None:
    """Any change of a descriptor is seen, and so is a descriptor under another's name."""
    server = fleet.server(full, cache_dir=tmp_path)
    first = hand_over(server, messages=conversation(seed))
    second = hand_over(server, messages=conversation(seed + 9))
    folder = tmp_path / "v1" / "contexts" / "handoff"
    file = folder / f"{first['id']}.json"
    whole = file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600
    for damaged, words in (
        (whole.replace(b'"position":', b'"position":1'), "expected checksum"),
        (whole[: len(whole) // 2], "not a descriptor"),
        (b"", "not a descriptor"),
        (b"[]", "not a descriptor"),
        (b"{" * 10_000, "not a descriptor"),
        ((folder / f"{second['id']}.json").read_bytes(), "is another's"),
    ):
        file.write_bytes(damaged)
        refused(server, 409, words, handoff=first["id"])
    file.write_bytes(whole)
    assert server.chat(NEXT, thunder={"handoff": first["id"]}).cached_tokens


def test_nothing_else_is_touched(fleet: Fleet, full: Model, seed: int) -> None:
    """After all sorts of refusals what was cached still serves."""
    server = fleet.shared(full)
    prompt = text_of(100, seed)
    served(fleet, server, full, prompt=prompt)
    refused(server, 404, "48 hex digits", handoff="../" * 20)
    served(fleet, server, full, prompt=prompt, cached=100)
    assert server.healthy()


def test_forms_do_not_mix(fleet: Fleet, full: Model, seed: int) -> None:
    server = fleet.shared(full)
    handed = hand_over(server, prompt=text_of(50, seed))
    refused(server, 422, "expected a completion", handoff=handed["id"])


def test_switched_off(fleet: Fleet, full: Model, seed: int) -> None:
    """A server without the feature says so; it does not answer as if nothing had been asked."""
    for name in ("THUNDER_HANDOFF", "THUNDER_SSD_CACHE"):
        server = fleet.server(full, env={name: "0"})
        status, told = call(server, "POST", "/thunder/handoff", {"prompt": "a b"})
        assert (status, told["reason"]) == (409, "off") and name in told["error"]
        refused(server, 409, name, handoff="0" * 48)
