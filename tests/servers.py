"""Small HTTP servers for tests: they answer as told, also wrongly, and replay recorded pages."""

import contextlib
import gzip
import socket
import socketserver
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from parts import serving

TEXT = "text/plain; version=0.0.4; charset=utf-8"
Answer = Callable[[BaseHTTPRequestHandler], None]


def answer(
    body: bytes | str, *, status: int = 200, kind: str = TEXT, headers: Mapping[str, str] | None = None
) -> Answer:
    """A whole answer with its length."""
    raw = body.encode() if isinstance(body, str) else body

    def send(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(raw)))
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(raw)

    return send


def zipped(page: str) -> Answer:
    return answer(gzip.compress(page.encode()), headers={"Content-Encoding": "gzip"})


@dataclass(frozen=True)
class Request:
    path: str
    headers: Mapping[str, str]
    client: tuple[str, int]


@contextlib.contextmanager
def server(paths: Mapping[str, Answer], *, seen: list[Request] | None = None) -> Iterator[str]:
    """Answers GET by path, 404 for others; gives the base address. `seen` collects the requests."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if seen is not None:
                seen.append(Request(self.path, dict(self.headers), self.client_address))
            with contextlib.suppress(OSError):  # a client may hang up
                paths.get(self.path, answer("Not Found", status=404))(self)

        def log_message(self, *_: object) -> None:
            """Silent: the test's output is its own."""

    with serving(Handler) as address:
        yield address


@contextlib.contextmanager
def raw_server(speak: Callable[[socket.socket], None]) -> Iterator[str]:
    """A TCP server that does not have to speak HTTP; gives http://HOST:PORT."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):  # a client may hang up
                self.request.recv(65536)
                speak(self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False
        allow_reuse_address = True
        request_queue_size = 64

    with Server(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_address[1]}"
        finally:
            made.shutdown()
            thread.join()


class Replay:
    """Pages of a capture at the pace of their recording times `speed`; the last one stays."""

    def __init__(self, folder: Path, *, speed: float = 1.0) -> None:
        files = sorted(folder.glob("*.prom"), key=lambda path: int(path.stem))
        first = int(files[0].stem)
        self._offsets = [(int(path.stem) - first) / 1000 / speed for path in files]
        self._pages = [path.read_text() for path in files]
        self._started: float | None = None

    @property
    def ended(self) -> bool:
        return self._started is not None and time.monotonic() - self._started > self._offsets[-1]

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        if self._started is None:
            self._started = time.monotonic()
        passed = time.monotonic() - self._started
        answer(self._pages[bisect_right(self._offsets, passed) - 1])(handler)
