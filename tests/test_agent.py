import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import CAPTURES, engine_page
from parts import alertmanager, answers, eventually, free_port, get, get_json, serving, stop, webhook

from kvwatch import agent as agent_module
from kvwatch.agent import Agent, next_round
from kvwatch.cli.agent import signals
from kvwatch.config import Config
from kvwatch.errors import SettingError, SourceError
from kvwatch.exposition import MAX_PAGE_BYTES
from kvwatch.finding import Status
from kvwatch.report import EngineReport, Report
from kvwatch.server import Board
from kvwatch.snapshot import EngineKey

THRASH = sorted((CAPTURES / "thrash").glob("*.prom"))


class FakeServer:
    """A vLLM server that shows `page`, or does what `behave` does instead."""

    def __init__(self) -> None:
        self.url = ""
        self.page = engine_page(running=3, usage=0.2)
        self.behave: Callable[[BaseHTTPRequestHandler], None] | None = None
        self.requests: list[str] = []
        self.headers: list[str] = []
        self.version = "0.32.0"

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        self.requests.append(handler.path)
        self.headers.append(handler.headers.get("Authorization", ""))
        if self.behave is not None and handler.path == "/metrics":
            self.behave(handler)
            return
        bodies = {
            "/metrics": self.page,
            "/version": json.dumps({"version": self.version}),
            "/v1/models": json.dumps({"data": [{"id": "m", "max_model_len": 4096}]}),
        }
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(bodies[handler.path].encode())


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fake.handle(self)

        def log_message(self, *_: object) -> None:
            """Silent."""

    with serving(Handler) as address:
        fake.url = address
        yield fake


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with fake_server() as made:
        yield made


def agent_for(*targets: str, interval: float = 5.0, **settings: object) -> tuple[Agent, Board]:
    config = Config(
        targets=targets,
        host="127.0.0.1",
        port=0,
        interval_seconds=interval,
        window_seconds=12 * interval,
        **settings,  # type: ignore[arg-type]
    )
    board = Board(interval_seconds=interval)
    return Agent(config, facts_of=lambda _made, told: told, board=board), board


def status_of(engine: EngineReport, check: str) -> tuple[Status, str]:
    finding = next(finding for finding in engine.findings if finding.check == check)
    return finding.status, finding.summary


def says(judged: Report) -> str:
    """The summary of metrics_missing of the only engine, which must be critical and all that is known."""
    (engine,) = judged.engines
    assert engine.observed == {}
    assert {f.check for f in engine.findings if f.status is not Status.UNKNOWN} == {"metrics_missing"}
    status, summary = status_of(engine, "metrics_missing")
    assert status is Status.CRITICAL
    assert judged.scrapes[0].failure is not None
    return summary


def refuse(handler: BaseHTTPRequestHandler) -> None:
    handler.send_error(500)


def test_a_round_scrapes_judges_and_publishes(fake: FakeServer) -> None:
    watched, board = agent_for(fake.url)
    judged = watched.round()
    assert board.latest is not None
    assert board.latest.report is judged
    (engine,) = judged.engines
    assert engine.key == EngineKey(target=fake.url, model_name="m", engine="0")
    assert engine.observed["running_requests"] == 3
    assert judged.scrapes[0].failure is None
    watched.close()


def test_what_the_server_tells_about_itself_is_in_the_first_report(fake: FakeServer) -> None:
    watched, _ = agent_for(fake.url)
    (engine,) = watched.round().engines
    assert (engine.vllm_version, engine.capacity.max_model_len) == ("0.32.0", 4096)
    watched.round()
    assert fake.requests == ["/metrics", "/version", "/v1/models", "/metrics"]
    watched.close()


def test_the_server_is_asked_again_after_a_restart(fake: FakeServer) -> None:
    watched, _ = agent_for(fake.url)
    watched.round()
    fake.page, fake.version = engine_page(running=1, started=1_700_000_500.0), "0.33.0"
    (engine,) = watched.round().engines
    assert engine.vllm_version == "0.33.0"
    assert engine.restarts == 1
    watched.close()


