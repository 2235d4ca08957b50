"""Some rounds of `python -m tests.crash.handoffs`, and its control."""

from tests.crash.handoffs import run


def test_kills_leave_nothing_dangling() -> None:
    tally = run(handoffs=60, seed=1)
    assert tally.faults == []
    assert tally.made >= 60 and tally.kills >= 4 and tally.used >= 10


def test_a_careless_writer_is_found_out() -> None:
    tally = run(handoffs=400, seed=1, careless=True)
    assert any("missing or not whole" in fault for fault in tally.faults)
