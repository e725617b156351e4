"""Real components for tests: found on PATH, started on free ports of 127.0.0.1, stopped at the end.

A component that is not installed skips the test with the reason, or fails it under KVWATCH_REQUIRE_PARTS=1, as in CI.
`make parts` installs them on Debian. The real vLLM has a file of its own, vllm_server.py.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest

START_SECONDS = 120.0  # a second or two on idle cores
T = TypeVar("T")

# Names under which distributions and upstream archives install the same program.
_NAMES = {
    "alertmanager": ("prometheus-alertmanager", "alertmanager"),
    "victoria-metrics": ("victoria-metrics", "victoria-metrics-prod"),
    "vmalert": ("vmalert", "vmalert-prod"),
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
}


def binary(name: str) -> str:
    """The program's path. Skips the test if there is none, or fails it under KVWATCH_REQUIRE_PARTS=1."""
    found = (shutil.which(candidate) for candidate in _NAMES.get(name, (name,)))
    return next(filter(None, found), None) or missing(name)


def missing(name: str) -> NoReturn:
    """Skip the test for want of a component, or fail it under KVWATCH_REQUIRE_PARTS=1."""
    reason = f"{name} is not installed; `make parts` installs it on Debian"
    if os.environ.get("KVWATCH_REQUIRE_PARTS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert isinstance(port, int)
    return port


def eventually(read: Callable[[], T], *, within_seconds: float = 20.0, every_seconds: float = 0.05) -> T:
    """The first truthy answer of `read`. Fails with its last answer when the time is over."""
    deadline = time.monotonic() + within_seconds
    while True:
        answer = read()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"still {answer!r} after {within_seconds} s"
        time.sleep(every_seconds)


def get(url: str, *, timeout_seconds: float = 5.0) -> str:
    """The body of an answer with status 200; raises OSError for anything else."""
    with urllib.request.urlopen(url, timeout=timeout_seconds) as response:
        body = response.read()
    assert isinstance(body, bytes)
    return body.decode()


def get_json(url: str) -> Any:
    return json.loads(get(url))


def answers(url: str) -> bool:
    """Whether a GET gives status 200."""
    try:
        get(url)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def running(arguments: Sequence[str], *, log: Path, ready_url: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that answers `ready_url` with 200 before the block starts and is gone after it."""
    with log.open("wb") as out:
        process = subprocess.Popen(list(arguments), stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not answers(ready_url):
            if process.poll() is not None or time.monotonic() > deadline:
                state = "is not ready" if process.poll() is None else f"ended with status {process.returncode}"
                raise RuntimeError(f"{arguments[0]} {state}:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.05)
        yield process
    finally:
        stop(process)


def stop(process: "subprocess.Popen[bytes]", *, patience_seconds: float = 10.0) -> int:
    """SIGTERM, and SIGKILL where that does not help; the exit status."""
    process.terminate()
    try:
        return process.wait(patience_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@contextlib.contextmanager
def alertmanager(folder: Path, config: str) -> Iterator[str]:
    """A real Alertmanager with this alertmanager.yml; gives its base address."""
    program = binary("alertmanager")
    address = f"127.0.0.1:{free_port()}"
    file = folder / "alertmanager.yml"
    file.write_text(config)
    arguments = (
        program,
        f"--config.file={file}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={address}",
        "--cluster.listen-address=",  # no cluster: it would look for an address of this host to advertise
        "--log.level=warn",
    )
    with running(arguments, log=folder / "alertmanager.log", ready_url=f"http://{address}/-/ready"):
        yield f"http://{address}"


@contextlib.contextmanager
def prometheus(folder: Path, config: str, *, path: str = "") -> Iterator[str]:
    """A real Prometheus, the one on PATH or another, with this prometheus.yml; gives its base address."""
    program = path or binary("prometheus")
    address = f"127.0.0.1:{free_port()}"
    file = folder / "prometheus.yml"
    file.write_text(config)
    arguments = (
        program,
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    )
    with running(arguments, log=folder / "prometheus.log", ready_url=f"http://{address}/-/ready"):
        yield f"http://{address}"


@contextlib.contextmanager
def victoria_metrics(folder: Path, config: str) -> Iterator[str]:
    """A real VictoriaMetrics with this scrape configuration; gives its base address."""
    program = binary("victoria-metrics")
    address = f"127.0.0.1:{free_port()}"
    file = folder / "victoria-metrics.yml"
    file.write_text(config)
    arguments = (
        program,
        f"-httpListenAddr={address}",
        f"-storageDataPath={folder / 'victoria-metrics'}",
        f"-promscrape.config={file}",
        "-search.latencyOffset=1s",  # the default of 30 s hides what was just scraped
        "-loggerLevel=WARN",
    )
    with running(arguments, log=folder / "victoria-metrics.log", ready_url=f"http://{address}/health"):
        yield f"http://{address}"


@contextlib.contextmanager
def vmalert(folder: Path, rules: Path, base: str, *, notifier: str) -> Iterator[None]:
    """A real vmalert that evaluates these rules every second on the VictoriaMetrics at `base` and writes into it."""
    program = binary("vmalert")
    address = f"127.0.0.1:{free_port()}"
    arguments = (
        program,
        f"-httpListenAddr={address}",
        f"-rule={rules}",
        f"-datasource.url={base}",
        f"-remoteWrite.url={base}",
        "-remoteWrite.flushInterval=1s",
        f"-notifier.url={notifier}",
        "-evaluationInterval=1s",
        "-loggerLevel=WARN",
    )
    with running(arguments, log=folder / "vmalert.log", ready_url=f"http://{address}/health"):
        yield


class Webhook:
    """What a receiver got: the bodies in the order of their arrival."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.bodies: list[Any] = []

    def alerts(self, status: str) -> list[dict[str, Any]]:
        """Alertmanager's alerts with this status ("firing" or "resolved") in all bodies so far."""
        return [alert for body in tuple(self.bodies) for alert in body["alerts"] if alert["status"] == status]


@contextlib.contextmanager
def webhook() -> Iterator[Webhook]:
    """A tiny HTTP server that keeps every JSON body posted to it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            received.bodies.append(json.loads(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Silent: the test's output is its own."""

    with serving(Handler) as address:
        received = Webhook(f"{address}/")
        yield received


class _Serving(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may hang up; the test that runs then has its own output. A fault of the handler is shown."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A handler served on a free port until the block ends; gives the base address."""
    with _Serving(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
