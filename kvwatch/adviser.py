"""Proposals for the agent: by formula at once, by simulation when that is ready.

Simulating an engine's load takes seconds of CPU, so it is done beside the rounds, one engine at a time, for engines
that have been in trouble for a while, and again only after minutes. Until then, and where it fails, the formula
answers. Pages from before the trouble are left out: together with those since they show a load that nobody offers.
"""

import logging
import threading
from dataclasses import dataclass, replace

from kvwatch.analytic import estimate
from kvwatch.checks.check import EngineView
from kvwatch.finding import Finding, Status
from kvwatch.proposal import Proposals
from kvwatch.snapshot import EngineKey
from kvwatch.thresholds import Thresholds

_LOG = logging.getLogger(__name__)

SETTLED_SECONDS = 60.0  # a dozen pages at the usual interval
AGAIN_AFTER_SECONDS = 1800.0
_TROUBLE = frozenset({"preemptions_sustained", "kv_cache_saturated", "sequence_cap_reached"})


@dataclass(slots=True)
class _Case:
    """One engine in trouble: since when, and what was simulated last. Times are those of pages."""

    since_seconds: float
    proposals: Proposals | None = None
    simulated_at_seconds: float | None = None


class Adviser:
    """Called by the rounds with each engine's view; never waits for a simulation."""

    def __init__(self, *, window_seconds: float, again_after_seconds: float = AGAIN_AFTER_SECONDS) -> None:
        self._settled_seconds = min(SETTLED_SECONDS, window_seconds)
        self._again_after_seconds = again_after_seconds
        self._cases: dict[EngineKey, _Case] = {}
        self._worker: threading.Thread | None = None

    def __call__(self, view: EngineView, findings: tuple[Finding, ...], limits: Thresholds) -> Proposals:
        key, now = view.window.key, view.window.latest.at_seconds
        if not _in_trouble(findings):
            self._cases.pop(key, None)
            return estimate(view, findings, limits)
        case = self._cases.setdefault(key, _Case(since_seconds=now))
        if self._is_due(case, now):
            case.simulated_at_seconds = now
            self._start(case, _since_trouble(case, view), findings, limits)
        return case.proposals or estimate(view, findings, limits)

    def _is_due(self, case: _Case, now: float) -> bool:
        if self._worker is not None and self._worker.is_alive():
            return False
        if case.simulated_at_seconds is not None:
            return now - case.simulated_at_seconds >= self._again_after_seconds
        return now - case.since_seconds >= self._settled_seconds

    def _start(self, case: _Case, view: EngineView, findings: tuple[Finding, ...], limits: Thresholds) -> None:
        name = f"simulation of {view.window.key}"
        self._worker = threading.Thread(target=_simulate, args=(case, view, findings, limits), name=name, daemon=True)
        self._worker.start()


def _since_trouble(case: _Case, view: EngineView) -> EngineView:
    seconds = view.window.latest.at_seconds - case.since_seconds
    if not 0 < seconds < view.window.duration_seconds:
        return view
    return replace(view, window=view.window.last(seconds))


def _simulate(case: _Case, view: EngineView, findings: tuple[Finding, ...], limits: Thresholds) -> None:
    from kvwatch.recommend import recommend  # noqa: PLC0415 -- an agent without trouble does not load the simulator

    try:
        case.proposals = recommend(view, findings, limits)
    except Exception:  # noqa: BLE001 -- a fault in the simulation must not end the watch; the formula still answers
        _LOG.exception("the load of %s could not be simulated; its settings are estimated by formula", view.window.key)


def _in_trouble(findings: tuple[Finding, ...]) -> bool:
    return any(f.check in _TROUBLE and f.status in {Status.WARNING, Status.CRITICAL} for f in findings)
