"""The Report: what is said about every engine. Whatever kvwatch shows, serves or sends is made from one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwatch import checks
from kvwatch.analytic import estimate
from kvwatch.capacity import Capacity, EngineFacts, contradicted_max_model_len, live_capacity
from kvwatch.checks import metrics_missing
from kvwatch.checks.check import EngineView, Fleet, engine_view
from kvwatch.errors import NoData
from kvwatch.finding import Finding, Status, Verdict, worst
from kvwatch.proposal import Proposals, Recommendation, SettingOption, SimulationBasis, Withheld
from kvwatch.snapshot import CacheConfig, EngineKey
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
    from kvwatch.objective import Objective


MAX_SIMULATED_ENGINES = 8
_ENOUGH = (
    f"the load of {MAX_SIMULATED_ENGINES} engines, those that preempt most, is simulated at a time; give this engine "
    "alone as SOURCE"
)

Proposer = Callable[[EngineView, "tuple[Finding, ...]", Thresholds], Proposals]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One engine. `observed` holds what the window shows, without the entries the page cannot give.

    `at_seconds` is when its latest page was asked for, None where there never was one.
    """

    key: EngineKey
    vllm_version: str | None
    vllm_version_source: str
    at_seconds: float | None
    window_seconds: float
    restarts: int
    observed: Mapping[str, float]
    capacity: Capacity
    budget: Budget | None
    findings: tuple[Finding, ...]
    recommendations: tuple[Recommendation, ...]
    withheld: tuple[Withheld, ...]
    options: tuple[SettingOption, ...] = ()
    simulation: SimulationBasis | None = None

    @property
    def worst(self) -> Status:
        return worst([finding.status for finding in self.findings])


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """How the latest reading of one target went. `failure` is None where it gave a page."""

    target: str
    at_seconds: float
    duration_seconds: float
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All engines, the worst first. `notes` says what was left out of the sources and why.

    `scrapes` has one entry per target that is read again and again; it is empty for a single look.
    """

    window_seconds: float
    engines: tuple[EngineReport, ...]
    notes: tuple[str, ...] = ()
    scrapes: tuple[Scrape, ...] = ()

    @property
    def worst(self) -> Status:
        return worst([engine.worst for engine in self.engines])


def report(
    windows: Iterable[Window],
    *,
    facts: Mapping[str, EngineFacts] | None = None,
    limits: Thresholds = DEFAULTS,
    notes: Iterable[str] = (),
    scrapes: Iterable[Scrape] = (),
    failures: Mapping[EngineKey, str] | None = None,
    simulate: bool = False,
    objective: Objective = "balanced",
    proposer: Proposer = estimate,
) -> Report:
    """One Window per engine, and the facts per target, -> Report.

    `failures` says of engines why no page shows them now. Whatever their windows hold is old, so nothing of it is
    reported but its time. An engine of which only the failure is known needs no window.

    With `simulate`, settings for engines in trouble are chosen by simulating their load, which takes seconds of CPU
    for each, for at most MAX_SIMULATED_ENGINES of them; without it `proposer` decides, by default by formula.
    """
    known, gone = facts or {}, dict(failures or {})
    proposer = _simulating(objective) if simulate else proposer
    engines = []
    windows = tuple(_by_preemptions(windows) if simulate else windows)
    current = tuple(window for window in windows if window.key not in gone)
    fleets = _fleets(current)
    for window in windows:
        if window.key in gone:
            engines.append(unseen_engine(window.key, gone.pop(window.key), window.latest.at_seconds))
        else:
            own = known.get(window.key.target, EngineFacts())
            engines.append(engine_report(window, own, limits, proposer, fleets[window.key.model_name]))
    engines += [unseen_engine(key, reason, None) for key, reason in gone.items()]
    engines.sort(key=lambda engine: (-engine.worst.rank, engine.key))
    return Report(
        window_seconds=max((engine.window_seconds for engine in engines), default=0.0),
        engines=tuple(engines),
        notes=(*notes, *_contradictions(current, known)),
        scrapes=tuple(scrapes),
    )


def _contradictions(windows: Iterable[Window], facts: Mapping[str, EngineFacts]) -> list[str]:
    """Where what is given cannot be what runs."""
    notes = []
    for window in windows:
        own = facts.get(window.key.target, EngineFacts())
        shown = contradicted_max_model_len(window.latest.cache_config, own)
        if shown is not None:
            notes.append(
                f"{window.key} on {window.key.target}: max_model_len {own.max_model_len} "
                f"({own.source_of('max_model_len')}) is not used, for by the page of the engine it is {shown}"
            )
    return notes


def _simulating(objective: Objective) -> Proposer:
    from kvwatch.recommend import recommend  # noqa: PLC0415 -- a check does not load the simulator

    simulated = 0

    def proposer(view: EngineView, findings: tuple[Finding, ...], limits: Thresholds) -> Proposals:
        nonlocal simulated
        turned_away = _ENOUGH if simulated >= MAX_SIMULATED_ENGINES else None
        proposals = recommend(view, findings, limits, objective=objective, turned_away=turned_away)
        simulated += proposals.simulation is not None
        return proposals

    return proposer


def _by_preemptions(windows: Iterable[Window]) -> list[Window]:
    """The engine that preempts most first; where that is not known, last."""

    def rate(window: Window) -> float:
        try:
            return window.rate(PREEMPTIONS)
        except NoData:
            return -1.0

    return sorted(windows, key=rate, reverse=True)


def _fleets(windows: Iterable[Window]) -> dict[str, Fleet]:
    """The engines that serve the same model, by its name."""
    by_model: dict[str, list[Window]] = {}
    for window in windows:
        by_model.setdefault(window.key.model_name, []).append(window)
    return {name: Fleet(serving) for name, serving in by_model.items()}


def engine_report(
    window: Window,
    facts: EngineFacts,
    limits: Thresholds,
    proposer: Proposer = estimate,
    fleet: Fleet | None = None,
) -> EngineReport:
    view = engine_view(window, facts, fleet=fleet)
    findings = checks.evaluate_all(view, limits)
    proposals = proposer(view, findings, limits)
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
        recommendations=proposals.recommendations,
        withheld=proposals.withheld,
        options=proposals.options,
        simulation=proposals.simulation,
    )


def unseen_engine(key: EngineKey, reason: str, last_seen_seconds: float | None) -> EngineReport:
    """An engine of which no current page exists: metrics_missing is critical, everything else unknown."""
    missing = Verdict(status=Status.CRITICAL, summary=reason)
    unjudged = Verdict(status=Status.UNKNOWN, summary="no current page of this engine")
    return EngineReport(
        key=key,
        vllm_version=None,
        vllm_version_source="",
        at_seconds=last_seen_seconds,
        window_seconds=0.0,
        restarts=0,
        observed={},
        capacity=live_capacity(CacheConfig(), EngineFacts()),
        budget=None,
        findings=tuple(check.finding(missing if check is metrics_missing.CHECK else unjudged) for check in checks.ALL),
        recommendations=(),
        withheld=(),
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
