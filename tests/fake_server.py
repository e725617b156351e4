"""A vLLM server that is only a page, and an agent that reads it."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from pages import engine_page
from parts import serving

from kvwatch.agent import Agent
from kvwatch.config import Config
from kvwatch.finding import Status
from kvwatch.report import EngineReport, Report
from kvwatch.server import Board


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


def assert_waits(event: threading.Event) -> None:
    assert event.wait(30)
