import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from email.message import Message

import pytest
from parts import eventually, free_port
from reports import AT_SECONDS, FLEET, THRASHING, report_of

from kvwatch import server as server_module
from kvwatch.errors import SettingError
from kvwatch.render import data
from kvwatch.report import Report
from kvwatch.server import MAX_CONCURRENT_REQUESTS, MAX_REQUEST_BYTES, ROUTES, Board, Server

PATHS = tuple(ROUTES)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Serving:
    def __init__(self) -> None:
        self.clock = Clock()
        self.board = Board(interval_seconds=5.0, monotonic=self.clock)
        self.server = Server(self.board, host="127.0.0.1", port=0)

    def post(self, report: Report) -> None:
        self.board.post(report, at_seconds=AT_SECONDS)

    def ask(self, path: str, method: str = "GET") -> tuple[int, Message, str]:
        """Status, headers and body."""
        request = urllib.request.Request(self.server.url + path, method=method)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read().decode()

    def connect(self) -> socket.socket:
        host, port = self.server.server_address[:2]
        return socket.create_connection((str(host), int(port)), timeout=10)


@pytest.fixture
def served() -> Iterator[Serving]:
    serving = Serving()
    serving.server.start(poll_seconds=0.02)
    yield serving
    serving.server.stop()


def test_before_the_first_round_it_is_alive_and_not_ready(served: Serving) -> None:
    assert served.ask("/healthz")[0] == 200
    assert served.ask("/readyz")[0] == 503
    status, _, body = served.ask("/api/v1/report")
    assert (status, json.loads(body)) == (503, {"error": "no round is finished yet"})
    assert "No data yet" in served.ask("/")[2]
    assert "kvwatch_check_status" not in served.ask("/metrics")[2]


def test_after_a_round_everything_is_served(served: Serving) -> None:
    served.post(FLEET)
    assert [served.ask(path)[0] for path in PATHS] == [200] * len(PATHS)
    assert json.loads(served.ask("/api/v1/report")[2]) == json.loads(data.to_json(data.report_data(FLEET)))
    assert "the KV pool is thrashing" in served.ask("/")[2]
    assert "kvwatch_check_status{" in served.ask("/metrics")[2]


def test_each_answer_has_its_type_and_may_not_be_cached(served: Serving) -> None:
    served.post(FLEET)
    types = {path: served.ask(path)[1]["Content-Type"] for path in PATHS}
    assert types == {
        "/": "text/html; charset=utf-8",
        "/metrics": "text/plain; version=0.0.4; charset=utf-8",
        "/api/v1/report": "application/json",
        "/healthz": "application/json",
        "/readyz": "application/json",
    }
    assert served.ask("/")[1]["Cache-Control"] == "no-store"


def test_an_openmetrics_scraper_gets_text_all_the_same(served: Serving) -> None:
    served.post(FLEET)
    request = urllib.request.Request(f"{served.server.url}/metrics", headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_a_report_older_than_three_rounds_is_not_shown_as_current(served: Serving) -> None:
    served.post(FLEET)
    served.clock.now += 14.9
    assert served.ask("/readyz")[0] == 200
    served.clock.now += 0.2
    assert served.ask("/readyz")[0] == 503
    assert served.ask("/healthz")[0] == 200
    status, _, body = served.ask("/api/v1/report")
    assert (status, json.loads(body)) == (503, {"error": "the latest report is 15 s old, more than 3 rounds"})
    assert "kvwatch itself is not keeping up" in served.ask("/")[2]
    metrics = served.ask("/metrics")[2]
    assert "kvwatch_report_timestamp_seconds 1.8e+09" in metrics
    assert "kvwatch_check_status" not in metrics


def test_head_is_get_without_the_body(served: Serving) -> None:
    served.post(FLEET)
    for path in PATHS:
        status, headers, body = served.ask(path, "HEAD")
        assert (status, body) == (200, "")
        assert int(headers["Content-Length"]) > 0


def test_an_unknown_path_is_404_in_json(served: Serving) -> None:
    status, headers, body = served.ask("/nothing")
    assert (status, headers["Content-Type"]) == (404, "application/json")
    assert json.loads(body) == {"error": "no such path; there are / /metrics /api/v1/report /healthz /readyz"}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_other_methods_are_405_in_json(served: Serving, method: str) -> None:
    status, headers, body = served.ask("/metrics", method)
    assert (status, headers["Allow"], json.loads(body)) == (405, "GET, HEAD", {"error": "only GET and HEAD"})


def test_a_query_is_ignored(served: Serving) -> None:
    assert served.ask("/healthz?x=1")[0] == 200


def test_a_malformed_request_is_answered_in_json(served: Serving) -> None:
    with served.connect() as client:
        client.sendall(b"GET / HTTP/9.9.9\r\n\r\n")
        answer = client.makefile("rb").read()
    assert b" 400 " in answer.splitlines()[0]
    assert b'{"error": ' in answer


def test_an_endless_request_is_cut_off(served: Serving) -> None:
    with served.connect() as client:
        try:
            for _ in range(20 * MAX_REQUEST_BYTES // 1024):
                client.sendall(b"GET / HTTP/1.0\r\nX: " + b"x" * 1024)
            answer = client.recv(100)
        except OSError:
            answer = b""
    assert b" 200 " not in answer.partition(b"\r\n")[0]
    assert served.ask("/healthz")[0] == 200


LONG_HEADERS = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 1000) for number in range(90))


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /" + b"x" * 60_000 + b" HTTP/1.0\r\n\r\n", 404),
        (b"GET /" + b"x" * (64 * 1024 - 4) + b"\r\n\r\n", 414),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.0\r\n\r\n", 414),
        (b"GET /" + b"x" * 500_000 + b" HTTP/1.0\r\n\r\n", 414),
        (b"x" * 500_000, 414),
        (b"GET / HTTP/1.0\r\n" + LONG_HEADERS + b"\r\n", 431),
        (b"GET / HTTP/1.0\r\nX: " + b"x" * 500_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.0\r\n" + b"X: x\r\n" * 200 + b"\r\n", 431),
        (b"POST / HTTP/1.0\r\nContent-Length: 500000\r\n\r\n" + b"x" * 500_000, 405),
        (b"BREW / HTTP/1.0\r\nContent-Length: 500000\r\n\r\n" + b"x" * 500_000, 501),
    ],
    ids=["just-fits", "a-byte-too-long", "long-line", "very-long-line", "no-line", "headers", "header", "200-headers",
         "body", "body-of-no-method"],
)  # fmt: skip
def test_what_is_refused_is_answered_though_the_client_still_sends(
    served: Serving, request_bytes: bytes, status: int
) -> None:
    with served.connect() as client:
        client.sendall(request_bytes)
        answer = client.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.0 %d " % status)
    assert b'{"error": ' in answer


