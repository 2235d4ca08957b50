"""The ``usage.context_pilot`` field."""

from __future__ import annotations

import json

from tests.core.pilot_support import TEMPLATES, Chat
from tests.core.test_pilot_explain import BASE
from thunder_patches.pilot.boundaries import boundaries, unknown
from thunder_patches.pilot.explain import Miss
from thunder_patches.pilot.fingerprints import system_prompt_hash
from thunder_patches.pilot.report import report

CHAT = Chat(TEMPLATES["chatml"])
FOUND = boundaries(CHAT.render, CHAT.encode, BASE, None, CHAT.tokens(BASE))
MISS = Miss(
    7, 0, "system", "date", "system prompt differs at character 9: looks like a date", {"now": "x"}
)


def test_partial_hit_on_a_boundary_and_beside_it() -> None:
    end = FOUND.ends[2]
    on = report(BASE, FOUND, skip="none", cached_tokens=end, source="ram", miss=MISS)
    assert on == {
        "skip": "none",
        "cached_tokens": end,
        "source": "ram",
        "message_aligned": True,
        "aligned_message_count": 3,
        "total_message_count": len(BASE),
        "system_prompt_hash": system_prompt_hash(BASE),
        "miss": {
            "token": 7,
            "message": 0,
            "role": "system",
            "reason": "system prompt differs at character 9: looks like a date",
            "code": "date",
        },
    }
    beside = report(BASE, FOUND, skip="none", cached_tokens=end - 1, source="ssd")
    assert beside["message_aligned"] is False
    assert beside["aligned_message_count"] == 2
    assert "miss" not in beside


def test_full_and_nothing() -> None:
    full = report(BASE, FOUND, skip="full", cached_tokens=FOUND.total, source="ssd")
    assert (full["message_aligned"], full["aligned_message_count"]) == (True, len(BASE))
    nothing = report(BASE, FOUND, skip="none", cached_tokens=0, source="ram")
    assert nothing["source"] is None
    assert nothing["message_aligned"] is False
    assert nothing["aligned_message_count"] == 0


def test_unknown_boundaries_are_null_and_never_a_guess() -> None:
    lost = unknown("the template failed: x", len(BASE), 90)
    field = report(BASE, lost, skip="none", cached_tokens=64, source="ram", stabilized=["moved"])
    assert field["message_aligned"] is None
    assert field["aligned_message_count"] is None
    assert field["boundaries"] == "the template failed: x"
    assert field["stabilized"] == ["moved"]
    json.dumps(field)


def test_completion_without_messages() -> None:
    field = report([], unknown("no messages", 0, 50), skip="full", cached_tokens=50, source="ram")
    assert field["total_message_count"] == 0
    assert field["system_prompt_hash"] is None
    assert "boundaries" not in field
