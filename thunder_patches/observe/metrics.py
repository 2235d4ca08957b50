"""``/thunder/metrics``: the status in Prometheus' text form.

Names and units by https://prometheus.io/docs/practices/naming/: seconds, bytes, ``_total`` for what only
grows. Nothing is counted twice for it: every figure is taken from the status.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from typing import Any

RESULTS = ("full", "approximate", "partial", "miss")
TOKENS = ("skipped", "computed")
TIERS = ("ram", "ssd")
WORDS = {
    "blocks_written": "Records written to the disk",
    "blocks_evicted": "Records deleted to keep the folder within its budget",
    "writes_dropped": "Records that were not written because the queue was full",
    "corrupt": "Files that were not what they should be",
    "set_aside": "Files moved away because they were bad",
}
RENAMED = {"corrupt": "corrupt_files", "set_aside": "files_set_aside", "bytes_saved": "saved_bytes"}


def metrics(status: Mapping[str, Any]) -> tuple[str, bytes]:
    """Content type and text of the metrics that a status holds.

    Raises:
        ModuleNotFoundError: without the extra ``metrics``.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status))
    return CONTENT_TYPE_LATEST, generate_latest(registry)


def dashboard() -> str:
    """A Grafana dashboard of these metrics, to import there."""
    return (resources.files(__package__) / "grafana.json").read_text(encoding="utf-8")


class _Collector:
    """Families of one status."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Any]:
        status = self._status
        yield _info(status)
        yield from _process()
        yield _gauge(
            "feature_on",
            "1 where a feature is at work, by the package or by the host itself",
            ("feature",),
            (
                ((name,), feature["state"] in ("applied", "host_has_it"))
                for name, feature in status["features"].items()
            ),
        )
        eligible = status["model"].get("eligible")
        if eligible is not None:
            yield _gauge(
                "model_eligible", "1 where the loaded model is cached", (), [((), eligible)]
            )
        cache = status["cache"]
        if "counts" in cache:
            yield from _counters(dict(cache["counts"]))
        if "ram" in cache:
            yield from _sizes(cache)
        if "first_tokens" in status:
            yield _first_tokens(status["first_tokens"])


def _info(status: Mapping[str, Any]) -> Any:
    from prometheus_client.core import InfoMetricFamily

    host = status["host"] or {}
    labels = {
        "version": status["version"],
        "host": host.get("name", ""),
        "host_version": host.get("version", ""),
        "model_family": str(status["model"].get("family") or ""),
    }
    return InfoMetricFamily("thunder", "The package, its host and the loaded model", value=labels)


def _process() -> Iterator[Any]:
    """The two figures of a process that are the same for all exporters, by their usual names."""
    import psutil
    from prometheus_client.core import GaugeMetricFamily

    process = psutil.Process()
    yield GaugeMetricFamily(
        "process_resident_memory_bytes", "Resident memory", value=process.memory_info().rss
    )
    yield GaugeMetricFamily(
        "process_start_time_seconds", "Start, since the epoch", value=process.create_time()
    )


def _counters(counts: dict[str, int]) -> Iterator[Any]:
    yield _counter(
        "requests",
        "Prompts looked up, by what was reused of them",
        ("result",),
        (((name,), counts.pop(name, 0)) for name in RESULTS),
    )
    yield _counter(
        "prompt_tokens",
        "Tokens of prompts, by whether they had to be computed",
        ("state",),
        (((name,), counts.pop(f"tokens_{name}", 0)) for name in TOKENS),
    )
    for name, value in counts.items():
        safe = re.sub(r"\W", "_", RENAMED.get(name, name))
        help = WORDS.get(name, name.replace("_", " ").capitalize())
        yield _counter(safe, help, (), [((), value)])


def _sizes(cache: Mapping[str, Any]) -> Iterator[Any]:
    for name, field, help in (
        ("cache_bytes", "bytes", "Bytes held"),
        ("cache_budget_bytes", "budget_bytes", "Bytes that may be held"),
        ("cache_blocks", "blocks", "Records held: blocks and snapshots"),
    ):
        yield _gauge(name, help, ("tier",), (((tier,), cache[tier][field]) for tier in TIERS))
    queue = cache.get("queue", {})
    for field in ("bytes", "blocks"):
        help = f"{field.capitalize()} that wait to be written"
        yield _gauge(f"write_queue_{field}", help, (), [((), queue.get(field, 0))])


def _first_tokens(histograms: Mapping[str, Any]) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(
        "thunder_time_to_first_token_seconds",
        "From the request to the first token of its answer, by what was reused",
        labels=("result",),
    )
    for result, told in histograms.items():
        bounds = [*map(str, told["le"]), "+Inf"]
        buckets = list(zip(bounds, told["counts"], strict=True))
        family.add_metric([result], buckets, told["sum"])
    return family


Samples = Iterable[tuple[tuple[str, ...], float]]


def _gauge(name: str, help: str, labels: tuple[str, ...], samples: Samples) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(f"thunder_{name}", help, labels=labels), samples)


def _counter(name: str, help: str, labels: tuple[str, ...], samples: Samples) -> Any:
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(f"thunder_{name}", help, labels=labels), samples)


def _filled(family: Any, samples: Samples) -> Any:
    for labels, value in samples:
        family.add_metric(labels, float(value))
    return family
