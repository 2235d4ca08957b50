"""Whether requests run: what idle work goes by."""

import threading
import time

import pytest

from thunder_patches.hosts.activity import Activity


def test_quiet_counts_from_the_end_of_the_last_request():
    activity = Activity()
    with activity.running():
        time.sleep(0.02)
        assert activity.quiet() == 0.0
        with activity.running():
            pass
        assert activity.quiet() == 0.0, "one of two still runs"
    assert 0.0 <= activity.quiet() < 0.02
    time.sleep(0.02)
    before = activity.quiet()
    assert before >= 0.02
    activity.note()
    assert activity.quiet() < before


def test_a_request_that_fails_has_ended():
    activity = Activity()
    with pytest.raises(RuntimeError), activity.running():
        raise RuntimeError
    assert activity.quiet() > 0.0


def test_many_threads():
    activity = Activity()

    def work():
        for _ in range(200):
            with activity.running():
                assert activity.quiet() == 0.0

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert activity.quiet() > 0.0
