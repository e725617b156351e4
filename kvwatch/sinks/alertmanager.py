"""Alerts for Alertmanager: which findings fire since when, and sending them without ever holding up the agent.

A condition fires when it has held for a while and is resolved when it has been gone for a while, so that a value around
its threshold is one alert. Whatever fires is sent again after every round with an end a little ahead of now: if the
agent dies or is stopped, its alerts end by themselves within that time.
"""

import json
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias
from urllib.parse import urlsplit

import urllib3

from kvwatch.errors import SettingError, SinkError, printable
from kvwatch.finding import Finding, Status
from kvwatch.render.alertmanager import Alert, annotations, labels, payload
from kvwatch.report import EngineReport, Report
from kvwatch.snapshot import EngineKey
from kvwatch.sources.scrape import Line, pools_with
from kvwatch.thresholds import Thresholds

CONNECT_SECONDS, READ_SECONDS, TOTAL_SECONDS = 3.0, 5.0, 10.0
# As Prometheus does (rules/alerting.go, resolvedRetention): an Alertmanager back after this has forgotten the alert.
RESOLVED_KEPT_SECONDS = 900.0
_ANSWER_BYTES = 4096
_LOG = logging.getLogger(__name__)


# Which findings fire -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a condition must hold before it fires, and be gone before it is resolved. None: as the alert rules."""

    for_seconds: float | None
    down_for_seconds: float
    keep_firing_seconds: float | None
    limits: Thresholds

    def before_firing(self, finding: Finding, severity: str) -> float:
        if finding.check == "metrics_missing" and finding.status is Status.CRITICAL:
            return self.down_for_seconds
        if self.for_seconds is not None:
            return self.for_seconds
        limits = self.limits
        return limits.alert_critical_for_seconds if severity == "critical" else limits.alert_for_seconds

    def before_resolving(self, severity: str) -> float:
        if self.keep_firing_seconds is not None:
            return self.keep_firing_seconds
        if severity == "critical":
            return self.limits.alert_critical_keep_firing_seconds
        return self.limits.alert_keep_firing_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What to tell Alertmanager after one round: all alerts that fire, and those resolved in this round."""

    at_seconds: float
    firing: tuple[Alert, ...]
    resolved: tuple[Alert, ...]


@dataclass(frozen=True, slots=True, order=True)
class _Place:
    key: EngineKey
    check: str
    severity: str


@dataclass(slots=True, kw_only=True)
class _Condition:
    """A finding at least this severe, as last seen."""

    since: float
    last_seen: float
    engine: EngineReport
    finding: Finding
    fires: bool = False


class Tracker:
    """Reports in the order of time -> alerts. Time is given; nothing here waits, sends or reads a clock.

    A critical finding is a warning as well. While both fire only the critical alert is sent, so a finding that sinks to
    a warning becomes a warning alert at once instead of waiting anew.
    """

    def __init__(self, patience: Patience, *, lifetime_seconds: float) -> None:
        self._patience = patience
        self._lifetime_seconds = lifetime_seconds
        self._conditions: dict[_Place, _Condition] = {}
        self._sent: dict[_Place, Alert] = {}

    def update(self, report: Report, now_seconds: float) -> Batch:
        self._note(report, now_seconds)
        self._settle(now_seconds)
        firing = {
            place: self._alert(place, condition, now_seconds)
            for place, condition in sorted(self._conditions.items())
            if condition.fires and not self._outranked(place)
        }
        resolved = tuple(
            replace(alert, ends_at_seconds=now_seconds) for place, alert in self._sent.items() if place not in firing
        )
        self._sent = firing
        return Batch(at_seconds=now_seconds, firing=tuple(firing.values()), resolved=resolved)

    def _note(self, report: Report, now: float) -> None:
        for engine in report.engines:
            for finding in engine.findings:
                for severity in _severities(finding.status):
                    condition = self._conditions.setdefault(
                        _Place(engine.key, finding.check, severity),
                        _Condition(since=now, last_seen=now, engine=engine, finding=finding),
                    )
                    condition.last_seen, condition.engine, condition.finding = now, engine, finding

    def _settle(self, now: float) -> None:
        """Let conditions that held long enough fire, and forget those that are gone for long enough."""
        for place, condition in list(self._conditions.items()):
            gone = now - condition.last_seen
            if not condition.fires and gone == 0:
                wanted = self._patience.before_firing(condition.finding, place.severity)
                condition.fires = now - condition.since >= wanted
            elif not condition.fires or (gone > 0 and gone >= self._patience.before_resolving(place.severity)):
                del self._conditions[place]

    def _outranked(self, place: _Place) -> bool:
        if place.severity == "critical":
            return False
        critical = self._conditions.get(replace(place, severity="critical"))
        return critical is not None and critical.fires

    def _alert(self, place: _Place, condition: _Condition, now: float) -> Alert:
        before = self._sent.get(place)
        return Alert(
            labels=labels(condition.engine, condition.finding, place.severity),
            annotations=annotations(condition.engine, condition.finding),
            starts_at_seconds=before.starts_at_seconds if before else now,
            ends_at_seconds=now + self._lifetime_seconds,
        )


def _severities(status: Status) -> Iterator[str]:
    if status in {Status.WARNING, Status.CRITICAL}:
        yield "warning"
    if status is Status.CRITICAL:
        yield "critical"


# Sending -------------------------------------------------------------------------------------------------------------

_Identity: TypeAlias = tuple[tuple[str, str], ...]


class Alertmanager:
    """One Alertmanager, told from a thread of its own. `submit` never waits; the next round is the retry."""

    def __init__(self, base_url: str) -> None:
        _check(base_url)
        self.base_url = base_url.rstrip("/")
        timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS)
        self._http = urllib3.PoolManager(num_pools=1, maxsize=1, timeout=timeout, retries=False)
        self._line = Line()
        self._http.pool_classes_by_scheme = pools_with(self._line)
        self._wakes = threading.Condition()
        self._batch: Batch | None = None
        self._unsent_ends: dict[_Identity, Alert] = {}
        self._failing = False
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="alertmanager", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> None:
        """Hand over the newest batch. A batch not sent yet is replaced; its resolved alerts are kept."""
        with self._wakes:
            for alert in batch.resolved:
                self._unsent_ends[_identity(alert.labels)] = alert
            for alert in batch.firing:
                self._unsent_ends.pop(_identity(alert.labels), None)
            self._batch = batch
            self._wakes.notify()

    def close(self) -> None:
        """Send no more. What fires is left to end by itself."""
        with self._wakes:
            self._closed = True
            self._wakes.notify()

    def _work(self) -> None:
        while True:
            with self._wakes:
                self._wakes.wait_for(lambda: self._batch is not None or self._closed)
                if self._closed or self._batch is None:
                    return
                batch, self._batch = self._batch, None
                resolved = dict(self._unsent_ends)
            if batch.firing or resolved:
                self._deliver(batch, resolved)

    def _deliver(self, batch: Batch, resolved: Mapping[_Identity, Alert]) -> None:
        try:
            self._post((*batch.firing, *resolved.values()))
        except SinkError as error:
            if not self._failing:
                _LOG.warning("%s; trying again after every round", error)
            self._failing = True
            oldest = batch.at_seconds - RESOLVED_KEPT_SECONDS
            done = {identity for identity, alert in resolved.items() if alert.ends_at_seconds < oldest}
        else:
            if self._failing:
                _LOG.warning("%s: alerts are accepted again", self.base_url)
            self._failing = False
            done = set(resolved)
        with self._wakes:
            for identity in done:
                if self._unsent_ends.get(identity) is resolved[identity]:
                    del self._unsent_ends[identity]

    def _post(self, alerts: tuple[Alert, ...]) -> None:
        """Raises SinkError with what the Alertmanager, or the way to it, says."""
        address = f"{self.base_url}/api/v2/alerts"
        headers = {"Content-Type": "application/json", "User-Agent": "kvwatch"}
        body = json.dumps(payload(alerts)).encode()
        with self._line.cut_after(TOTAL_SECONDS):
            try:
                response = self._http.request(
                    "POST", address, body=body, headers=headers, redirect=False, preload_content=False
                )
                said = response.read(_ANSWER_BYTES, decode_content=False)
            except (urllib3.exceptions.HTTPError, OSError, UnicodeError, ValueError) as error:
                slow = f"no answer within {TOTAL_SECONDS:g} s" if self._line.was_cut else _reason(error)
                raise SinkError(f"{address}: alerts cannot be sent ({slow})") from error
        if response.length_remaining:
            response.close()  # the rest is not wanted, so the connection cannot serve another request
        response.release_conn()
        if response.status != 200:
            text = " ".join(printable(said.decode("utf-8", "replace")).split())[:300]
            raise SinkError(f"{address}: alerts are refused with HTTP status {response.status}: {text}")


def _check(base_url: str) -> None:
    """Raise SettingError for what cannot be the address of an Alertmanager, without the password if it holds one."""
    try:
        parts = urlsplit(base_url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise SettingError(f"--alertmanager {base_url!r}: {error}; give http://alertmanager:9093") from error
    if "@" in parts.netloc:
        raise SettingError(f"--alertmanager …@{host}: the address holds a login, which is not sent; leave it out")
    if parts.scheme not in {"http", "https"} or not host:
        raise SettingError(f"--alertmanager {base_url!r} is not an address such as http://alertmanager:9093")


def _identity(names: Mapping[str, str]) -> _Identity:
    return tuple(sorted(names.items()))


def _reason(error: Exception) -> str:
    if isinstance(error, urllib3.exceptions.NewConnectionError):
        return "no connection; is it running and is this its port?"
    return " ".join(printable(f"{type(error).__name__}: {str(error)[:200]}").split())
