"""Snapshots of layers that can't be cut are no further apart than oMLX's own would be."""

from __future__ import annotations

import pytest

from tests.e2e.steps import MISS, served
from tests.harness.models import ModelFactory, text_of
from tests.hosts.omlx.serving import OmlxFleet

FAR = {"THUNDER_SNAPSHOT_STRIDE": "64"}
HOSTS_BLOCK = 512
"""Tokens in a block of the host for a sliding model with a small window."""


@pytest.mark.parametrize("keeps", [True, False], ids=["cache", "no-cache"])
def test_an_edited_tail(fleet: OmlxFleet, models: ModelFactory, seed: int, keeps: bool) -> None:
    """Where the host keeps nothing (the control) the distance is the setting's: nothing is there."""
    model = models.get("gemma3")
    server = fleet.server(model, env=FAR, args=() if keeps else ("--no-cache",))
    head, tails = text_of(HOSTS_BLOCK + 20, seed), (text_of(60, seed + 1), text_of(60, seed + 2))
    served(fleet, server, model, prompt=head + tails[0], cached=MISS)
    cached = HOSTS_BLOCK if keeps else MISS
    served(fleet, server, model, prompt=head + tails[1], cached=cached)
