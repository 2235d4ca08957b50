"""What the cases share: the model kinds, one prepared request checked in every way."""

from __future__ import annotations

import os
import re
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


NOT_YET = {"sliding"}
"""Kinds that are not expected to hit yet; a test that passes all the same is shown as XPASS."""


def _params() -> Iterator[object]:
    """The kinds to test: all, or those that THUNDER_TEST_KINDS names, with commas between."""
    asked = os.environ.get("THUNDER_TEST_KINDS") or ",".join(KINDS)
    for name in asked.split(","):
        marks = [pytest.mark.xfail(strict=False)] if name in NOT_YET else []
        yield pytest.param(name, marks=marks)


@pytest.fixture(scope="session", params=_params())
def kind(request: pytest.FixtureRequest) -> str:
    """Every model kind in turn; session scope groups the tests, so that servers are reused."""
    return str(request.param)


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
    """After a test, no log of a plugin server may hold a stack trace, unless the test says so.

    That a client has hung up is the host's own stack trace, and allowed.
    """
    yield
    for name, text in fleet.new_logs():
        found = [error for error in stack_traces(text) if not error.startswith(HUNG_UP)]
        assert not found, f"{name}: {found}\n{text[-3000:]}"


HUNG_UP = ("BrokenPipeError", "ConnectionResetError")


def stack_traces(log: str) -> list[str]:
    """The error that each stack trace of a log ends with."""
    return re.findall(r"^Traceback .*\n(?:^[ \t].*\n|^\n)*^(\S.*)", log, re.MULTILINE)


@pytest.fixture
def host_computes_batches(request: pytest.FixtureRequest, kind: str, fleet: Fleet) -> None:
    """Marks what the stock server itself gets wrong: ragged hybrid batches before 0.32."""
    if kind.startswith("hybrid") and not fleet.host.at_least("0.32.0"):
        request.applymarker(pytest.mark.xfail(reason="wrong in the stock server", strict=False))
