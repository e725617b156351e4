"""What a check is. It reads an EngineView and thresholds and returns one Verdict, or raises NoData and is UNKNOWN.

A check may not read a clock, do I/O, catch errors, format for a terminal or propose a setting.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvwatch.capacity import Capacity, EngineFacts, live_capacity
from kvwatch.errors import NoData
from kvwatch.finding import Finding, Status, Verdict, alert_name
from kvwatch.thresholds import Thresholds
from kvwatch.window import Window

# How annotations name the engine; the labels are those that recording rules and the agent set.
ENGINE = "{{ $labels.model_name }} engine {{ $labels.engine }} on {{ or $labels.target $labels.pod $labels.instance }}"
RUNBOOK_URL = "https://github.com/kvwatch/kvwatch/blob/main/docs/checks/{check}.md"


_T = TypeVar("_T")


class Fleet:
    """All engines that serve one model. What a check needs of all of them is derived once, not once per engine."""

    def __init__(self, windows: Iterable[Window] = ()) -> None:
        self.windows = tuple(windows)
        self._derived: dict[tuple[Any, ...], Any] = {}

    def derived(self, derive: Callable[..., _T], *arguments: Any) -> _T:
        """`derive(windows, *arguments)`, the same object for every engine."""
        key = (derive, *arguments)
        if key not in self._derived:
            self._derived[key] = derive(self.windows, *arguments)
        found: _T = self._derived[key]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """All that checks and recommendations may look at for one engine. `fleet` is every engine of its model, itself
    included; an empty one where only this engine is looked at.
    """

    window: Window
    capacity: Capacity
    facts: EngineFacts
    fleet: Fleet = field(default_factory=Fleet)


def engine_view(window: Window, facts: EngineFacts, *, fleet: Fleet | None = None) -> EngineView:
    """The window with the capacity that its latest page and the facts tell."""
    capacity = live_capacity(window.latest.cache_config, facts)
    return EngineView(window=window, capacity=capacity, facts=facts, fleet=fleet or Fleet())


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRule:
    """The condition as PromQL over the series of `recording.signals`, or over those of the agent.

    `summary` is a template of Prometheus (https://prometheus.io/docs/prometheus/latest/configuration/template_reference/).
    Name, runbook address and description come from the check.
    """

    severity: Status
    expr: str
    for_seconds: float
    keep_firing_for_seconds: float
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One condition. `docs` is the runbook page: a summary line, then Meaning, Impact, Diagnosis, Mitigation.

    `evaluate` judges a window, `alert` says the same to Prometheus: one rule for each severity.
    """

    id: str
    docs: str
    evaluate: Callable[[EngineView, Thresholds], Verdict]
    alert: Callable[[Thresholds], tuple[AlertRule, ...]]

    @property
    def alert_name(self) -> str:
        return alert_name(self.id)

    @property
    def summary(self) -> str:
        return self.docs.strip().partition("\n")[0]

    @property
    def runbook(self) -> str:
        return RUNBOOK_URL.format(check=self.id)

    def run(self, view: EngineView, limits: Thresholds) -> Finding:
        """The finding; what the window lacks makes it UNKNOWN with the name of what is missing."""
        try:
            verdict = self.evaluate(view, limits)
        except NoData as missing:
            verdict = Verdict(status=Status.UNKNOWN, summary=str(missing))
        return self.finding(verdict)

    def finding(self, verdict: Verdict) -> Finding:
        return Finding(
            check=self.id,
            status=verdict.status,
            summary=verdict.summary,
            evidence=verdict.evidence,
            runbook=self.runbook,
        )


def on_one_page(view: EngineView) -> str:
    """The end of a sentence: why it cannot be told whether a condition lasts, and what would tell it."""
    if view.window.restarts:
        return "on the only page since the engine restarted: ask again when there are more"
    return "on a single page: give --window or a capture folder to see if it lasts"


def warning(limits: Thresholds, *, expr: str, summary: str) -> AlertRule:
    """A rule that asks for somebody's day, not for their night."""
    return AlertRule(
        severity=Status.WARNING,
        expr=expr,
        for_seconds=limits.alert_for_seconds,
        keep_firing_for_seconds=limits.alert_keep_firing_seconds,
        summary=summary,
    )


def critical(limits: Thresholds, *, expr: str, summary: str) -> AlertRule:
    """A rule that wakes somebody."""
    return AlertRule(
        severity=Status.CRITICAL,
        expr=expr,
        for_seconds=limits.alert_critical_for_seconds,
        keep_firing_for_seconds=limits.alert_critical_keep_firing_seconds,
        summary=summary,
    )


def reported(check: str, status: Status) -> str:
    """PromQL for what an agent reports: the way of a condition that only a budget or request lengths can show."""
    return f'kvwatch_check_status{{check="{check}"}} == {status.code}'
