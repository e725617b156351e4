"""A recorded engine, served on this machine as a vLLM server serves: for `kvwatch demo` and for trying things out.

The recording is a real vLLM 0.32.0 with a tiny model on the CPU and a pool of 256 blocks: a few seconds without load,
then more requests than the pool carries. Pages are served unchanged at the pace they were recorded. After the last one
the recording starts over as an engine that was restarted: with a later start time of its process, and nothing else
changed.
"""

import io
import re
import socketserver
import tarfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files

from kvwatch.vllm_metrics import PROCESS_START_TIME

RECORDING = "data/demo/recording.tar.gz"
_PAGE = ".prom"
_START_LINE = re.compile(rb"^(%s )(\S+)$" % PROCESS_START_TIME.encode(), re.MULTILINE)
# Path of vLLM's API -> file in the recording.
_API = {"/version": "version.json", "/v1/models": "models.json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Page i was fetched `offsets_seconds[i]` after the first one. `answers` are the server's others, by path."""

    offsets_seconds: tuple[float, ...]
    pages: tuple[bytes, ...]
    answers: Mapping[str, bytes]

    @property
    def period_seconds(self) -> float:
        """From the first page until it is served again: the last page stays as long as pages stay on average."""
        last = self.offsets_seconds[-1]
        return last + last / max(1, len(self.pages) - 1)

    def page(self, elapsed_seconds: float) -> bytes:
        """The page that the server showed so long after the start of the recording, over and over."""
        times, offset = divmod(elapsed_seconds, self.period_seconds)
        page = self.pages[bisect_right(self.offsets_seconds, offset) - 1]
        if not times:
            return page
        return _START_LINE.sub(
            lambda line: line.group(1) + repr(float(line.group(2)) + times * self.period_seconds).encode(), page
        )


def load_recording() -> Recording:
    """The packed recording: a tar of <unix_ms>.prom pages, as `kvwatch record` writes them, and API answers."""
    packed = (files("kvwatch") / RECORDING).read_bytes()
    content: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None:
                content[member.name] = file.read()
    times = sorted(int(name.removesuffix(_PAGE)) for name in content if name.endswith(_PAGE))
    return Recording(
        offsets_seconds=tuple((unix_ms - times[0]) / 1000 for unix_ms in times),
        pages=tuple(content[f"{unix_ms}{_PAGE}"] for unix_ms in times),
        answers={path: content[name] for path, name in _API.items()},
    )


class _Handler(BaseHTTPRequestHandler):
    server: "RecordedEngine"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            # vLLM answers text/plain whatever is asked for, which keeps the colon in its names
            self._answer(HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", self.server.page())
        elif path == "/health":
            self._answer(HTTPStatus.OK, "text/plain", b"")
        elif path in self.server.recording.answers:
            self._answer(HTTPStatus.OK, "application/json", self.server.recording.answers[path])
        else:
            self._answer(HTTPStatus.NOT_FOUND, "application/json", b'{"detail":"Not Found"}')

    do_HEAD = do_GET  # noqa: N815 -- the name BaseHTTPRequestHandler looks for

    def _answer(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base's signature
        """Silent: the demo has its own output."""


class RecordedEngine(ThreadingHTTPServer):
    """Serves a Recording on a free port of 127.0.0.1, from its first page at the moment of `start`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, recording: Recording, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.recording = recording
        self._monotonic = monotonic
        self._started_seconds = monotonic()
        self._thread = threading.Thread(target=self.serve_forever, name="recorded engine", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def elapsed_seconds(self) -> float:
        return self._monotonic() - self._started_seconds

    def page(self) -> bytes:
        return self.recording.page(self.elapsed_seconds)

    def start(self) -> None:
        self._started_seconds = self._monotonic()
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Bind without the look-up of this host's name that HTTPServer makes."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
