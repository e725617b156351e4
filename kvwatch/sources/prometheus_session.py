"""The HTTP session under prometheus-api-client: timeouts, a bounded answer, and errors that say what to try."""

import json
import time
from typing import Any

import requests

from kvwatch.errors import SourceError

_CHUNK_BYTES = 1024 * 1024


class BoundedSession(requests.Session):
    """Gives up in time, reads at most so many bytes, follows no redirect, and raises SourceError for every failure."""

    def __init__(self, *, timeout_seconds: tuple[float, float], limit_bytes: int) -> None:
        super().__init__()
        self._timeout_seconds = timeout_seconds
        self._limit_bytes = limit_bytes

    def request(self, *args: Any, **options: Any) -> requests.Response:
        """As requests.Session.request, but the body has been read."""
        bounds = {"timeout": self._timeout_seconds, "stream": True, "allow_redirects": False}
        address = str(options.get("url", args[1] if len(args) > 1 else ""))
        try:
            with super().request(*args, **{**options, **bounds}) as response:
                # the place where requests keeps a body that was read, and where json() looks for it
                response._content = self._body(response, address)  # noqa: SLF001
        except requests.RequestException as error:
            raise SourceError(f"{address}: {_reason(error, self._timeout_seconds)}") from error
        if response.status_code != 200:
            raise SourceError(f"{address}: {_refusal(response)}")
        return response

    def _body(self, response: requests.Response, address: str) -> bytes:
        deadline = time.monotonic() + 2 * sum(self._timeout_seconds)
        body = bytearray()
        for chunk in response.iter_content(_CHUNK_BYTES):
            body += chunk
            if len(body) > self._limit_bytes:
                raise SourceError(
                    f"{address}: the answer has more than {self._limit_bytes:,} bytes; narrow the selector"
                )
            if time.monotonic() > deadline:
                raise SourceError(f"{address}: the answer is not complete after {2 * sum(self._timeout_seconds):.0f} s")
        return bytes(body)


def session(*, timeout_seconds: tuple[float, float], limit_bytes: int) -> BoundedSession:
    return BoundedSession(timeout_seconds=timeout_seconds, limit_bytes=limit_bytes)


def _reason(error: requests.RequestException, timeout_seconds: tuple[float, float]) -> str:
    if isinstance(error, requests.ConnectTimeout):
        return f"no connection within {timeout_seconds[0]:.0f} s; is the address right and the port open?"
    if isinstance(error, requests.Timeout):
        return f"no answer within {timeout_seconds[1]:.0f} s; narrow the selector or shorten --window"
    if isinstance(error, requests.exceptions.SSLError):
        return "the TLS connection failed; check the certificate, or use prometheus+http://"
    if isinstance(error, requests.exceptions.InvalidHeader):
        return "a --header is not a valid HTTP header"  # its value may be a token: not repeated
    if isinstance(error, requests.ConnectionError):
        return "no connection (refused, unknown host, or broken off); is Prometheus running and is this its port?"
    return f"{type(error).__name__}: {str(error)[:200]}"


def _refusal(response: requests.Response) -> str:
    status = response.status_code
    if status in {401, 403}:
        return f"HTTP status {status}; it wants a login: give --header 'Authorization: Bearer …'"
    if 300 <= status < 400:
        return f"HTTP status {status}; it redirects: give the address it redirects to"
    try:
        answer = json.loads(response.content)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        return f"HTTP status {status}: {answer['error'][:300]}"
    return f"HTTP status {status}; is this the address of a Prometheus API, without /api/v1 at its end?"
