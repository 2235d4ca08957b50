"""Three agent sessions: reuse with and without the stabiliser, and the reasons that users see."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.pilot_sessions import DATA, play, requests, sessions


def share(outcomes) -> float:
    return sum(o.reused for o in outcomes[1:]) / sum(o.total for o in outcomes[1:])


@pytest.mark.parametrize(
    ("name", "code", "least"),
    [
        ("coding-billing", "billing", 0.6),
        ("coding-clock", "time", 0.3),
        ("multi-agent", "nonce", 0.7),
    ],
)
def test_session(name: str, code: str, least: float) -> None:
    path = DATA / f"{name}.toml"
    off, on = play(path, False), play(path, True)
    assert share(off) < 0.05
    assert share(on) >= least
    assert {o.usage["miss"]["code"] for o in off[1:]} == {code}
    assert off[0].usage["miss"]["code"] == "never_seen"
    assert all(o.usage["miss"]["message"] == 0 for o in off[1:])
    assert all(o.usage["aligned_message_count"] is not None for o in off + on)
    assert all(not o.did for o in off)
    assert all(o.did for o in on)


def test_time_of_day_can_be_taken_out_by_the_user(tmp_path: Path) -> None:
    user = tmp_path / "rules.toml"
    user.write_text('enable = ["time of day"]\n')
    path = DATA / "coding-clock.toml"
    assert share(play(path, True, user)) > share(play(path, True)) + 0.2


def test_sessions_are_long_enough_and_hold_no_unfilled_value() -> None:
    assert len(sessions()) == 3
    for path in sessions():
        sent = list(requests(path))
        assert len(sent) >= 6
        for request in sent:
            system = request.messages[0]["content"]
            text = system if isinstance(system, str) else "".join(p["text"] for p in system)
            assert len(text) > 2000
            assert "{" not in text
