"""Closed-loop load for an OpenAI-compatible server: each client sends its next request when its last one is answered.

Prompts are random letters. With the tiny model of `tools/tiny_model.py` one letter is one token.
"""

import http.client
import json
import random
import socket
import string
import threading
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

ANSWER_SECONDS = 1200  # of a request that is preempted again and again, on a machine that is busy with other things
# What a client sees of a connection that the server has closed meanwhile; RemoteDisconnected is one of them.
_CLOSED_WHILE_IDLE = (BrokenPipeError, ConnectionResetError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the clients ask for: lengths are drawn evenly between the two numbers, both included.

    requests_per_client: after so many a client is done; without it only `stop` ends it.
    gateway_max_in_flight: clients beyond it wait for their turn before they send, as behind a gateway with a cap.
    """

    clients: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    requests_per_client: int | None = None
    gateway_max_in_flight: int | None = None
    model: str = "tiny-llama"
    seed: int = 7


@dataclass(slots=True)
class Load:
    """The clients, running from `start` to `stop`. `errors` holds what went wrong before `stop`.

    response_seconds: of every answered request, from the moment the client wanted to send it.
    """

    address: str
    traffic: Traffic
    response_seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _connections: list[http.client.HTTPConnection] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _gateway: threading.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._gateway = threading.Semaphore(self.traffic.gateway_max_in_flight or self.traffic.clients)

    @property
    def answered(self) -> int:
        return len(self.response_seconds)

    def start(self) -> None:
        parts = urlsplit(self.address)
        for number in range(self.traffic.clients):
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_SECONDS)
            connection.connect()
            self._connections.append(connection)
            self._threads.append(threading.Thread(target=self._client, args=(number, connection), daemon=True))
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Until every client has sent its requests_per_client and got its answers."""
        for thread in self._threads:
            thread.join()

    def is_done(self) -> bool:
        """Whether every client has its answers, or has failed."""
        return not any(thread.is_alive() for thread in self._threads)

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
        sent = 0
        while not self._stopping.is_set() and sent != self.traffic.requests_per_client:
            sent += 1
            body = {
                "model": self.traffic.model,
                "prompt": "".join(draw.choices(string.ascii_letters, k=draw.randint(*self.traffic.prompt_tokens))),
                "max_tokens": draw.randint(*self.traffic.output_tokens),
                "ignore_eos": True,
                "temperature": 0,
            }
            started = time.monotonic()
            with self._gateway:
                problem = self._send(connection, body)
            with self._lock:
                if problem is None:
                    self.response_seconds.append(time.monotonic() - started)
                elif not self._stopping.is_set():
                    self.errors.append(problem)
            if problem is not None:
                return

    def _send(self, connection: http.client.HTTPConnection, body: dict[str, object]) -> str | None:
        """Post a completion; on a new connection where the server has closed the idle one (uvicorn does, after 5 s).

        What went wrong, or None.
        """
        try:
            return _post(connection, body)
        except _CLOSED_WHILE_IDLE as error:
            if self._stopping.is_set():
                return repr(error)
            connection.close()
        except (OSError, http.client.HTTPException) as error:
            return repr(error)
        try:
            return _post(connection, body)
        except (OSError, http.client.HTTPException) as error:
            return repr(error)


def _post(connection: http.client.HTTPConnection, body: dict[str, object]) -> str | None:
    """Post a completion and read its answer; what the server refused, or None."""
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    return None if response.status == 200 else f"HTTP status {response.status}: {answer[:200]!r}"