def test_a_client_that_never_stops_sending_is_let_go(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REQUEST_SECONDS", 0.5)
    with served.connect() as client:
        eventually(lambda: _cannot_send(client, b"x" * 65536), within_seconds=20, every_seconds=0)
    assert served.ask("/healthz")[0] == 200


def _cannot_send(client: socket.socket, some: bytes) -> bool:
    try:
        client.sendall(some)
    except OSError:
        return True
    return False


def test_a_client_that_sends_a_byte_now_and_then_is_cut_off(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REQUEST_SECONDS", 0.3)
    with served.connect() as client:
        started = time.monotonic()
        closed = threading.Event()

        def drip() -> None:
            while not closed.wait(0.05):
                try:
                    client.sendall(b"G")
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            got = client.recv(100)
        except ConnectionError:
            got = b""
        closed.set()
        thread.join()
    assert got == b""
    assert time.monotonic() - started < 10


def test_clients_beyond_the_limit_are_told_so_and_the_others_are_served(served: Serving) -> None:
    with ExitStack() as clients:
        for _ in range(MAX_CONCURRENT_REQUESTS):
            clients.enter_context(served.connect())
        eventually(lambda: threading.active_count() > MAX_CONCURRENT_REQUESTS)
        with served.connect() as late:
            assert late.recv(100).startswith(b"HTTP/1.0 503 ")
    eventually(lambda: served.ask("/healthz")[0] == 200)


def test_a_rendering_that_fails_is_500_and_logged(
    served: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Board) -> server_module.Answer:
        raise ZeroDivisionError

    monkeypatch.setitem(ROUTES, "/metrics", broken)
    status, _, body = served.ask("/metrics")
    assert (status, json.loads(body)) == (500, {"error": "kvwatch failed; the traceback is in its log"})
    assert caplog.records[0].getMessage() == "/metrics could not be rendered"


def test_a_port_in_use_is_a_setting_error(served: Serving) -> None:
    port = int(served.server.server_address[1])
    with pytest.raises(SettingError, match=f"--listen 127.0.0.1:{port}: Address already in use"):
        Server(served.board, host="127.0.0.1", port=port)


def test_a_host_that_is_not_here_is_a_setting_error() -> None:
    with pytest.raises(SettingError, match=r"--listen 203\.0\.113\.1:9109"):
        Server(Board(interval_seconds=5), host="203.0.113.1", port=9109)


def test_stopping_frees_the_port() -> None:
    port = free_port()
    for _ in range(2):
        made = Server(Board(interval_seconds=5), host="127.0.0.1", port=port)
        made.start(poll_seconds=0.02)
        made.stop()


def test_posting_while_many_read_gives_each_a_whole_report(served: Serving) -> None:
    reports = {report.worst.value: report for report in (FLEET, report_of(THRASHING))}
    served.post(FLEET)
    bodies: list[str] = []

    def read() -> None:
        bodies.extend(served.ask("/api/v1/report")[2] for _ in range(10))

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    while any(reader.is_alive() for reader in readers):
        for report in reports.values():
            served.post(report)
    assert len(bodies) == 40
    assert {len(json.loads(body)["engines"]) for body in bodies} <= {1, 3}
