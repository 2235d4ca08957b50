"""Ten rounds of `python -m tests.crash.kill`, and its control."""

from tests.crash.kill import kill_many


def test_a_killed_writer_harms_nothing():
    tally = kill_many(rounds=10, seed=1)
    assert tally.faults == []
    assert tally.rounds == 10 and tally.killed_while_writing >= 2 and tally.finished >= 20


def test_a_careless_writer_is_found_out():
    tally = kill_many(rounds=6, seed=1, careless=True)
    assert any("half written" in fault for fault in tally.faults)
    assert not any("wrong bytes" in fault for fault in tally.faults), "the checksum still holds"
