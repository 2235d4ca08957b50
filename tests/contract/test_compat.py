"""compat/ against the catalogue and against the hosts that are installed here."""

from __future__ import annotations

import re

import pytest
from packaging.specifiers import SpecifierSet

from thunder_patches.config import Settings
from thunder_patches.patching import catalogue, compat, host
from thunder_patches.patching.patch import State
from thunder_patches.patching.registry import Registry

MLX_LM = ("0.31.3", "0.32.0", "0.32.1", "0.32.2")


def test_the_promised_versions_are_recorded() -> None:
    assert set(MLX_LM) <= set(compat.recorded("mlx-lm"))


@pytest.mark.parametrize("version", MLX_LM)
def test_every_target_is_recorded(version: str) -> None:
    recorded = compat.fingerprints("mlx-lm", version)
    assert recorded is not None
    for patch in catalogue.PATCHES:
        if patch.host == "mlx_lm" and version in SpecifierSet(patch.versions):
            found = recorded[patch.target]
            assert all(re.fullmatch(r"[0-9a-f]{32}", each) for each in found)
            assert bool(found) is not patch.adds, f"record {patch.target}: see maintain"


def test_each_recorded_version_has_an_entry() -> None:
    for entry in compat.hosts().values():
        known = {(each["distribution"], each["version"]) for each in entry.get("versions", ())}
        for distribution in entry["distributions"]:
            for version in compat.recorded(distribution):
                assert (distribution, version) in known


def test_unknown_versions_have_no_fingerprints() -> None:
    assert compat.fingerprints("mlx-lm", "0.0.1") is None


@pytest.mark.parametrize("name", sorted(compat.hosts()))
def test_the_installed_host_is_a_known_one(name: str) -> None:
    """So that no run of the matrix passes for nothing."""
    found = host.find(name)
    if found is None:
        pytest.skip(f"{name} is not installed here")
    registry = Registry(name, found, Settings())
    registry.decide()
    wrong = {
        patch: verdict
        for patch, verdict in registry.patch_verdicts.items()
        if verdict.state not in (State.PENDING, State.HOST_HAS_IT, State.NOT_ELIGIBLE)
    }
    assert wrong == {}


def test_catalogue_is_consistent() -> None:
    names = [feature.name for feature in catalogue.FEATURES]
    assert len(names) == len(set(names))
    ids = [patch.id for patch in catalogue.PATCHES]
    assert len(ids) == len(set(ids))
    switches = {*vars(Settings()), ""}
    for feature in catalogue.FEATURES:
        assert feature.switch in switches
        assert feature.requires in {"", *names[: names.index(feature.name)]}, "parents come first"
    for patch in catalogue.PATCHES:
        assert patch.feature in names
        assert patch.host in compat.hosts()
        SpecifierSet(patch.versions)
