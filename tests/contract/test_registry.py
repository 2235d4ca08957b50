"""The registry against a stand-in host: deciding, applying, undoing, being displaced."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.standhost import CORE, PATCHES, StandHost, installed, patch
from thunder_patches.patching import guard, registry
from thunder_patches.patching.patch import State, Verdict
from thunder_patches.patching.registry import Registry

STOCK = {"step": ["step 1"], "size": ["size 1"], "serve": ["serve 1"], "delete": None}
FULL = {
    "step": ["step 1", "base", "child"],
    "size": ["size 1", "static"],
    "serve": ["serve 1", "base"],
    "delete": ["Handler", 1],
}


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandHost]:
    with installed(tmp_path, monkeypatch) as stand:
        yield stand


def answers(core: Any) -> dict[str, Any]:
    """What a user of the host sees."""
    handler = core.Handler()
    return {
        "step": core.Engine().step(1),
        "size": core.Engine.size(1),
        "serve": core.serve(1),
        "delete": handler.do_DELETE(1) if hasattr(handler, "do_DELETE") else None,
    }


def attributes(core: Any) -> dict[str, Any]:
    """The raw objects, to be compared by identity."""
    return {
        "step": vars(core.Engine)["step"],
        "size": vars(core.Engine)["size"],
        "serve": core.serve,
        "delete": vars(core.Handler).get("do_DELETE"),
    }


def assert_stock(core: Any, before: dict[str, Any]) -> None:
    now = attributes(core)
    assert all(now[name] is before[name] for name in before)
    assert answers(core) == STOCK


def states(found: Registry) -> dict[str, str]:
    return {name: verdict.state for name, verdict in found.verdicts.items()}


def test_everything_is_applied_to_a_known_host(stand: StandHost) -> None:
    found = stand.registry()
    found.apply()
    assert set(found.verdicts.values()) == {Verdict(State.APPLIED)}
    assert answers(stand.core) == FULL
    assert guard.is_on("base") and guard.is_on("child")
    assert found.fingerprint is not None and len(found.fingerprint) == 16


def test_deciding_neither_imports_nor_changes_the_host(stand: StandHost) -> None:
    import sys

    found = stand.registry()
    found.decide()
    assert {verdict.state for verdict in found.verdicts.values()} == {State.PENDING}
    assert "standhost" not in sys.modules


def test_undo_gives_back_the_host_s_own_objects(stand: StandHost) -> None:
    before = attributes(stand.core)
    found = stand.registry()
    found.apply()
    held = stand.core.Engine.step  # someone kept a reference to the wrapped method
    found.undo()
    assert_stock(stand.core, before)
    assert held(stand.core.Engine(), 1) == STOCK["step"]
    assert not guard.is_on("base")


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["base", "static", "routes", "child"]))
)
def test_features_leave_in_any_order(stand: StandHost, order: tuple[str, ...]) -> None:
    before = attributes(stand.core)
    found = stand.registry()
    found.apply()
    gone: set[str] = set()
    for name in order:
        found.undo(name)
        gone |= {"base", "child"} if name == "base" else {name}
        now = answers(stand.core)
        assert ("base" in now["step"]) is ("base" not in gone)
        assert ("child" in now["step"]) is ("child" not in gone)
        assert ("static" in now["size"]) is ("static" not in gone)
        assert (now["delete"] is None) is ("routes" in gone)
    assert_stock(stand.core, before)


def test_applying_after_undoing_works_again(stand: StandHost) -> None:
    before = attributes(stand.core)
    for _ in range(2):
        found = stand.registry()
        found.apply()
        assert answers(stand.core) == FULL
        found.undo()
        assert_stock(stand.core, before)


# What keeps a patch out.


def test_master_switch_leaves_the_host_alone(stand: StandHost) -> None:
    before = attributes(stand.core)
    found = stand.registry(enabled=False)
    found.apply()
    assert set(states(found).values()) == {State.OFF}
    assert_stock(stand.core, before)


def test_absent_host() -> None:
    from thunder_patches.config import Settings

    found = Registry("mlx_lm", None, Settings())
    found.apply()
    assert State.HOST_ABSENT in states(found).values()
    assert State.APPLIED not in states(found).values()


@pytest.mark.parametrize(
    "install",
    [{"version": "1.1"}, {"name": "fork"}, {"version": "not a version"}],
    ids=["newer", "fork of the same version", "odd version"],
)
def test_unknown_build_is_left_alone(stand: StandHost, install: dict[str, str]) -> None:
    stand.install(**install)
    found = stand.registry()
    found.apply()
    assert set(states(found).values()) == {State.UNKNOWN_VERSION}
    assert answers(stand.core) == STOCK
    trusting = stand.registry(allow_untested=True)
    trusting.apply()
    assert answers(stand.core) == FULL


def test_recorded_version_outside_a_patch_s_range(stand: StandHost) -> None:
    stand.install(version="2.0")
    stand.record(version="2.0")
    found = stand.registry()
    found.apply()
    assert found.verdicts["base"] == Verdict(
        State.UNKNOWN_VERSION, "standhost 2.0 is outside >=1,<2"
    )


STRANGE = {
    "renamed": CORE.replace("def serve(", "def serve_all("),
    "extended": CORE.replace("def serve(value)", "def serve(value, more=None)"),
    "rewritten": CORE.replace('f"serve {value}"', 'f"serve {value}" + ""'),
    "class gone": CORE.replace("class Engine", "class Motor"),
}


@pytest.mark.parametrize("core", STRANGE.values(), ids=STRANGE)
def test_one_strange_target_keeps_its_whole_feature_out(stand: StandHost, core: str) -> None:
    stand.install(core=core)
    before = {name: value for name, value in vars(stand.core).items() if callable(value)}
    step = getattr(stand.core, "Engine", None) and vars(stand.core.Engine)["step"]
    found = stand.registry()
    found.apply()
    assert found.verdicts["base"].state is State.UNKNOWN_FINGERPRINT
    assert found.verdicts["child"].state is State.UNKNOWN_FINGERPRINT
    assert found.verdicts["routes"].state is State.APPLIED
    assert all(vars(stand.core)[name] is value for name, value in before.items())
    assert step is None or vars(stand.core.Engine)["step"] is step


def test_trust_does_not_invent_a_missing_target(stand: StandHost) -> None:
    stand.install(core=STRANGE["renamed"])
    found = stand.registry(allow_untested=True)
    found.apply()
    assert found.verdicts["base"] == Verdict(
        State.UNKNOWN_FINGERPRINT, "standhost 1.0 has no standhost.core:serve"
    )


def test_reformatting_and_comments_elsewhere_keep_the_fingerprint(stand: StandHost) -> None:
    stand.install(core="# a new head line\n" + CORE.replace("\n\n\n", "\n\n\n\n"))
    found = stand.registry()
    found.apply()
    assert answers(stand.core) == FULL


def test_host_that_got_the_method_itself(stand: StandHost) -> None:
    method = '["get"]\n\n    def do_DELETE(self, value):\n        return ["own", value]\n'
    stand.install(core=CORE.replace('["get"]\n', method))
    found = stand.registry()
    found.apply()
    assert found.verdicts["routes"].state is State.HOST_HAS_IT
    assert answers(stand.core)["delete"] == ["own", 1]


def test_eligibility_keeps_a_patch_out(stand: StandHost) -> None:
    kept_out = patch("static", "Engine.size", "static", eligibility=f"{__name__}:not_here")
    found = stand.registry(patches=(*PATCHES[:3], kept_out))
    found.apply()
    assert found.verdicts["static"] == Verdict(State.HOST_HAS_IT, "standhost does it")


def not_here(host: Any) -> Verdict:
    return Verdict(State.HOST_HAS_IT, f"{host.name} does it")


@pytest.mark.parametrize("wrapper", [f"{__name__}:nowhere", "thunder_patches.hosts.nowhere:base"])
def test_feature_with_a_missing_wrapper_changes_nothing(stand: StandHost, wrapper: str) -> None:
    before = attributes(stand.core)
    bad = dataclasses.replace(PATCHES[1], wrapper=wrapper)
    found = stand.registry(patches=(PATCHES[0], bad, PATCHES[2]))
    found.apply()
    assert found.verdicts["base"].state is State.FAILED
    assert found.verdicts["child"].state is State.FAILED
    assert_stock(stand.core, before)


def test_a_patch_that_fails_midway_takes_the_earlier_ones_back(
    stand: StandHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = attributes(stand.core)
    add = registry.Target.add
    calls = []

    def fails_second(self: Any, wrapper: Any) -> Any:
        calls.append(self.name)
        if len(calls) == 2:
            raise RuntimeError("no")
        return add(self, wrapper)

    monkeypatch.setattr(registry.Target, "add", fails_second)
    found = stand.registry(patches=PATCHES[:2])
    found.apply()
    assert calls == ["step", "serve"]
    assert found.verdicts["base"] == Verdict(State.FAILED, "RuntimeError: no")
    assert_stock(stand.core, before)


# Other plugins.


def outside(method: Any) -> Any:
    """A decorator as plugins write them."""

    @functools.wraps(method)
    def wrapper(*args: Any) -> Any:
        return [*method(*args), "outside"]

    wrapper.__module__ = "other_plugin"
    return wrapper


def test_plugin_that_came_first_is_a_conflict(stand: StandHost) -> None:
    core = stand.core
    core.Engine.step = outside(core.Engine.step)
    before = attributes(core)
    found = stand.registry()
    found.apply()
    assert found.verdicts["base"] == Verdict(
        State.CONFLICT, "standhost.core:Engine.step was patched before us, by other_plugin"
    )
    assert found.verdicts["child"].state is State.CONFLICT
    assert attributes(core)["step"] is before["step"]
    assert core.serve is before["serve"]
    assert core.Engine().step(1) == ["step 1", "outside"]
    assert found.verdicts["static"].state is State.APPLIED


def test_plugin_that_wraps_us_later_is_said(stand: StandHost) -> None:
    core = stand.core
    found = stand.registry()
    found.apply()
    ours = vars(core.Engine)["step"]
    core.Engine.step = outside(core.Engine.step)
    found.check()
    verdict = found.current()["base"]
    assert verdict.state is State.DISPLACED
    assert "wrapped again by other_plugin; ours still runs inside" in verdict.reason
    assert guard.is_on("base")
    assert core.Engine().step(1) == ["step 1", "base", "child", "outside"]
    core.Engine.step = ours
    found.check()
    assert found.current()["base"] == Verdict(State.APPLIED)


def test_plugin_that_replaces_one_target_turns_the_feature_off(stand: StandHost) -> None:
    core = stand.core
    found = stand.registry()
    found.apply()
    core.serve = lambda value: ["theirs"]
    found.check()
    assert found.current()["base"].state is State.DISPLACED
    assert not guard.is_on("base")
    assert not guard.is_on("child")
    assert guard.is_on("static")
    assert found.current()["child"].state is State.FAILED


@pytest.mark.parametrize("theirs_first", [True, False])
def test_undo_under_another_plugin(stand: StandHost, theirs_first: bool) -> None:
    core = stand.core
    before = attributes(core)
    found = stand.registry()
    found.apply()
    ours = vars(core.Engine)["step"]
    core.Engine.step = outside(core.Engine.step)
    if theirs_first:
        core.Engine.step = ours
        found.undo()
    else:
        found.undo()
        assert core.Engine().step(1) == ["step 1", "outside"], "ours runs no more inside theirs"
        core.Engine.step = ours
        found.check()
    assert_stock(core, before)
