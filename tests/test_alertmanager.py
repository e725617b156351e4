import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from parts import alertmanager, eventually, get_json, serving, webhook
from reports import DOWN, HEALTHY, KEY, THRASHING, findings, report_of
from servers import raw_server

from kvwatch.checks import ALL
from kvwatch.errors import SettingError
from kvwatch.finding import Status, Verdict, alert_name
from kvwatch.render.alertmanager import Alert, rfc3339
from kvwatch.report import EngineReport, Report
from kvwatch.sinks.alertmanager import RESOLVED_KEPT_SECONDS, Alertmanager, Batch, Patience, Tracker
from kvwatch.thresholds import DEFAULTS

PREEMPTED = "preemptions_sustained"


def test_an_alert_is_named_after_its_check_and_kv_stays_upper_case() -> None:
    assert alert_name("preemptions_sustained") == "VLLMPreemptionsSustained"
    assert alert_name("kv_cache_saturated") == "VLLMKVCacheSaturated"
    assert len({alert_name(check.id) for check in ALL}) == len(ALL)


# Which findings fire -------------------------------------------------------------------------------------------------


def engine(status: Status, check: str = PREEMPTED) -> EngineReport:
    verdict = Verdict(status=status, summary=status.value, evidence={"preemptions": 25.0})
    return replace(THRASHING, findings=findings({check: verdict}))


def tracker(
    for_seconds: float | None = 30.0, keep_firing_seconds: float | None = 60.0, down_for_seconds: float = 300.0
) -> Tracker:
    patience = Patience(
        for_seconds=for_seconds,
        down_for_seconds=down_for_seconds,
        keep_firing_seconds=keep_firing_seconds,
        limits=DEFAULTS,
    )
    return Tracker(patience, lifetime_seconds=30.0)


def play(tracked: Tracker, *reports: Report, from_seconds: float = 0.0) -> list[tuple[list[str], list[str]]]:
    """Reports five seconds apart -> the severities that fire and those that are resolved after each."""
    batches = [tracked.update(judged, from_seconds + 5.0 * number) for number, judged in enumerate(reports)]
    return [
        ([a.labels["severity"] for a in batch.firing], [a.labels["severity"] for a in batch.resolved])
        for batch in batches
    ]


CRITICAL, WARNING = report_of(engine(Status.CRITICAL)), report_of(engine(Status.WARNING))
FINE, UNKNOWN = report_of(engine(Status.OK)), report_of(engine(Status.UNKNOWN))


def test_a_condition_fires_once_it_has_held() -> None:
    played = play(tracker(for_seconds=10), *[CRITICAL] * 4)
    assert played == [([], []), ([], []), (["critical"], []), (["critical"], [])]


def test_a_condition_that_comes_and_goes_never_fires() -> None:
    assert play(tracker(for_seconds=10), *[CRITICAL, CRITICAL, FINE] * 5) == [([], [])] * 15


def test_without_a_wait_it_fires_at_once() -> None:
    assert play(tracker(for_seconds=0), WARNING) == [(["warning"], [])]


def test_it_is_resolved_once_and_only_after_it_was_gone_for_a_while() -> None:
    tracked = tracker(for_seconds=0, keep_firing_seconds=15)
    played = play(tracked, CRITICAL, FINE, FINE, CRITICAL, FINE, FINE, FINE, FINE)
    assert played[:6] == [(["critical"], [])] * 6
    assert played[6:] == [([], ["critical"]), ([], [])]


def test_what_becomes_unknown_is_held_and_then_resolved() -> None:
    played = play(tracker(for_seconds=0, keep_firing_seconds=10), WARNING, UNKNOWN, UNKNOWN, UNKNOWN)
    assert played == [(["warning"], []), (["warning"], []), ([], ["warning"]), ([], [])]


def test_an_engine_that_left_the_report_is_resolved() -> None:
    played = play(tracker(for_seconds=0, keep_firing_seconds=5), WARNING, report_of(HEALTHY))
    assert played == [(["warning"], []), ([], ["warning"])]


def test_critical_is_sent_instead_of_warning_and_falls_back_to_it() -> None:
    played = play(tracker(for_seconds=5, keep_firing_seconds=5), WARNING, WARNING, CRITICAL, CRITICAL, WARNING)
    assert played == [
        ([], []),
        (["warning"], []),
        (["warning"], []),
        (["critical"], ["warning"]),
        (["warning"], ["critical"]),
    ]


def test_without_an_own_wait_the_alert_rules_waits_apply() -> None:
    tracked = tracker(for_seconds=None, keep_firing_seconds=None)
    assert play(tracked, CRITICAL, from_seconds=0) == [([], [])]
    assert play(tracked, CRITICAL, from_seconds=DEFAULTS.alert_critical_for_seconds) == [(["critical"], [])]


def test_a_target_that_is_down_has_its_own_wait_because_rollouts_take_minutes() -> None:
    tracked = tracker(for_seconds=0, down_for_seconds=300)
    assert play(tracked, report_of(DOWN)) == [([], [])]
    assert play(tracked, report_of(DOWN), from_seconds=300) == [(["critical"], [])]


