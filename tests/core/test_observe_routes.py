"""The routes under /thunder/, without a host."""

from __future__ import annotations

import json
from typing import Any

import pytest

from thunder_patches.observe.routes import answer


def status(*, details: bool = False) -> dict[str, Any]:
    return {"version": "1", "odd": {1}, "details": details}


def test_the_status_is_json_that_nobody_keeps() -> None:
    found = answer("GET", "/thunder/status", "", status)
    assert found is not None
    assert (found.status, found.content_type) == (200, "application/json")
    told = json.loads(found.body)
    assert (told["version"], told["details"]) == ("1", True)
    assert ("Cache-Control", "no-store") in found.headers


@pytest.mark.parametrize("path", ["/thunder/nothing", "/v1/models", "/thunders", "/"])
def test_other_paths_are_the_host_s(path: str) -> None:
    assert answer("GET", path, "", status) is None


def test_a_head_has_no_body_and_a_post_is_refused() -> None:
    head = answer("HEAD", "/thunder/status", "", status)
    assert head is not None and (head.status, head.body) == (200, b"")
    post = answer("POST", "/thunder/status", "", status)
    assert post is not None and post.status == 405
