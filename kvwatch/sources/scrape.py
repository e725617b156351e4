"""A vLLM server over HTTP: its metrics page and the two API answers that the page lacks."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from kvwatch.capacity import EngineFacts
from kvwatch.errors import ExpositionError, SourceError, printable
from kvwatch.exposition import MAX_PAGE_BYTES
from kvwatch.sources import base_address

CONNECT_SECONDS, READ_SECONDS, TOTAL_SECONDS = 3.0, 5.0, 10.0
"""Until a connection stands, until more bytes come, until the whole answer is there."""
_CHUNK_BYTES = 65536
_MAX_API_BYTES = 1024 * 1024
_TOO_LONG_TOKENS = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A fetched page, still encoded, and when its first byte was asked for."""

    body: bytes
    at_seconds: float


class Scraper:
    """One server. Keeps its connection between scrapes. Not for use from several threads at once."""

    def __init__(self, address: str, *, headers: dict[str, str] | None = None) -> None:
        self.address = address
        self._headers = {
            "Accept": "text/plain;version=0.0.4",  # an OpenMetrics answer would lose the colon of vllm: names
            "Accept-Encoding": "gzip",
            "User-Agent": "kvwatch",
            **(headers or {}),
        }
        timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS)
        self._pool = urllib3.PoolManager(num_pools=1, maxsize=1, timeout=timeout, retries=False)
        self._line = Line()
        self._pool.pool_classes_by_scheme = pools_with(self._line)

    def page(self) -> Page:
        """Fetch the metrics page. Raises SourceError (cannot be reached or answered) or ExpositionError (too large)."""
        started = time.time()
        return Page(body=self._get(self.address, MAX_PAGE_BYTES), at_seconds=started)

    def facts(self) -> EngineFacts:
        """vllm_version from /version and max_model_len from /v1/models; None where the server does not tell."""
        base = base_address(self.address)
        version = self._api(f"{base}/version").get("version")
        models = self._api(f"{base}/v1/models").get("data")
        lengths = [
            entry["max_model_len"]
            for entry in (models if isinstance(models, list) else [])
            if isinstance(entry, dict) and type(entry.get("max_model_len")) is int
        ]
        return EngineFacts(
            vllm_version=version if isinstance(version, str) else None,
            max_model_len=lengths[0] if lengths and 0 < lengths[0] < _TOO_LONG_TOKENS else None,
            sources=(("vllm_version", "observed"), ("max_model_len", "observed")),
        )

    def close(self) -> None:
        self._pool.clear()

    def _api(self, address: str) -> dict[str, Any]:
        """A JSON object, or nothing: these answers are a convenience, and behind an API key they are refused."""
        try:
            answer = json.loads(self._get(address, _MAX_API_BYTES))
        except (SourceError, ExpositionError, ValueError, RecursionError):
            return {}
        return answer if isinstance(answer, dict) else {}

    def _get(self, address: str, limit_bytes: int) -> bytes:
        """The body as sent (gzip stays gzip: `exposition.decode` unpacks it within bounds)."""
        with self._line.cut_after(TOTAL_SECONDS):
            try:
                body = _body(self._ask(address), address, limit_bytes)
            except (urllib3.exceptions.HTTPError, OSError, UnicodeError, ValueError) as error:
                if not self._line.was_cut:
                    raise SourceError(f"{address}: {_reason(error)}") from error
        if self._line.was_cut:  # then a body cut short may look whole
            raise SourceError(f"{address}: not complete after {TOTAL_SECONDS:g} s; the server is too slow")
        return body

    def _ask(self, address: str) -> urllib3.BaseHTTPResponse:
        """Send the request; once more where the server had closed the kept connection, as vLLM does after 5 s."""
        kept = self._line.socket
        try:
            return self._request(address)
        except urllib3.exceptions.ProtocolError:
            if kept is None or self._line.socket is not kept or self._line.was_cut:
                raise
            self._pool.clear()
            return self._request(address)

    def _request(self, address: str) -> urllib3.BaseHTTPResponse:
        return self._pool.request("GET", address, headers=self._headers, preload_content=False, redirect=False)