def test_a_fallen_counter_is_a_restart_as_well(fake: FakeServer) -> None:
    watched, _ = agent_for(fake.url)
    fake.page = engine_page(tokens=500, started=None)
    watched.round()
    fake.page, fake.version = engine_page(tokens=10, started=None), "0.33.0"
    assert watched.round().engines[0].vllm_version == "0.33.0"
    watched.close()


def test_headers_go_to_the_target(fake: FakeServer) -> None:
    watched, _ = agent_for(fake.url, headers={"Authorization": "Bearer x"})
    watched.round()
    assert set(fake.headers) == {"Bearer x"}
    watched.close()


def test_a_recorded_thrash_is_critical_with_a_recommendation(fake: FakeServer) -> None:
    watched, _ = agent_for(fake.url, interval=0.2)
    for path in THRASH[:12]:
        fake.page = path.read_text()
        judged = watched.round()
    (engine,) = judged.engines
    assert status_of(engine, "preemptions_sustained")[0] is Status.CRITICAL
    settled = {item.setting for item in engine.recommendations} | {item.setting for item in engine.withheld}
    assert "gateway_max_in_flight" in settled
    watched.close()


# Faults --------------------------------------------------------------------------------------------------------------


def test_a_target_that_never_answered_has_an_entry_of_its_own() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    watched, _ = agent_for(url)
    judged = watched.round()
    assert says(judged).startswith("scrape failed: ")
    assert judged.engines[0].key == EngineKey(target=url, model_name="", engine="")
    watched.close()


