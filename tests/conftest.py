"""Fixtures of all tests: hosts to test, tiny models, servers that end with their test."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.harness.fleet import Fleet
from tests.harness.hosts import Environments, Host, declared_hosts, probe
from tests.harness.models import ModelFactory

MARKERS = (
    "stock_control: records a fact about the stock server; fails when the fact changes",
    "omlx: needs the oMLX environment",
)


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `host` runs once for each environment of THUNDER_TEST_PYTHONS."""
    if "host" in metafunc.fixturenames:
        hosts = declared_hosts()
        metafunc.parametrize("host", hosts, ids=[host.version for host in hosts], scope="session")


@pytest.fixture(scope="session")
def checked_host(host: Host) -> Host:
    """The host, once it is certain that the environment holds the version that it claims."""
    found = probe(host.python)["mlx_lm"]
    assert found == host.version, f"{host.python}: expected mlx-lm {host.version}, found {found}"
    return host


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Environments:
    return Environments(tmp_path_factory.mktemp("environments"), os.environ)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    return ModelFactory(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def fleets(
    environments: Environments, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Host], Fleet]]:
    """The fleet of each host, made when first asked for; all servers end with the session."""
    made: dict[Host, Fleet] = {}

    def fleet_of(host: Host) -> Fleet:
        if host not in made:
            folder = tmp_path_factory.mktemp("servers")
            made[host] = Fleet(host, environments.python(host), folder)
        return made[host]

    yield fleet_of
    for fleet in made.values():
        fleet.close()


@pytest.fixture
def fleet(checked_host: Host, fleets: Callable[[Host], Fleet]) -> Iterator[Fleet]:
    """Servers of the host under test; those that the test started itself end with it."""
    found = fleets(checked_host)
    yield found
    found.end_test()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number of the test's own: prompts drawn from it share no prefix with other tests'."""
    return int.from_bytes(hashlib.sha256(request.node.nodeid.encode()).digest()[:4], "little")


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
    """Adds the end of each running server's log to a failed test's report."""
    if call.when != "call" or call.excinfo is None:
        return
    fleet = getattr(item, "funcargs", {}).get("fleet")
    if isinstance(fleet, Fleet):
        for name, text in fleet.logs():
            item.add_report_section("call", name, text)
