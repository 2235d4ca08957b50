"""The guard: our faults are swallowed, counted, and in a row they switch the feature off."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from thunder_patches.patching import guard
from thunder_patches.patching.guard import is_on, shield


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    guard.reset()
    guard.set_features(
        {"cache": True, "skip": True, "routes": True, "away": False}, {"cache": ("skip",)}
    )
    yield
    guard.reset()


def fail(feature: str, where: str = "", error: type[BaseException] = ValueError) -> bool:
    with shield(feature, where) as shielded:
        raise error("no")
    return shielded.failed


def succeed(feature: str, where: str = "") -> None:
    with shield(feature, where):
        pass


def test_an_error_of_ours_is_swallowed_and_counted() -> None:
    assert fail("cache") is True
    assert guard.faults("cache") == guard.Faults(1, "ValueError: no")
    assert guard.faults("routes") == guard.Faults()
    with shield("cache") as shielded:
        pass
    assert shielded.failed is False


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_the_end_of_the_process_is_not_swallowed(error: type[BaseException]) -> None:
    with pytest.raises(error):
        fail("cache", error=error)
    assert guard.faults("cache").count == 0


def test_three_in_a_row_switch_off_the_feature_and_what_needs_it() -> None:
    for _ in range(2):
        fail("cache")
    assert is_on("cache")
    fail("cache", error=OSError)
    assert not is_on("cache")
    assert not is_on("skip")
    assert is_on("routes")
    assert guard.off_reason("cache") == "3 errors in a row, last OSError: no"
    assert "needs cache" in (guard.off_reason("skip") or "")
    assert guard.faults("cache").tripped


def test_a_success_starts_the_count_anew() -> None:
    for _ in range(5):
        fail("cache")
        fail("cache")
        succeed("cache")
    assert is_on("cache")
    assert guard.faults("cache").count == 10


def test_a_success_elsewhere_does_not_hide_a_place_that_always_fails() -> None:
    for _ in range(3):
        fail("cache", "store")
        succeed("cache", "lookup")
    assert not is_on("cache")
    assert "store: ValueError" in (guard.off_reason("cache") or "")


def test_each_kind_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="thunder_patches"):
        for _ in range(2):
            fail("routes", "get")
            succeed("routes", "get")
        fail("routes", "get", OSError)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "Traceback" in warnings[0] and "ValueError: no" in warnings[0]
    assert "OSError" in warnings[1]


def test_without_a_registry_the_switches_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    from thunder_patches.config import load

    guard.reset()
    monkeypatch.setattr(guard, "settings", lambda: load({"THUNDER_SSD_CACHE": "0"}))
    assert not is_on("ssd_cache")
    assert is_on("prefetch")
    assert not is_on("approx_skip")
    guard.reset()
    monkeypatch.setattr(guard, "settings", lambda: load({"THUNDER": "0"}))
    assert not is_on("prefetch")


def test_the_registry_s_decision_goes_before_the_switches() -> None:
    assert not is_on("away")
