"""Findings -> alerts in the form of Alertmanager's API v2 (api/v2/openapi.yaml, postableAlert)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from kvwatch.finding import Finding, alert_name
from kvwatch.report import EngineReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert. Its labels are its identity; `ends_at_seconds` in the past resolves it. Unix seconds."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_at_seconds: float
    ends_at_seconds: float


def labels(engine: EngineReport, finding: Finding, severity: str) -> dict[str, str]:
    """What identifies the alert. Alertmanager drops a label that is empty."""
    return {
        "alertname": alert_name(finding.check),
        "severity": severity,
        "model_name": engine.key.model_name,
        "engine": engine.key.engine,
        "target": engine.key.target,
        "check": finding.check,
    }


def annotations(engine: EngineReport, finding: Finding) -> dict[str, str]:
    """What a person reads: the sentence, the numbers behind it with what to do now, and the runbook."""
    return {
        "summary": f"{engine.key}: {finding.summary}",
        "description": "\n".join(_description(engine, finding)),
        "runbook_url": finding.runbook,
    }


def payload(alerts: Iterable[Alert]) -> list[dict[str, Any]]:
    """Alerts -> the body of POST /api/v2/alerts."""
    return [
        {
            "labels": dict(alert.labels),
            "annotations": dict(alert.annotations),
            "startsAt": rfc3339(alert.starts_at_seconds),
            "endsAt": rfc3339(alert.ends_at_seconds),
        }
        for alert in alerts
    ]


def rfc3339(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, tz=timezone.utc).isoformat(timespec="milliseconds")


def _description(engine: EngineReport, finding: Finding) -> Iterable[str]:
    yield f"Target {engine.key.target}"
    if finding.evidence:
        yield ", ".join(f"{name} {_short(value)}" for name, value in finding.evidence.items())
    for item in engine.recommendations:
        if finding.check in item.because:
            when = "Now" if item.apply == "now" else "At the next rollout"
            yield f"{when}: {item.flag or f'{item.setting} = {item.proposed}'}. {item.note}".rstrip(". ")


def _short(value: float | str) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
