"""A recorded engine, served on this machine as a vLLM server serves: for `kvwatch demo` and for trying things out.

The recording is a real vLLM 0.32.0 with a tiny model on the CPU and a pool of 256 blocks: a few seconds without load,
then more requests than the pool carries. Pages are served at the pace they were recorded, the first time unchanged.
After the last one the part with preemptions is repeated without an end: gauges as recorded, counters and histograms
continued from where they stood, so that rates over any span are those of the recording and no restart is seen.
"""

import io
import socketserver
import sys
import tarfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from kvwatch.exposition import read_samples
from kvwatch.vllm_metrics import PREEMPTIONS

RECORDING = "data/demo/recording.tar.gz"
_PAGE = ".prom"
_CUMULATIVE = (b"counter", b"histogram", b"summary")
# Path of vLLM's API -> file in the recording.
_API = {"/version": "version.json", "/v1/models": "models.json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Page i was fetched `offsets_seconds[i]` after the first one. `answers` are the server's others, by path.

    From page `repeat_from` to the last one is what is repeated; `growth` is what each counter of them grew by, see
    `growth_between`.
    """

    offsets_seconds: tuple[float, ...]
    pages: tuple[bytes, ...]
    repeat_from: int
    growth: Mapping[bytes, Fraction]
    answers: Mapping[str, bytes]

    def page(self, elapsed_seconds: float) -> bytes:
        """The page that the server showed so long after the start of the recording.

        The last page and the first repeated one are one instant: counters stand there where the last page has them.
        """
        start, end = self.offsets_seconds[self.repeat_from], self.offsets_seconds[-1]
        if elapsed_seconds < end:
            return self._recorded(elapsed_seconds)
        times, offset = divmod(elapsed_seconds - start, end - start)
        return continued(self._recorded(start + offset), self.growth, int(times))

    def _recorded(self, offset_seconds: float) -> bytes:
        return self.pages[bisect_right(self.offsets_seconds, offset_seconds) - 1]


def growth_between(before: bytes, after: bytes) -> dict[bytes, Fraction]:
    """Name and labels of a line -> how much it grew, for the lines of counters, histograms and summaries.

    A line that `before` lacks started at 0. `_created` lines are gauges of their own, and are not among them. The
    amounts are exact: with rounded ones, a sum that stands still could fall by its last digit.
    """
    old = dict(found for line in before.splitlines() if (found := _sample(line)) is not None)
    grown: dict[bytes, Fraction] = {}
    cumulative = False
    for line in after.splitlines():
        if line.startswith(b"# TYPE "):
            cumulative = line.endswith(_CUMULATIVE)
        elif cumulative and (found := _sample(line)) is not None:
            key, value = found
            grown[key] = Fraction(value) - Fraction(old.get(key, 0.0))
    return grown


def continued(page: bytes, growth: Mapping[bytes, Fraction], times: int) -> bytes:
    """The page with its counters `times` repetitions later."""
    return b"".join(_line_continued(line, growth, times) + b"\n" for line in page.splitlines())


def _line_continued(line: bytes, growth: Mapping[bytes, Fraction], times: int) -> bytes:
    found = _sample(line)
    if found is None or not growth.get(found[0]):
        return line
    key, value = found
    return key + b" " + repr(float(Fraction(value) + times * growth[key])).encode()


def _sample(line: bytes) -> tuple[bytes, float] | None:
    """A line -> name with labels, and value; None for a comment or an empty line."""
    if not line or line.startswith(b"#"):
        return None
    key, _, value = line.rpartition(b" ")
    return key, float(value)


def _preemptions(page: bytes) -> float:
    return sum(sample.value for sample in read_samples(page.decode()) if sample.name == PREEMPTIONS.exposed)


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
    pages = tuple(content[f"{unix_ms}{_PAGE}"] for unix_ms in times)
    repeat_from = next(number for number, page in enumerate(pages) if _preemptions(page) > 0)
    return Recording(
        offsets_seconds=tuple((unix_ms - times[0]) / 1000 for unix_ms in times),
        pages=pages,
        repeat_from=repeat_from,
        growth=growth_between(pages[repeat_from], pages[-1]),
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
            try:
                self.wfile.write(body)
            except ConnectionError:  # whoever asked has gone; there is nobody to tell
                self.close_connection = True

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

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no event, and the demo has its own output."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def server_bind(self) -> None:
        """Bind without the look-up of this host's name that HTTPServer makes."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