class Line:
    """The connection in use. A timeout of a socket starts anew with every byte; this one bounds the whole answer."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.was_cut = False

    @contextmanager
    def cut_after(self, seconds: float) -> Iterator[None]:
        self.was_cut = False
        timer = threading.Timer(seconds, self._cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _cut(self) -> None:
        self.was_cut = True
        line = self.socket
        if line is not None:
            with suppress(OSError):  # the other side may have closed it in this moment
                line.shutdown(socket.SHUT_RDWR)


def pools_with(line: Line) -> dict[str, type[urllib3.HTTPConnectionPool]]:
    """urllib3's pools, of connections that tell the line their socket."""

    class Plain(HTTPConnection):
        def connect(self) -> None:
            super().connect()
            line.socket = self.sock

    class Encrypted(HTTPSConnection):
        def connect(self) -> None:
            super().connect()
            line.socket = self.sock

    class PlainPool(urllib3.HTTPConnectionPool):
        ConnectionCls = Plain

    class EncryptedPool(urllib3.HTTPSConnectionPool):
        ConnectionCls = Encrypted

    return {"http": PlainPool, "https": EncryptedPool}


def _body(response: urllib3.BaseHTTPResponse, address: str, limit_bytes: int) -> bytes:
    """Read to the end, or close the connection: with an answer left unread it cannot serve another scrape."""
    whole = False
    try:
        if response.status != 200:
            raise SourceError(f"{address}: HTTP status {response.status}; {_status_hint(response.status)}")
        body = bytearray()
        for chunk in response.stream(_CHUNK_BYTES, decode_content=False):
            body += chunk
            if len(body) > limit_bytes:
                raise ExpositionError(
                    f"{address}: the page has more than {limit_bytes:,} bytes; one vLLM server writes far less: "
                    "give the address of a single server, not of a federation endpoint"
                )
        whole = True
    finally:
        if not whole:
            response.close()
        response.release_conn()
    return bytes(body)


def _status_hint(status: int) -> str:
    if status in {301, 302, 307, 308}:
        return "it redirects: give the address it redirects to"
    if status in {401, 403}:
        return "it wants a login: give --header 'Authorization: Bearer …'"
    if status == 404:
        return "is this a vLLM server? Its page is at /metrics"
    return "is the server up? Look at its log"


# From the special to the general: a NameResolutionError is a NewConnectionError too, and that a ConnectTimeoutError.
_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (urllib3.exceptions.NameResolutionError, "the host name is not known; check its spelling and the DNS"),
    (
        urllib3.exceptions.NewConnectionError,
        "no connection (refused, or no route); is the server running and is this its port?",
    ),
    (
        urllib3.exceptions.ConnectTimeoutError,
        f"no connection within {CONNECT_SECONDS:.0f} s; is the address right and the port open?",
    ),
    (
        urllib3.exceptions.ReadTimeoutError,
        f"no answer within {READ_SECONDS:.0f} s; the server hangs or is overloaded",
    ),
    (
        urllib3.exceptions.SSLError,
        "the TLS connection failed ({cause}); check the certificate, or use http:// where the server speaks no TLS",
    ),
    (
        urllib3.exceptions.ProtocolError,
        "the connection broke before the answer was complete ({cause}); is the server restarting?",
    ),
    (urllib3.exceptions.LocationParseError, "this is not an address; give http://HOST:PORT"),
)


def _reason(error: Exception) -> str:
    """urllib3's error in one line, without its object reprs."""
    for kind, text in _REASONS:
        if isinstance(error, kind):
            return text.format(cause=_cause(error))
    return " ".join(printable(f"{type(error).__name__}: {str(error)[:200]}").split())


def _cause(error: Exception) -> str:
    """The innermost message: "IncompleteRead(100 bytes read, 900 more expected)", "Connection reset by peer"."""
    inner = next((argument for argument in error.args if isinstance(argument, Exception)), error)
    text = str(getattr(inner, "strerror", None) or inner) or type(inner).__name__
    return " ".join(printable(text[:160]).split())