def test_the_start_stays_while_it_fires_and_the_end_moves_ahead() -> None:
    tracked = tracker(for_seconds=0)
    first, second = tracked.update(CRITICAL, 100.0).firing[0], tracked.update(CRITICAL, 105.0).firing[0]
    assert (first.starts_at_seconds, second.starts_at_seconds) == (100.0, 100.0)
    assert (first.ends_at_seconds, second.ends_at_seconds) == (130.0, 135.0)


def test_what_is_resolved_ends_now() -> None:
    tracked = tracker(for_seconds=0, keep_firing_seconds=0)
    tracked.update(WARNING, 100.0)
    (resolved,) = tracked.update(FINE, 105.0).resolved
    assert (resolved.starts_at_seconds, resolved.ends_at_seconds) == (100.0, 105.0)


def test_an_alert_names_the_engine_and_says_what_to_do() -> None:
    batch = tracker(for_seconds=0).update(report_of(THRASHING), 0.0)
    alert = next(a for a in batch.firing if a.labels["check"] == PREEMPTED)
    assert alert.labels == {
        "alertname": "VLLMPreemptionsSustained",
        "severity": "critical",
        "model_name": "llama-3-8b",
        "engine": "0",
        "target": KEY.target,
        "check": PREEMPTED,
    }
    assert alert.annotations["summary"] == (
        "llama-3-8b engine 0: 0.66 preemptions per second, 0.83 per finished request"
    )
    assert "preemptions 25, preemptions_per_second 0.6579" in alert.annotations["description"]
    assert "Now: gateway_max_in_flight = 17." in alert.annotations["description"]
    assert "At the next rollout: --watermark 0.08." in alert.annotations["description"]
    assert alert.annotations["runbook_url"].endswith("/preemptions_sustained.md")


def test_times_are_written_as_alertmanager_reads_them() -> None:
    assert rfc3339(1_800_000_000.5) == "2027-01-15T08:00:00.500+00:00"


# Sending -------------------------------------------------------------------------------------------------------------


def alert(check: str, ends_at_seconds: float = 30.0) -> Alert:
    return Alert(labels={"check": check}, annotations={}, starts_at_seconds=0.0, ends_at_seconds=ends_at_seconds)


def batch(firing: tuple[str, ...] = (), resolved: tuple[str, ...] = (), at_seconds: float = 0.0) -> Batch:
    return Batch(
        at_seconds=at_seconds,
        firing=tuple(alert(check, at_seconds + 30) for check in firing),
        resolved=tuple(alert(check, at_seconds) for check in resolved),
    )


