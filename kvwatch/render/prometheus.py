"""Report -> Prometheus text exposition 0.0.4 of kvwatch's own metrics.

A figure that is not known has no series. Label values are configured targets, the models and engines they serve, and
the ids of checks; prose stays out.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvwatch import __version__
from kvwatch.report import EngineReport, Report

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ENGINE_LABELS = ("target", "model_name", "engine")

BUILD, TIMESTAMP = "kvwatch_build_info", "kvwatch_report_timestamp_seconds"
SCRAPE_SUCCESS, SCRAPE_DURATION = "kvwatch_scrape_success", "kvwatch_scrape_duration_seconds"
CHECK_STATUS = "kvwatch_check_status"
STATE: Mapping[str, str] = {
    BUILD: "The kvwatch that writes this page.",
    TIMESTAMP: "Unix time of the latest report.",
    SCRAPE_SUCCESS: "Whether the target's latest page could be read.",
    SCRAPE_DURATION: "How long the target's latest page took.",
    CHECK_STATUS: "What a check says of an engine: 0 ok, 1 warning, 2 critical, 3 unknown.",
}
"""Metric -> help, of what the agent says about itself, its targets and its checks."""

CAPACITY: Mapping[str, tuple[str, str]] = {
    "num_gpu_blocks": ("kvwatch_capacity_num_gpu_blocks", "KV-cache blocks the engine has."),
    "usable_blocks": ("kvwatch_capacity_usable_blocks", "KV-cache blocks requests can hold: all but the null block."),
    "capacity_tokens": ("kvwatch_capacity_tokens", "Tokens the KV cache holds, as vLLM counts them."),
    "max_concurrency": ("kvwatch_capacity_max_concurrency", "Requests of max_model_len that fit into the KV cache."),
}
"""Field of Capacity -> metric and help."""

RECOMMENDED: Mapping[str, tuple[str, str]] = {
    "max_num_seqs": ("kvwatch_recommended_max_num_seqs", "Proposed --max-num-seqs."),
    "watermark": ("kvwatch_recommended_watermark_ratio", "Proposed --watermark."),
    "gateway_max_in_flight": (
        "kvwatch_recommended_gateway_max_in_flight",
        "Proposed cap of requests in flight on this engine, set in the gateway.",
    ),
    "gpu_memory_utilization": (
        "kvwatch_recommended_gpu_memory_utilization_ratio",
        "Proposed --gpu-memory-utilization.",
    ),
    "max_num_batched_tokens": ("kvwatch_recommended_max_num_batched_tokens", "Proposed --max-num-batched-tokens."),
    "max_model_len": ("kvwatch_recommended_max_model_len", "Proposed --max-model-len."),
    "replicas": ("kvwatch_recommended_replicas", "Proposed number of engines that serve this model."),
}
"""Setting of a Recommendation -> metric and help: every setting that is ever proposed as a number."""

EVIDENCE: Mapping[tuple[str, str], tuple[str, str]] = {
    ("capacity_below_budget", "budget_num_gpu_blocks"): (
        "kvwatch_budget_num_gpu_blocks",
        "KV-cache blocks the engine should have with its model, flags and GPU.",
    ),
    ("capacity_below_budget", "capacity_deviation_ratio"): (
        "kvwatch_capacity_deviation_ratio",
        "Live blocks against predicted blocks: 0 is as predicted, -0.1 a tenth fewer.",
    ),
    ("concurrency_oversubscribed", "requests_carried"): (
        "kvwatch_requests_carried",
        "Requests in flight, of today's lengths, that the KV cache carries without preemption.",
    ),
}
"""Check and evidence -> metric and help."""


def exposition(report: Report | None, *, at_seconds: float | None = None) -> bytes:
    """The whole page. `at_seconds` is the unix time of the report; without a report the page has the build alone."""
    registry = CollectorRegistry()
    registry.register(_Families(report, at_seconds))
    return generate_latest(registry)


class _Families(Collector):
    """Hands the families of one report to prometheus_client."""

    def __init__(self, report: Report | None, at_seconds: float | None) -> None:
        self._report = report
        self._at_seconds = at_seconds

    def collect(self) -> Iterator[GaugeMetricFamily]:
        build = GaugeMetricFamily(BUILD, STATE[BUILD], labels=("version",))
        build.add_metric((__version__,), 1)
        yield build
        if self._at_seconds is not None:
            yield GaugeMetricFamily(TIMESTAMP, STATE[TIMESTAMP], value=self._at_seconds)
        if self._report is not None:
            yield from _scrapes(self._report)
            yield from _engines(self._report)


def _scrapes(report: Report) -> Iterator[GaugeMetricFamily]:
    success = GaugeMetricFamily(SCRAPE_SUCCESS, STATE[SCRAPE_SUCCESS], labels=("target",))
    duration = GaugeMetricFamily(SCRAPE_DURATION, STATE[SCRAPE_DURATION], labels=("target",))
    for scrape in report.scrapes:
        success.add_metric((scrape.target,), float(scrape.failure is None))
        duration.add_metric((scrape.target,), scrape.duration_seconds)
    yield success
    yield duration


def _engines(report: Report) -> Iterator[GaugeMetricFamily]:
    status = GaugeMetricFamily(CHECK_STATUS, STATE[CHECK_STATUS], labels=(*_ENGINE_LABELS, "check"))
    families = {
        name: GaugeMetricFamily(name, text, labels=_ENGINE_LABELS)
        for name, text in (*CAPACITY.values(), *EVIDENCE.values(), *RECOMMENDED.values())
    }
    for engine in report.engines:
        labels = (engine.key.target, engine.key.model_name, engine.key.engine)
        for finding in engine.findings:
            status.add_metric((*labels, finding.check), finding.status.code)
        for name, value in _figures(engine):
            families[name].add_metric(labels, value)
    yield status
    yield from (family for family in families.values() if family.samples)


def _figures(engine: EngineReport) -> Iterator[tuple[str, float]]:
    """Metric name and value of every figure that is known for this engine."""
    for field, (name, _) in CAPACITY.items():
        value = getattr(engine.capacity, field)
        if value is not None:
            yield name, value
    evidence = {(f.check, key): value for f in engine.findings for key, value in f.evidence.items()}
    for place, (name, _) in EVIDENCE.items():
        found = evidence.get(place)
        if isinstance(found, (int, float)):
            yield name, found
    proposed = {item.setting: item.proposed for item in engine.recommendations}
    for setting, (name, _) in RECOMMENDED.items():
        number = proposed.get(setting)
        if isinstance(number, (int, float)):
            yield name, number
