"""The Report: what is said about every engine. Whatever kvwatch shows, serves or sends is made from one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwatch import checks
from kvwatch.capacity import Capacity, EngineFacts, live_capacity
from kvwatch.checks.check import EngineView
from kvwatch.errors import NoData
from kvwatch.finding import Finding, Status, worst
from kvwatch.recommend import Recommendation, Withheld, recommend
from kvwatch.snapshot import EngineKey
from kvwatch.thresholds import DEFAULTS, Thresholds
from kvwatch.vllm_metrics import (
    GENERATION_TOKENS,
    INTER_TOKEN_LATENCY,
    KV_CACHE_USAGE,
    PREEMPTIONS,
    PREFIX_CACHE_HITS,
    PREFIX_CACHE_QUERIES,
    PROMPT_TOKENS,
    QUEUE_TIME,
    REQUEST_SUCCESS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    TIME_TO_FIRST_TOKEN,
)
from kvwatch.window import Window

if TYPE_CHECKING:
    from kvwatch.budget import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One engine. `observed` holds what the window shows, without the entries the page cannot give."""

    key: EngineKey
    vllm_version: str | None
    vllm_version_source: str
    at_seconds: float
    window_seconds: float
    restarts: int
    observed: Mapping[str, float]
    capacity: Capacity
    budget: Budget | None
    findings: tuple[Finding, ...]
    recommendations: tuple[Recommendation, ...]
    withheld: tuple[Withheld, ...]

    @property
    def worst(self) -> Status:
        return worst([finding.status for finding in self.findings])


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All engines, the worst first. `notes` says what was left out of the sources and why."""

    window_seconds: float
    engines: tuple[EngineReport, ...]
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> Status:
        return worst([engine.worst for engine in self.engines])


def report(
    windows: Iterable[Window],
    *,
    facts: Mapping[str, EngineFacts] | None = None,
    limits: Thresholds = DEFAULTS,
    notes: Iterable[str] = (),
) -> Report:
    """One Window per engine, and the facts per target, -> Report."""
    known = facts or {}
    engines = [engine_report(window, known.get(window.key.target, EngineFacts()), limits) for window in windows]
    engines.sort(key=lambda engine: (-engine.worst.rank, engine.key))
    return Report(
        window_seconds=max((engine.window_seconds for engine in engines), default=0.0),
        engines=tuple(engines),
        notes=tuple(notes),
    )


def engine_report(window: Window, facts: EngineFacts, limits: Thresholds) -> EngineReport:
    view = EngineView(window=window, capacity=live_capacity(window.latest.cache_config, facts), facts=facts)
    findings = checks.evaluate_all(view, limits)
    proposals, withheld = recommend(view, findings, limits)
    inferred = window.latest.vllm_version_at_least
    return EngineReport(
        key=window.key,
        vllm_version=facts.vllm_version or inferred,
        vllm_version_source=facts.source_of("vllm_version") if facts.vllm_version else "at least" if inferred else "",
        at_seconds=window.latest.at_seconds,
        window_seconds=window.duration_seconds,
        restarts=window.restarts,
        observed=_observed(window),
        capacity=view.capacity,
        budget=facts.budget,
        findings=findings,
        recommendations=proposals,
        withheld=withheld,
    )


def _observed(window: Window) -> dict[str, float]:
    """What the window shows, by name with unit. What is missing is left out."""
    readings: dict[str, Callable[[], float]] = {
        "running_requests": lambda: window.value(REQUESTS_RUNNING),
        "waiting_requests": lambda: window.value(REQUESTS_WAITING),
        "kv_cache_usage_ratio": lambda: window.value(KV_CACHE_USAGE),
        "kv_cache_usage_ratio_minimum": lambda: window.minimum(KV_CACHE_USAGE),
        "kv_cache_usage_ratio_maximum": lambda: window.maximum(KV_CACHE_USAGE),
        "preemptions_per_second": lambda: window.rate(PREEMPTIONS),
        "finished_requests_per_second": lambda: window.rate(REQUEST_SUCCESS),
        "prompt_tokens_per_second": lambda: window.rate(PROMPT_TOKENS),
        "generation_tokens_per_second": lambda: window.rate(GENERATION_TOKENS),
        "prefix_cache_hit_ratio": lambda: _hit_ratio(window),
        "time_to_first_token_p50_seconds": lambda: window.quantile(TIME_TO_FIRST_TOKEN, 0.5),
        "time_to_first_token_p95_seconds": lambda: window.quantile(TIME_TO_FIRST_TOKEN, 0.95),
        "inter_token_latency_p95_seconds": lambda: window.quantile(INTER_TOKEN_LATENCY, 0.95),
        "queue_time_mean_seconds": lambda: window.average(QUEUE_TIME),
    }
    observed: dict[str, float] = {}
    for name, read in readings.items():
        try:
            observed[name] = read()
        except NoData:
            continue
    return observed


def _hit_ratio(window: Window) -> float:
    """Share of the looked-up prompt tokens found in the cache inside the window."""
    queries = window.increase(PREFIX_CACHE_QUERIES)
    if queries <= 0:
        raise NoData("no prompt was looked up in the window")
    return min(1.0, window.increase(PREFIX_CACHE_HITS) / queries)
