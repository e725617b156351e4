"""A vLLM server over HTTP: its metrics page and the two API answers that the page lacks."""

import json
import time
from dataclasses import dataclass
from typing import Any

import urllib3

from kvwatch.capacity import EngineFacts
from kvwatch.errors import ExpositionError, SourceError
from kvwatch.exposition import MAX_PAGE_BYTES
from kvwatch.sources import base_address

CONNECT_SECONDS, READ_SECONDS, TOTAL_SECONDS = 3.0, 5.0, 10.0
_CHUNK_BYTES = 65536
_MAX_API_BYTES = 1024 * 1024


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
            if isinstance(entry, dict) and isinstance(entry.get("max_model_len"), int)
        ]
        return EngineFacts(
            vllm_version=version if isinstance(version, str) else None,
            max_model_len=lengths[0] if lengths and lengths[0] > 0 else None,
            sources=(("vllm_version", "observed"), ("max_model_len", "observed")),
        )

    def close(self) -> None:
        self._pool.clear()

    def _api(self, address: str) -> dict[str, Any]:
        """A JSON object, or nothing: these answers are a convenience, and behind an API key they are refused."""
        try:
            answer = json.loads(self._get(address, _MAX_API_BYTES))
        except (SourceError, ExpositionError, ValueError):
            return {}
        return answer if isinstance(answer, dict) else {}

    def _get(self, address: str, limit_bytes: int) -> bytes:
        deadline = time.monotonic() + TOTAL_SECONDS
        try:
            response = self._pool.request("GET", address, headers=self._headers, preload_content=False, redirect=False)
        except (urllib3.exceptions.HTTPError, UnicodeError, ValueError) as error:
            raise SourceError(f"{address}: {_reason(error)}") from error
        try:
            if response.status != 200:
                raise SourceError(f"{address}: HTTP status {response.status}; {_status_hint(response.status)}")
            return _read(response, address, limit_bytes, deadline)
        except urllib3.exceptions.HTTPError as error:
            raise SourceError(f"{address}: {_reason(error)}") from error
        finally:
            if response.length_remaining:
                response.close()  # the rest is not wanted, so the connection cannot serve another scrape
            response.release_conn()


def _read(response: urllib3.BaseHTTPResponse, address: str, limit_bytes: int, deadline: float) -> bytes:
    """The body as sent (gzip stays gzip: `exposition.decode` unpacks it within bounds)."""
    chunks: list[bytes] = []
    size = 0
    for chunk in response.stream(_CHUNK_BYTES, decode_content=False):
        size += len(chunk)
        if size > limit_bytes:
            raise ExpositionError(
                f"{address}: the page has more than {limit_bytes:,} bytes; one vLLM server writes far less: "
                "give the address of a single server, not of a federation endpoint"
            )
        if time.monotonic() > deadline:
            raise SourceError(
                f"{address}: the page was not complete after {TOTAL_SECONDS:.0f} s; the server is too slow"
            )
        chunks.append(chunk)
    return b"".join(chunks)


def _status_hint(status: int) -> str:
    if status in {301, 302, 307, 308}:
        return "it redirects: give the address it redirects to"
    if status in {401, 403}:
        return "it wants a login: give --header 'Authorization: Bearer …'"
    if status == 404:
        return "is this a vLLM server? Its page is at /metrics"
    return "is the server up? Look at its log"


def _reason(error: Exception) -> str:
    """urllib3's error in one line, without its object reprs."""
    if isinstance(error, urllib3.exceptions.NameResolutionError):  # a NewConnectionError too
        return "the host name is not known; check its spelling and the DNS"
    if isinstance(error, urllib3.exceptions.NewConnectionError):  # a ConnectTimeoutError too
        return "no connection (refused, or no route); is the server running and is this its port?"
    if isinstance(error, urllib3.exceptions.ConnectTimeoutError):
        return f"no connection within {CONNECT_SECONDS:.0f} s; is the address right and the port open?"
    if isinstance(error, urllib3.exceptions.ReadTimeoutError):
        return f"no answer within {READ_SECONDS:.0f} s; the server hangs or is overloaded"
    if isinstance(error, urllib3.exceptions.SSLError):
        return f"the TLS connection failed ({str(error)[:160]}); check the certificate or use http://"
    return f"{type(error).__name__}: {str(error)[:200]}"
