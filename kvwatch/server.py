"""The agent's HTTP side: it shows the latest report and does nothing else.

    /               the report as a page       /metrics         kvwatch's own metrics, text 0.0.4
    /api/v1/report  the report as JSON         /healthz /readyz 200 or 503, for probes

Handlers read one stored report, so a slow or dead engine never delays an answer. A report older than three rounds is
not shown as current: /readyz and /api/v1/report answer 503, /metrics keeps only the time of the last report, the page
says so. There is no login: the default is to listen on 127.0.0.1 only.
"""

import io
import json
import logging
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvwatch import __version__
from kvwatch.errors import SettingError
from kvwatch.render import data
from kvwatch.render.html import report_html
from kvwatch.render.prometheus import CONTENT_TYPE, exposition
from kvwatch.report import Report

REQUEST_SECONDS = 5.0
MAX_REQUEST_BYTES = 64 * 1024
MAX_DISCARDED_BYTES = 1024 * 1024  # of a request that was refused already
MAX_CONCURRENT_REQUESTS = 32
ROUNDS_UNTIL_STALE = 3
_LOG = logging.getLogger(__name__)
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """A report, its unix time, and the monotonic time at which it was finished."""

    report: Report
    at_seconds: float
    finished_seconds: float


class Board:
    """Where the agent puts each report and the handlers find it. Holding one reference, it needs no lock."""

    def __init__(self, *, interval_seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.interval_seconds = interval_seconds
        self._monotonic = monotonic
        self._latest: Posted | None = None

    def post(self, report: Report, *, at_seconds: float) -> None:
        self._latest = Posted(report=report, at_seconds=at_seconds, finished_seconds=self._monotonic())

    @property
    def latest(self) -> Posted | None:
        return self._latest

    def age_seconds(self, posted: Posted) -> float:
        return self._monotonic() - posted.finished_seconds

    def why_not_current(self) -> str | None:
        """None where the latest report may be shown as what is now."""
        posted = self._latest
        if posted is None:
            return "no round is finished yet"
        age = self.age_seconds(posted)
        if age > ROUNDS_UNTIL_STALE * self.interval_seconds:
            return f"the latest report is {age:.0f} s old, more than {ROUNDS_UNTIL_STALE} rounds"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: HTTPStatus
    content_type: str
    body: bytes


def _page(board: Board) -> Answer:
    posted = board.latest
    text = report_html(
        posted.report if posted else None,
        at_seconds=posted.at_seconds if posted else None,
        interval_seconds=board.interval_seconds,
        stale=board.why_not_current() if posted else None,
    )
    return Answer(status=HTTPStatus.OK, content_type="text/html; charset=utf-8", body=text.encode())


def _metrics(board: Board) -> Answer:
    posted = board.latest
    current = posted.report if posted and board.why_not_current() is None else None
    body = exposition(current, at_seconds=posted.at_seconds if posted else None)
    return Answer(status=HTTPStatus.OK, content_type=CONTENT_TYPE, body=body)


def _report(board: Board) -> Answer:
    posted, why = board.latest, board.why_not_current()
    if posted is None or why:
        return _json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": why})
    text = data.to_json(data.report_data(posted.report)) + "\n"
    return Answer(status=HTTPStatus.OK, content_type="application/json", body=text.encode())


def _healthz(_board: Board) -> Answer:
    return _json(HTTPStatus.OK, {"status": "alive", "version": __version__})


def _readyz(board: Board) -> Answer:
    why = board.why_not_current()
    if why:
        return _json(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "not ready", "error": why})
    return _json(HTTPStatus.OK, {"status": "ready"})


def _json(status: HTTPStatus, document: dict[str, Any]) -> Answer:
    return Answer(status=status, content_type="application/json", body=json.dumps(document).encode() + b"\n")


ROUTES: dict[str, Callable[[Board], Answer]] = {
    "/": _page,
    "/metrics": _metrics,
    "/api/v1/report": _report,
    "/healthz": _healthz,
    "/readyz": _readyz,
}


