"""Closed-loop load for an OpenAI-compatible server: each client sends its next request when its last one is answered.

Prompts are random letters. With the tiny model of `tools/tiny_model.py` one letter is one token.
"""

import contextlib
import http.client
import json
import random
import socket
import string
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the clients ask for: lengths are drawn evenly between the two numbers, both included."""

    clients: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    model: str = "tiny-llama"
    seed: int = 7


@contextlib.contextmanager
def load(address: str, traffic: Traffic) -> Iterator["Load"]:
    """The traffic, flowing until the block ends."""
    flowing = Load(address, traffic)
    flowing.start()
    try:
        yield flowing
    finally:
        flowing.stop()


@dataclass(slots=True)
class Load:
    """The clients, running from `start` to `stop`. `errors` holds what went wrong before `stop`."""

    address: str
    traffic: Traffic
    answered: int = 0
    errors: list[str] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _connections: list[http.client.HTTPConnection] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        parts = urlsplit(self.address)
        for number in range(self.traffic.clients):
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
            connection.connect()
            self._connections.append(connection)
            self._threads.append(threading.Thread(target=self._client, args=(number, connection), daemon=True))
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Hang up. vLLM aborts the requests in flight, as it does when users close their browsers."""
        self._stopping.set()
        for connection, thread in zip(self._connections, self._threads, strict=True):
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for the answer
            thread.join()
            connection.close()

    def _client(self, number: int, connection: http.client.HTTPConnection) -> None:
        draw = random.Random(f"{self.traffic.seed}-{number}")
        while not self._stopping.is_set():
            body = {
                "model": self.traffic.model,
                "prompt": "".join(draw.choices(string.ascii_letters, k=draw.randint(*self.traffic.prompt_tokens))),
                "max_tokens": draw.randint(*self.traffic.output_tokens),
                "ignore_eos": True,
                "temperature": 0,
            }
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                response = connection.getresponse()
                answer = response.read()
            except (OSError, http.client.HTTPException) as error:
                if not self._stopping.is_set():
                    self._note(repr(error))
                return
            if response.status != 200:
                self._note(f"HTTP status {response.status}: {answer[:200]!r}")
                return
            with self._lock:
                self.answered += 1

    def _note(self, error: str) -> None:
        with self._lock:
            self.errors.append(error)
