"""`kvwatch agent` as a process: signals, targets, exit codes, the alerts it pushes."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from fake_server import FakeServer, assert_waits
from pages import CAPTURES, engine_page
from parts import alertmanager, answers, eventually, free_port, get, get_json, stop, webhook

from kvwatch.cli.agent import signals

THRASH = sorted((CAPTURES / "thrash").glob("*.prom"))


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
