"""The servers that stand for engines in tests: what a client does to them must not appear in a test's output."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

import pytest
from parts import eventually, get, serving, webhook
from servers import answer, raw_server, server


def hang_up(address: str, sent: bytes) -> None:
    """Send something and reset the connection, as a client does that closes with bytes unread."""
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(sent)


@contextmanager
def webhook_address() -> Iterator[str]:
    with webhook() as hook:
        yield hook.url


@pytest.mark.parametrize(
    "make",
    [
        lambda: server({"/": answer("x" * 1_000_000)}),
        lambda: raw_server(lambda client: client.sendall(b"x" * 1_000_000)),
        webhook_address,
    ],
    ids=["server", "raw_server", "webhook"],
)
@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HT", b"GET / HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: 99\r\n\r\n{"],
    ids=["nothing", "a-part", "all", "a-body-less-than-said"],
)
def test_a_client_that_hangs_up_leaves_no_word_on_stderr(
    make: Callable[[], AbstractContextManager[str]], sent: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    before = threading.active_count()
    with make() as address:
        for _ in range(20):
            hang_up(address, sent)
        eventually(lambda: threading.active_count() <= before + 1)
    assert capfd.readouterr().err == ""


def test_a_fault_of_a_server_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    class Faulty(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            raise ZeroDivisionError

    with serving(Faulty) as address, pytest.raises(OSError, match=r"closed|reset"):
        get(address)
    assert "ZeroDivisionError" in capfd.readouterr().err