def test_an_engine_that_fails_is_unknown_at_once_and_well_again_at_once(fake: FakeServer) -> None:
    watched, _ = agent_for(fake.url)
    watched.round()
    fake.behave = refuse
    judged = watched.round()
    assert "HTTP status 500" in says(judged)
    assert judged.engines[0].key.model_name == "m"
    assert judged.engines[0].at_seconds is not None
    fake.behave = None
    (engine,) = watched.round().engines
    assert engine.observed["running_requests"] == 3
    watched.close()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html><body>Sign in</body></html>\n", "HTML"),
        (b'{"error": "no"}\n', "JSON"),
        (b"# only comments\n", "no vLLM metric"),
        (b'vllm:num_requests_running{engine="0",model_name="m"} 3', "not whole"),
        (b'vllm:num_requests_running{engine="0", 3\n', "is not a sample"),
        (b"\xff\xfe\n", "not UTF-8"),
        (b"\x1f\x8bnot gzip", "damaged gzip"),
    ],
)
def test_a_page_that_lies_is_no_page(fake: FakeServer, body: bytes, reason: str) -> None:
    def lie(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(body)

    watched, _ = agent_for(fake.url)
    watched.round()
    fake.behave = lie
    assert reason in says(watched.round())
    watched.close()


def test_a_page_that_ends_too_early_is_no_page(fake: FakeServer) -> None:
    def half(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        handler.wfile.write(fake.page[:500].encode())

    watched, _ = agent_for(fake.url)
    fake.behave = half
    assert "scrape failed" in says(watched.round())
    watched.close()


def test_a_page_without_an_end_is_no_page(fake: FakeServer) -> None:
    def flood(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        sent = 0
        while sent <= MAX_PAGE_BYTES:
            try:
                sent += handler.wfile.write(b"# x\n" * 65536)
            except OSError:
                return

    watched, _ = agent_for(fake.url)
    fake.behave = flood
    assert f"{MAX_PAGE_BYTES:,} bytes" in says(watched.round())
    watched.close()


def test_a_page_with_too_many_engines_is_no_page(fake: FakeServer) -> None:
    lines = [f'vllm:num_requests_running{{engine="{n}",model_name="m"}} 1' for n in range(300)]
    fake.page = "\n".join(lines) + "\n"
    watched, _ = agent_for(fake.url)
    assert "300 engines, more than 256" in says(watched.round())
    watched.close()


def test_a_server_that_hangs_costs_its_round_and_nobody_elses(fake: FakeServer) -> None:
    released = threading.Event()
    with fake_server() as other:
        fake.behave = lambda _: assert_waits(released)
        watched, _ = agent_for(fake.url, other.url, interval=1.0)
        started = time.monotonic()
        judged = watched.round()
        took = time.monotonic() - started
        by_target = {engine.key.target: engine for engine in judged.engines}
        assert by_target[other.url].observed["running_requests"] == 3
        status, summary = status_of(by_target[fake.url], "metrics_missing")
        assert status is Status.CRITICAL
        assert "no complete page within 0.8 s" in summary
        assert took < 5

        judged = watched.round()  # the first request is still on its way; no second one is sent
        assert fake.requests.count("/metrics") == 1
        assert other.requests.count("/metrics") == 2

        fake.behave = None
        released.set()
        eventually(lambda: all(scrape.failure is None for scrape in watched.round().scrapes))
        watched.close()


def assert_waits(event: threading.Event) -> None:
    assert event.wait(30)


def test_facts_that_hang_do_not_make_the_page_late(fake: FakeServer) -> None:
    released = threading.Event()
    handle = fake.handle

    def slow_facts(handler: BaseHTTPRequestHandler) -> None:
        if handler.path != "/metrics":
            assert_waits(released)
        handle(handler)

    fake.handle = slow_facts  # type: ignore[method-assign]
    watched, _ = agent_for(fake.url, interval=0.5)
    for _ in range(3):
        judged = watched.round()
        assert judged.scrapes[0].failure is None
        assert judged.engines[0].observed["running_requests"] == 3
    released.set()
    eventually(lambda: watched.round().engines[0].capacity.max_model_len == 4096)
    watched.close()


def test_a_fault_of_kvwatch_in_a_scrape_is_a_failed_scrape(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: bytes) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(agent_module, "decode", broken)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    watched, _ = agent_for(fake.url)
    assert "kvwatch failed" in says(watched.round())
    watched.close()


# Engines that come and go ---------------------------------------------------------------------------------------------


def two_engines(first: float, second: float | None, started: float = 1_700_000_000.0) -> str:
    pages = [engine_page(running=first, started=started)]
    if second is not None:
        pages.append(engine_page(running=second, engine="1", started=None))
    return "".join(pages)


def test_an_engine_that_vanishes_from_a_page_that_still_comes_is_critical(fake: FakeServer) -> None:
    watched, _ = agent_for(fake.url)
    fake.page = two_engines(1, 2)
    assert len(watched.round().engines) == 2
    fake.page = two_engines(1, None)
    engines = {engine.key.engine: engine for engine in watched.round().engines}
    assert engines["0"].observed["running_requests"] == 1
    assert engines["1"].observed == {}
    assert "no longer on the page" in status_of(engines["1"], "metrics_missing")[1]
    watched.close()


def test_engines_of_a_former_process_are_forgotten(fake: FakeServer) -> None:
    watched, _ = agent_for(fake.url)
    fake.page = engine_page(running=1, model_name="old", started=1_700_000_000.0)
    watched.round()
    fake.page = engine_page(running=1, model_name="new", started=1_700_000_900.0)
    assert [engine.key.model_name for engine in watched.round().engines] == ["new"]
    watched.close()


def test_the_window_covers_its_span_and_is_bounded(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, _ = agent_for(fake.url, interval=5.0)
    now = 1_800_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    spans = []
    for number in range(40):
        now = 1_800_000_000.0 + 5.0 * number + (number % 3) * 0.05
        spans.append(watched.round().window_seconds)
    assert all(60.0 <= span <= 66.25 for span in spans[13:])
    now += 600
    assert watched.round().window_seconds == 0
    watched.close()


def test_a_clock_that_went_back_starts_the_window_anew(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, _ = agent_for(fake.url)
    watched.round()
    watched.round()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    fake.page = engine_page(running=7)
    judged = watched.round()
    assert judged.engines[0].observed["running_requests"] == 7
    assert judged.window_seconds == 0
    watched.close()


# Rounds --------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.floats(0, 10**6), st.floats(0.2, 3600))
def test_rounds_are_never_made_up_for_and_never_skipped_without_need(
    number: int, elapsed: float, interval: float
) -> None:
    following = next_round(number, elapsed, interval)
    assert following >= number + 1
    assert following * interval >= elapsed * (1 - 1e-9) or following == number + 1
    assert following == number + 1 or (following - 1) * interval < elapsed


@pytest.mark.parametrize(("elapsed", "following"), [(0.1, 1), (4.9, 1), (5.1, 2), (7.0, 2), (3600.0, 720)])
def test_after_a_pause_there_is_one_round_and_no_burst(elapsed: float, following: int) -> None:
    assert next_round(0, elapsed, 5.0) == following


def test_a_round_that_fails_is_logged_and_the_next_one_comes(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched, board = agent_for(fake.url, interval=0.2)
    real, stop_it, calls = watched.judge, threading.Event(), []

    def sometimes() -> Report:
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError
        return real()

    monkeypatch.setattr(watched, "judge", sometimes)
    thread = threading.Thread(target=watched.run, args=(stop_it,))
    thread.start()
    eventually(lambda: board.latest)
    stop_it.set()
    thread.join()
    assert any(record.getMessage() == "a round failed; the next one follows" for record in caplog.records)


def test_only_changes_are_logged(fake: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    watched, _ = agent_for(fake.url)
    for behave in (None, None, refuse, refuse, None, None):
        fake.behave = behave
        watched.round()
    assert [record.getMessage().partition(": ")[2][:14] for record in caplog.records] == [
        "scrape failed:",
        "readable again",
    ]
    watched.close()


@pytest.mark.parametrize("target", ["-", "tests", "prometheus+http://h:1?selector={}"])
def test_what_is_no_server_cannot_be_watched(target: str) -> None:
    with pytest.raises((SettingError, SourceError)):
        agent_for(target)


# The command ---------------------------------------------------------------------------------------------------------


@contextmanager
def running_agent(folder: Path, *arguments: str) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """`kvwatch agent` as a process; gives its address."""
    port = free_port()
    log = (folder / "agent.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "kvwatch", "agent", "--listen", f"127.0.0.1:{port}", *arguments],
        stdout=log,
        stderr=log,
        env={name: value for name, value in os.environ.items() if not name.startswith("KVWATCH_")},
    )
    log.close()
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: answers(f"{url}/readyz") or process.poll() is not None)
        assert process.poll() is None, (folder / "agent.log").read_text()
        yield url, process
    finally:
        stop(process)


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_the_agent_stops_cleanly(fake: FakeServer, tmp_path: Path, signal_number: int) -> None:
    with running_agent(tmp_path, "--target", fake.url, "--interval", "1s") as (url, process):
        assert get_json(f"{url}/api/v1/report")["engines"][0]["model_name"] == "m"
        process.send_signal(signal_number)
        assert process.wait(10) == 0
    log = (tmp_path / "agent.log").read_text()
    assert "Traceback" not in log
    assert f"the report is at {url}" in log


def test_the_agent_stops_while_its_target_hangs(fake: FakeServer, tmp_path: Path) -> None:
    released = threading.Event()
    with running_agent(tmp_path, "--target", fake.url, "--interval", "30s") as (_, process):
        fake.behave = lambda _: assert_waits(released)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        released.set()
    assert "Traceback" not in (tmp_path / "agent.log").read_text()


def test_an_engine_that_hangs_does_not_delay_the_answers(fake: FakeServer) -> None:
    released = threading.Event()
    fake.behave = lambda _: assert_waits(released)
    port = free_port()
    arguments = ("--listen", f"127.0.0.1:{port}", "--target", fake.url, "--interval", "600s", "--window", "1200s")
    process = subprocess.Popen([sys.executable, "-m", "kvwatch", "agent", *arguments], stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: answers(f"{url}/healthz"))
        eventually(lambda: fake.requests)
        assert "No data yet" in get(f"{url}/")
        assert not answers(f"{url}/readyz")
    finally:
        stop(process)
        released.set()


def test_two_targets_are_read_and_one_is_down(fake: FakeServer, tmp_path: Path) -> None:
    down = f"http://127.0.0.1:{free_port()}"
    with running_agent(tmp_path, "--target", fake.url, "--target", down, "--max-num-seqs", "64") as (url, _):
        engines = {engine["target"]: engine for engine in get_json(f"{url}/api/v1/report")["engines"]}
        assert engines[down]["worst"] == "critical"
        assert engines[fake.url]["observed"]["running_requests"] == 3
        metrics = get(f"{url}/metrics")
        assert f'kvwatch_scrape_success{{target="{down}"}} 0.0' in metrics
        assert f'kvwatch_scrape_success{{target="{fake.url}"}} 1.0' in metrics


@pytest.mark.parametrize(
    ("arguments", "says_so"),
    [
        ((), "no engine to watch"),
        (("--target", "127.0.0.1:8000"), "for a server give http://127.0.0.1:8000"),
        (("--target", "http://a:1", "--alertmanager", "am:9093"), "--alertmanager 'am:9093'"),
        (("--target", "http://a:1", "--listen", "256.0.0.1:1"), "--listen 256.0.0.1:1"),
    ],
)
def test_what_the_agent_cannot_run_with_is_said_and_exits_2(arguments: tuple[str, ...], says_so: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "kvwatch", "agent", *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    assert run.returncode == 2
    assert says_so in run.stderr
    assert "Traceback" not in run.stderr


CONFIG = """
route: {{receiver: hook, group_by: ['...'], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}}
receivers: [{{name: hook, webhook_configs: [{{url: '{url}', send_resolved: true}}]}}]
"""


@pytest.mark.real
def test_a_thrashing_engine_pages_somebody_and_its_recovery_resolves(fake: FakeServer, tmp_path: Path) -> None:
    pages = [path.read_text() for path in THRASH]
    served = iter(range(10**9))

    def thrash(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(pages[min(next(served), len(pages) - 1)].encode())

    with webhook() as hook, alertmanager(tmp_path, CONFIG.format(url=hook.url)) as address:
        fake.behave = thrash
        arguments = ("--target", fake.url, "--alertmanager", address, "--interval", "0.2s", "--window", "2s")
        with running_agent(tmp_path, *arguments, "--for", "0s", "--keep-firing-for", "1s"):
            named = {"alertname": "VLLMPreemptionsSustained", "severity": "critical"}

            def seen(status: str) -> bool:
                return any(named.items() <= alert["labels"].items() for alert in hook.alerts(status))

            eventually(lambda: seen("firing"))
            assert not seen("resolved")
            eventually(lambda: seen("resolved"), within_seconds=40)  # the last page stays, so nothing is preempted


@pytest.mark.real
@pytest.mark.slow
def test_alerts_of_an_agent_that_was_killed_end_by_themselves(fake: FakeServer, tmp_path: Path) -> None:
    fake.page = engine_page(running=1, without=("preemptions",))
    with webhook() as hook, alertmanager(tmp_path, CONFIG.format(url=hook.url)) as address:
        arguments = ("--target", fake.url, "--alertmanager", address, "--interval", "0.2s", "--window", "2s")
        with running_agent(tmp_path, *arguments, "--for", "0s") as (_, process):
            eventually(lambda: hook.alerts("firing"))
            process.kill()
            process.wait()
        (alert,) = get_json(f"{address}/api/v2/alerts")
        assert alert["labels"]["alertname"] == "VLLMMetricsMissing"
        eventually(lambda: hook.alerts("resolved"), within_seconds=60)


def test_signals_arrive_while_the_main_thread_waits_and_while_it_does_not() -> None:
    kept = signal.getsignal(signal.SIGUSR1)
    try:
        arrived = signals(signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert arrived.get(timeout=20) == signal.SIGUSR1
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        assert arrived.get(timeout=20) == signal.SIGUSR1
    finally:
        signal.signal(signal.SIGUSR1, kept)