class Handler(BaseHTTPRequestHandler):
    """One request per connection (HTTP/1.0), which must arrive whole and be taken within REQUEST_SECONDS."""

    server: "Server"
    server_version = "kvwatch"
    sys_version = ""
    default_request_version = "HTTP/1.0"  # so that an answer to a malformed request has a status line

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(REQUEST_SECONDS)  # for the answer: sendall keeps it as a total
        self.rfile.close()
        self._arriving = _WholeRequest(self.connection, REQUEST_SECONDS)
        self.rfile = io.BufferedReader(self._arriving)
        self.raw_requestline, self.requestline, self.request_version, self.command = b"", "", "", ""
        self._is_refused = False

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except _TooLargeError:
            is_line = not self.raw_requestline
            self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG if is_line else HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def finish(self) -> None:
        if self._is_refused:
            self._arriving.discard_rest()
        super().finish()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        route = ROUTES.get(path)
        if route is None:
            self.send_error(HTTPStatus.NOT_FOUND, f"no such path; there are {' '.join(ROUTES)}")
            return
        try:
            answer = route(self.server.board)
        except Exception:  # noqa: BLE001 -- a fault of a rendering must show as one, not as an empty answer
            _LOG.exception("%s could not be rendered", path)
            answer = _json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "kvwatch failed; the traceback is in its log"})
        self._answer(answer)

    do_HEAD = do_GET  # noqa: N815 -- the name BaseHTTPRequestHandler looks for

    def _refuse_method(self) -> None:
        self.send_error(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method  # noqa: N815 -- as above

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002 -- the base's signature
        """Errors in JSON, those that http.server raises for malformed requests included."""
        status = HTTPStatus(code)
        self.close_connection = True
        self._is_refused = status != HTTPStatus.NOT_FOUND
        self._answer(_json(status, {"error": message or status.phrase}))

    def _answer(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if answer.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- the base's signature
        """Requests are not logged: probes and scrapes would bury what matters."""


class _TooLargeError(OSError):
    """A request of more than MAX_REQUEST_BYTES."""


class _WholeRequest(io.RawIOBase):
    """Reads a socket until a moment and a size: neither a slow nor an endless request can hold its thread."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + seconds
        self._left_bytes = MAX_REQUEST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request did not arrive in time")
        if self._left_bytes <= 0:
            raise _TooLargeError("the request is too large")
        self._connection.settimeout(left)
        try:
            size = self._connection.recv_into(buffer, min(len(buffer), self._left_bytes))
        finally:
            self._connection.settimeout(REQUEST_SECONDS)
        self._left_bytes -= size
        return size

    def discard_rest(self) -> None:
        """Take what still comes: closing with bytes unread resets the connection, and with it the answer."""
        self._left_bytes = MAX_DISCARDED_BYTES
        buffer = bytearray(64 * 1024)
        try:
            self._connection.shutdown(socket.SHUT_WR)
            while self.readinto(buffer):
                continue
        except OSError as error:
            _LOG.debug("a refused request did not end: %s", error)


class Server(ThreadingHTTPServer):
    """Serves a Board from threads, at most MAX_CONCURRENT_REQUESTS at a time; more are told 503 and let go."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, board: Board, *, host: str, port: int) -> None:
        self.board = board
        self._slots = threading.BoundedSemaphore(MAX_CONCURRENT_REQUESTS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise SettingError(f"--listen {host}:{port}: {reason}; give another port or host") from error

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        shown = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{shown}:{port}"

    def start(self, *, poll_seconds: float = 0.5) -> None:
        """Serve from a thread. Every `poll_seconds` it looks whether to stop."""
        threading.Thread(target=self.serve_forever, args=(poll_seconds,), name="server", daemon=True).start()

    def stop(self) -> None:
        """Accept no more requests; those being answered are daemons and end with the process."""
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Bind without the look-up of this host's name that HTTPServer makes, which can hang where there is no DNS."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            _turn_away(request)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no further thread can be started
            self._slots.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 -- the base's signature
        """A client that hangs up is no event; anything else is a fault of kvwatch and goes to the log."""
        level = logging.DEBUG if isinstance(sys.exc_info()[1], OSError) else logging.ERROR
        _LOG.log(level, "a request from %s failed", client_address, exc_info=True)


def _turn_away(request: socket.socket) -> None:
    request.settimeout(0.1)
    try:
        request.sendall(_BUSY)
    except OSError:
        _LOG.debug("a client went away before it was told that the server is busy")
