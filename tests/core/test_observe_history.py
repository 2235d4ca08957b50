"""The ring of requests, its sums over time, and the histograms of first tokens."""

from __future__ import annotations

import threading

import pytest

from thunder_patches.observe.history import BOUNDS_S, KEPT, STEP_S, Histogram, History


def test_results_are_those_that_are_counted() -> None:
    history = History()
    for cached, skip in ((0, "none"), (5, "none"), (9, "full"), (8, "approximate")):
        history.add(9, cached, skip, "ram" if cached else None)
    found = [seen.result for seen in history.recent()]
    assert found == ["approximate", "full", "partial", "miss"]
    assert [seen.result for seen in history.recent(1)] == ["approximate"]


def test_the_ring_forgets_the_oldest() -> None:
    history = History()
    for tokens in range(KEPT + 3):
        history.add(tokens, 0, "none", None)
    found = history.recent()
    assert (len(found), found[0].tokens, found[-1].tokens) == (KEPT, KEPT + 2, 3)


def test_sums_are_by_step_and_leave_out_what_is_old() -> None:
    history = History()
    start = 1_000_000 * STEP_S
    for at, cached in ((0, 0), (1, 60), (STEP_S * 3, 100), (-9999, 1)):
        history.add(100, cached, "none", None).at = start + at
    told = history.over_time(start + STEP_S * 4)
    assert told["columns"] == ("at", "requests", "hits", "skipped", "computed")
    assert told["rows"] == [[start, 2, 1, 60, 140], [start + STEP_S * 3, 1, 1, 100, 0]]


@pytest.mark.parametrize(("seconds", "below"), [(0.0, 0.01), (0.01, 0.01), (0.011, 0.025)])
def test_a_bound_holds_what_is_equal_to_it(seconds: float, below: float) -> None:
    histogram = Histogram()
    histogram.observe(seconds)
    told = histogram.to_json()
    first = told["counts"].index(1)
    assert told["le"][first] == below and told["counts"][-1] == 1


def test_what_is_slower_than_every_bound_is_counted_too() -> None:
    histogram = Histogram()
    histogram.observe(BOUNDS_S[-1] + 1)
    assert histogram.to_json()["counts"][-2:] == [0, 1]
    assert histogram.to_json()["sum"] == BOUNDS_S[-1] + 1


def test_threads_lose_nothing() -> None:
    history = History()

    def ask() -> None:
        for _ in range(500):
            history.first_token(history.add(10, 10, "full", "ram"), 0.2)
            history.over_time()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert history.first_tokens()["full"]["counts"][-1] == 2000
    assert history.first_tokens()["miss"]["counts"][-1] == 0
    assert len(history.recent()) == 2000
