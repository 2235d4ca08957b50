"""The harness's fixtures, with oMLX as the host: that of the interpreter that runs the tests."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.hosts import Host, probe
from tests.harness.models import Model, ModelFactory
from tests.hosts.omlx.serving import OmlxFleet

KINDS = {"full": "qwen3", "hybrid": "qwen3_next", "sliding": "gemma3"}

if importlib.util.find_spec("omlx") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_hybrid: known to the cases that are shared")


LEFT_OUT = (
    "serial",  # there is one path
    "sliding-no-skip",  # rests on the host's own cache, which is out of use
    "hybrid-interleaved",
    "sliding-interleaved",
    # Files and processes, which the host has no part in: tests/e2e has them with every kind.
    *(f"{test}[{kind}" for test in ("c11_killed", "c12_restart") for kind in ("full", "sliding")),
    "from_one_machine_to_another[full",
    "from_one_machine_to_another[sliding",
    "a_spoiled_snapshot[sliding",
    "c15_at_once[sliding",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what does not apply, and variants that one model kind stands for."""
    left_out = [item for item in items if any(part in item.name for part in LEFT_OUT)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Every model kind in turn; session scope groups the tests, so that servers are reused."""
    return str(request.param)


@pytest.fixture
def model(kind: str, models: ModelFactory) -> Model:
    return models.get(KINDS[kind])


@pytest.fixture
def full(models: ModelFactory) -> Model:
    """The full-attention model, for cases where the layers don't matter."""
    return models.get(KINDS["full"])


@pytest.fixture(scope="session")
def omlx_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OmlxFleet]:
    python = Path(sys.executable)
    version = probe(python)["mlx_lm"]
    fleet = OmlxFleet(Host(version, python), python, tmp_path_factory.mktemp("omlx"))
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(omlx_servers: OmlxFleet) -> Iterator[OmlxFleet]:
    """Servers of oMLX; those that the test started itself end with it."""
    yield omlx_servers
    omlx_servers.end_test()


@pytest.fixture(autouse=True)
def quiet_logs(fleet: OmlxFleet) -> Iterator[None]:
    """After a test, no log of a plugin server may tell of an error, unless the test says so."""
    yield
    fleet.assert_quiet()
