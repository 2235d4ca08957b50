"""The metrics: readable by Prometheus' own parser and tools, named by its conventions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.harness.statuses import big_status, empty_status
from thunder_patches.observe.metrics import metrics
from thunder_patches.observe.routes import answer

parser = pytest.importorskip("prometheus_client.parser")


def samples(status: dict[str, Any]) -> dict[tuple[Any, ...], float]:
    """(name, label values in order...) -> value."""
    _, text = metrics(status)
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in parser.text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_the_figures_are_those_of_the_status() -> None:
    status = big_status(300)
    found = samples(status)
    assert found["thunder_requests_total", "full"] == 80
    assert found["thunder_requests_total", "miss"] == 75
    assert found["thunder_prompt_tokens_total", "skipped"] == 3_913_000
    assert found["thunder_cache_bytes", "ram"] == 3 << 30
    assert found["thunder_cache_budget_bytes", "ssd"] == 50 << 30
    assert found["thunder_blocks_evicted_total",] == 31
    assert found["thunder_feature_on", "ssd_cache"] == 1
    assert found["thunder_feature_on", "approx_skip"] == 0
    name = "thunder_time_to_first_token_seconds"
    last = {result: each["counts"][-1] for result, each in status["first_tokens"].items()}
    for result, count in last.items():
        assert found[f"{name}_count", result] == found[f"{name}_bucket", "+Inf", result] == count
    assert sum(last.values()) == 300


def test_an_unknown_counter_and_a_hostile_name_are_no_harm() -> None:
    status = empty_status()
    status["cache"]["counts"] |= {"bytes_saved": 7, 'odd "name"\n': 3}
    status["features"] = {'a"b\\c\nd': {"state": "applied", "reason": ""}}
    status["model"] = {"family": "\u2028x", "eligible": None}
    found = samples(status)
    assert found["thunder_saved_bytes_total",] == 7
    assert found["thunder_odd__name___total",] == 3
    assert found["thunder_feature_on", 'a"b\\c\nd'] == 1


def test_a_status_with_faults_still_has_metrics() -> None:
    status = empty_status() | {"cache": {"error": "OSError: gone"}, "host": None}
    assert ("thunder_feature_on", "ssd_cache") in samples(status)


@pytest.mark.parametrize("status", [empty_status(), big_status(100)], ids=["empty", "big"])
def test_promtool_has_nothing_to_say(status: dict[str, Any]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool (Debian: prometheus)")
    _, text = metrics(status)
    assert lint(promtool, text) == ""
    wrong = text + b"# TYPE thunder_wrongTotal counter\nthunder_wrongTotal 1\n"
    assert "thunder_wrongTotal" in lint(promtool, wrong)


def lint(promtool: str, text: bytes) -> str:
    command = [promtool, "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, timeout=60, check=False)
    return (done.stdout + done.stderr).decode()


def test_without_the_extra_the_route_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("prometheus_client")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    found = answer("GET", "/thunder/metrics", "", lambda *, details=False: empty_status())
    assert found is not None and found.status == 501
    assert b"thunder-patches[metrics]" in found.body
