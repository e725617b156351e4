"""What a check is. It reads an EngineView and thresholds and returns one Verdict, or raises NoData and is UNKNOWN.

A check may not read a clock, do I/O, catch errors, format for a terminal or propose a setting.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvwatch.capacity import Capacity, EngineFacts
from kvwatch.errors import NoData
from kvwatch.finding import Finding, Status, Verdict
from kvwatch.thresholds import Thresholds
from kvwatch.window import Window

RUNBOOK_URL = "https://github.com/kvwatch/kvwatch/blob/main/docs/checks/{check}.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """All that checks and recommendations may look at for one engine."""

    window: Window
    capacity: Capacity
    facts: EngineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One condition. `docs` is the runbook page: a summary line, then Meaning, Impact, Diagnosis, Mitigation."""

    id: str
    docs: str
    evaluate: Callable[[EngineView, Thresholds], Verdict]

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
