"""What the cases share: the model kinds, one prepared request checked in every way."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.harness.fleet import Fleet
from tests.harness.models import Model, ModelFactory

KINDS = {
    "full": "qwen3",
    "hybrid-next": "qwen3_next",
    "hybrid-3.5": "qwen3_5_moe",
    "sliding": "gemma3",
}
"""Model kinds by how their layers keep state, each with the architecture that stands for it."""

KINDS_ASKED = (os.environ.get("THUNDER_TEST_KINDS") or ",".join(KINDS)).split(",")


@pytest.fixture(scope="session", params=KINDS_ASKED)
def kind(request: pytest.FixtureRequest) -> str:
    """Every model kind in turn; session scope groups the tests, so that servers are reused."""
    return str(request.param)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "one_hybrid: slow, or not about the layers: one hybrid architecture stands for both",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the second hybrid architecture out of the tests marked one_hybrid."""
    left_out = [
        item
        for item in items
        if item.get_closest_marker("one_hybrid")
        and isinstance(item, pytest.Function)
        and item.callspec.params.get("kind") == "hybrid-next"
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def model(kind: str, models: ModelFactory) -> Model:
    """The model of the kind."""
    return models.get(KINDS[kind])


@pytest.fixture
def full(models: ModelFactory) -> Model:
    """The full-attention model, for cases where the layers don't matter."""
    return models.get(KINDS["full"])


@pytest.fixture(autouse=True)
def quiet_logs(fleet: Fleet) -> Iterator[None]:
    """After a test, no log of a plugin server may tell of an error, unless the test says so."""
    yield
    fleet.assert_quiet()


@pytest.fixture
def batch_tolerance(request: pytest.FixtureRequest, kind: str, fleet: Fleet) -> float:
    """How far logprobs of the stock server itself are off in a batch.

    It brings rings of rotating caches into another order, and computes ragged hybrid batches
    wrongly before 0.32.
    """
    if kind.startswith("hybrid") and not fleet.host.at_least("0.32.0"):
        request.applymarker(pytest.mark.xfail(reason="wrong in the stock server", strict=False))
    return 1e-4 if kind == "sliding" else 0.0
