"""The dashboard: known to Grafana's own model of one, asking only for metrics that there are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.harness.statuses import big_status
from thunder_patches.observe.metrics import dashboard, metrics
from thunder_patches.observe.routes import answer


def expressions() -> list[str]:
    """Every query of the dashboard."""
    panels = json.loads(dashboard())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:thunder|process)_\w+", expression))


def test_grafana_s_own_model_keeps_all_of_it() -> None:
    sdk = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    told = json.loads(dashboard())
    # The model drops fields that it doesn't know.
    read = sdk.Dashboard.from_json(told)
    again = json.loads(encoder.JSONEncoder(sort_keys=True).encode(read))
    assert missing(told, again) == []
    wrong = sdk.Dashboard.from_json(told | {"titel": "x"})
    again = json.loads(encoder.JSONEncoder(sort_keys=True).encode(wrong))
    assert missing(told | {"titel": "x"}, again) == ["titel"]


def missing(told: Any, again: Any, at: str = "") -> list[str]:
    """Paths of `told` that `again` lacks or has otherwise."""
    if isinstance(told, dict):
        if not isinstance(again, dict):
            return [at]
        parts = [(f"{at}.{k}".strip("."), v, again.get(k, ...)) for k, v in told.items()]
    elif isinstance(told, list):
        if not isinstance(again, list) or len(told) != len(again):
            return [at]
        parts = [(f"{at}[{i}]", v, again[i]) for i, v in enumerate(told)]
    else:
        return [] if told == again else [at]
    return [path for name, a, b in parts for path in missing(a, b, name)]


def test_it_asks_only_for_metrics_that_there_are() -> None:
    text = metrics(big_status(50))[1].decode()
    there = set(re.findall(r"(?m)^(\w+)[{ ]", text))
    asked = set().union(*map(names_in, expressions()))
    assert len(asked) >= 10 and asked <= there


def test_panels_do_not_overlap_and_each_has_its_own_number() -> None:
    panels = json.loads(dashboard())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


REQUIRED = {
    "stat": {"reduceOptions", "orientation", "graphMode", "colorMode", "textMode", "justifyMode"}
    | {"wideLayout", "showPercentChange", "percentChangeColorMode"},
    "bargauge": {"reduceOptions", "orientation", "displayMode", "valueMode", "namePlacement"}
    | {"showUnfilled", "sizing", "minVizWidth", "minVizHeight", "maxVizHeight", "legend"},
    "timeseries": {"legend", "tooltip"},
}
"""The options that the types of Grafana 13 (npm: @grafana/schema) require of each kind of panel."""


def test_panels_have_the_options_that_their_kind_requires() -> None:
    for panel in json.loads(dashboard())["panels"]:
        assert REQUIRED[panel["type"]] <= set(panel["options"]), panel["title"]


def test_the_route_gives_it() -> None:
    found = answer("GET", "/thunder/grafana.json", "", lambda *, details=False: {})
    assert found is not None and json.loads(found.body)["title"] == "thunder"