class Received:
    """What a stand-in for Alertmanager got, as the set of (check, endsAt) of each post, and what it answers."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.posts: list[set[tuple[str, str]]] = []
        self.attempts = 0
        self.may_answer = threading.Event()
        self.may_answer.set()


@contextmanager
def receiver() -> Iterator[Received]:
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            alerts: list[dict[str, Any]] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/prefix/api/v2/alerts"
            received.attempts += 1
            received.may_answer.wait(10)
            if received.status == 200:
                received.posts.append({(a["labels"]["check"], a["endsAt"]) for a in alerts})
            self.send_response(received.status)
            self.end_headers()
            self.wfile.write(b"no" * 5000)

        def log_message(self, *_: object) -> None:
            """Silent."""

    with serving(Handler) as address:
        received.url = f"{address}/prefix/"
        yield received


def test_what_fires_and_what_is_resolved_is_sent() -> None:
    with receiver() as received:
        sink = Alertmanager(received.url)
        sink.submit(batch(firing=("a",), resolved=("b",)))
        assert eventually(lambda: received.posts) == [{("a", rfc3339(30)), ("b", rfc3339(0))}]
        sink.submit(batch(firing=("a",), at_seconds=5))
        assert eventually(lambda: received.posts[1:]) == [{("a", rfc3339(35))}]
        sink.close()


def test_nothing_is_sent_while_nothing_fires() -> None:
    with receiver() as received:
        sink = Alertmanager(received.url)
        sink.submit(batch())
        sink.submit(batch(firing=("a",)))
        assert eventually(lambda: received.posts) == [{("a", rfc3339(30))}]
        sink.close()


def test_a_resolved_alert_is_sent_again_until_it_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    with receiver() as received:
        received.status = 500
        sink = Alertmanager(received.url)
        sink.submit(batch(resolved=("b",)))
        eventually(lambda: received.attempts == 1)
        sink.submit(batch(at_seconds=5))
        eventually(lambda: received.attempts == 2)
        received.status = 200
        sink.submit(batch(at_seconds=10))
        assert eventually(lambda: received.posts) == [{("b", rfc3339(0))}]
        sink.submit(batch(firing=("a",), at_seconds=15))
        assert eventually(lambda: received.posts[1:]) == [{("a", rfc3339(45))}]
        sink.close()
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "alerts are refused with HTTP status 500",
        "alerts are accepted again",
    ]


def test_an_alert_that_fires_again_is_not_resolved_late() -> None:
    with receiver() as received:
        received.status = 503
        sink = Alertmanager(received.url)
        sink.submit(batch(resolved=("a",)))
        eventually(lambda: received.attempts == 1)
        received.status = 200
        sink.submit(batch(firing=("a",), at_seconds=5))
        assert eventually(lambda: received.posts) == [{("a", rfc3339(35))}]
        sink.close()


def test_a_resolved_alert_that_nobody_can_remember_is_dropped() -> None:
    with receiver() as received:
        received.status = 503
        sink = Alertmanager(received.url)
        sink.submit(batch(resolved=("b",)))
        eventually(lambda: received.attempts == 1)
        sink.submit(batch(at_seconds=RESOLVED_KEPT_SECONDS + 1))
        eventually(lambda: received.attempts == 2)
        received.status = 200
        sink.submit(batch(firing=("a",), at_seconds=RESOLVED_KEPT_SECONDS + 5))
        assert [check for check, _ in eventually(lambda: received.posts)[0]] == ["a"]
        sink.close()


def test_an_alertmanager_that_hangs_never_holds_up_the_caller() -> None:
    with receiver() as received:
        received.may_answer.clear()
        sink = Alertmanager(received.url)
        sink.submit(batch(firing=("a",)))
        eventually(lambda: received.attempts == 1)
        for number in range(50):
            sink.submit(batch(firing=("a",), at_seconds=number))
        assert received.posts == []
        received.may_answer.set()
        assert ("a", rfc3339(79)) in eventually(lambda: received.posts[1:])[0]
        assert received.attempts == 2
        sink.close()


def test_an_alertmanager_that_is_down_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    sink = Alertmanager("http://127.0.0.1:9")
    sink.submit(batch(firing=("a",)))
    eventually(lambda: caplog.records)
    assert caplog.records[0].getMessage() == (
        "http://127.0.0.1:9/api/v2/alerts: alerts cannot be sent (no connection; is it running and is this its port?); "
        "trying again after every round"
    )
    sink.close()


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(SettingError, match="http://alertmanager:9093"):
        Alertmanager("alertmanager:9093")


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("http://", "--alertmanager 'http://' is not an address"),
        ("ftp://a", "--alertmanager 'ftp://a' is not an address"),
        ("http://a:b", "Port could not be cast to integer value"),
        ("http://user:secret@a", "--alertmanager …@a: the address holds a login, which is not sent"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused(address: str, says: str) -> None:
    with pytest.raises(SettingError) as refused:
        Alertmanager(address)
    assert says in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (b"HTTP/1.1 ", "no answer within 0.3 s"),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 4000\r\n\r\n", "refused with HTTP status 500: x"),
    ],
)
def test_an_alertmanager_that_drips_its_answer_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, head: bytes, says: str
) -> None:
    def drip(line: socket.socket) -> None:
        line.sendall(head)
        while True:
            line.sendall(b"x")
            time.sleep(0.02)

    monkeypatch.setattr("kvwatch.sinks.alertmanager.TOTAL_SECONDS", 0.3)
    with raw_server(drip) as address:
        sink = Alertmanager(address)
        sink.submit(batch((PREEMPTED,)))
        assert eventually(lambda: says in caplog.text)
        sink.close()


CONFIG = """
route: {{receiver: hook, group_by: ['...'], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}}
receivers: [{{name: hook, webhook_configs: [{{url: '{url}', send_resolved: true}}]}}]
"""


@pytest.mark.real
def test_a_real_alertmanager_notifies_of_firing_and_of_resolved(tmp_path: Path) -> None:
    with webhook() as hook, alertmanager(tmp_path, CONFIG.format(url=hook.url)) as address:
        tracked = tracker(for_seconds=0, keep_firing_seconds=0)
        sink = Alertmanager(address)
        sink.submit(tracked.update(report_of(THRASHING), time.time()))
        eventually(lambda: len(hook.alerts("firing")) >= 4)
        posted = {a["labels"]["alertname"]: a for a in get_json(f"{address}/api/v2/alerts")}
        assert posted["VLLMPreemptionsSustained"]["labels"]["severity"] == "critical"
        sink.submit(tracked.update(report_of(replace(THRASHING, findings=findings({}))), time.time()))
        eventually(lambda: len(hook.alerts("resolved")) >= 4)
        fired = {a["labels"]["alertname"] for a in hook.alerts("firing")}
        assert fired == {a["labels"]["alertname"] for a in hook.alerts("resolved")} == set(posted)
        assert get_json(f"{address}/api/v2/alerts") == []
        sink.close()


@pytest.mark.real
def test_a_real_alertmanager_drops_the_empty_labels_of_a_target_without_an_engine(tmp_path: Path) -> None:
    with webhook() as hook, alertmanager(tmp_path, CONFIG.format(url=hook.url)) as address:
        tracked = tracker(for_seconds=0, down_for_seconds=0)
        sink = Alertmanager(address)
        sink.submit(tracked.update(report_of(DOWN), time.time()))
        (kept,) = eventually(lambda: get_json(f"{address}/api/v2/alerts"))
        assert kept["labels"] == {
            "alertname": "VLLMMetricsMissing",
            "severity": "critical",
            "target": DOWN.key.target,
            "check": "metrics_missing",
        }
        sink.close()
