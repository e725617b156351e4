"""Targets that do not answer, lie, hang or never end."""

import threading
import time
from http.server import BaseHTTPRequestHandler

import pytest
from fake_server import FakeServer, agent_for, assert_waits, fake_server, refuse, says, status_of
from parts import eventually, free_port

from kvwatch import agent as agent_module
from kvwatch.exposition import MAX_PAGE_BYTES
from kvwatch.finding import Status
from kvwatch.snapshot import EngineKey


def test_a_target_that_never_answered_has_an_entry_of_its_own() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    watched, _ = agent_for(url)
    judged = watched.round()
    assert says(judged).startswith("scrape failed: ")
    assert judged.engines[0].key == EngineKey(target=url, model_name="", engine="")
    watched.close()


def test_an_engine_that_fails_is_unknown_at_once_and_well_again_at_once(fake: FakeServer) -> None:
    watched, _ = agent_for(fake.url)
    watched.round()
    fake.behave = refuse
    judged = watched.round()
    assert "HTTP status 500" in says(judged)
    assert judged.engines[0].key.model_name == "m"
    assert judged.engines[0].at_seconds is not None
    fake.behave = None
    (engine,) = watched.round().engines
    assert engine.observed["running_requests"] == 3
    watched.close()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html><body>Sign in</body></html>\n", "HTML"),
        (b'{"error": "no"}\n', "JSON"),
        (b"# only comments\n", "no vLLM metric"),
        (b'vllm:num_requests_running{engine="0",model_name="m"} 3', "not whole"),
        (b'vllm:num_requests_running{engine="0", 3\n', "is not a sample"),
        (b"\xff\xfe\n", "not UTF-8"),
        (b"\x1f\x8bnot gzip", "damaged gzip"),
    ],
)
def test_a_page_that_lies_is_no_page(fake: FakeServer, body: bytes, reason: str) -> None:
    def lie(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(body)

    watched, _ = agent_for(fake.url)
    watched.round()
    fake.behave = lie
    assert reason in says(watched.round())
    watched.close()


def test_a_page_that_ends_too_early_is_no_page(fake: FakeServer) -> None:
    def half(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        handler.wfile.write(fake.page[:500].encode())

    watched, _ = agent_for(fake.url)
    fake.behave = half
    assert "scrape failed" in says(watched.round())
    watched.close()


def test_a_page_without_an_end_is_no_page(fake: FakeServer) -> None:
    def flood(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        sent = 0
        while sent <= MAX_PAGE_BYTES:
            try:
                sent += handler.wfile.write(b"# x\n" * 65536)
            except OSError:
                return

    watched, _ = agent_for(fake.url)
    fake.behave = flood
    assert f"{MAX_PAGE_BYTES:,} bytes" in says(watched.round())
    watched.close()


def test_a_page_with_too_many_engines_is_no_page(fake: FakeServer) -> None:
    lines = [f'vllm:num_requests_running{{engine="{n}",model_name="m"}} 1' for n in range(300)]
    fake.page = "\n".join(lines) + "\n"
    watched, _ = agent_for(fake.url)
    assert "300 engines, more than 256" in says(watched.round())
    watched.close()


def test_a_server_that_hangs_costs_its_round_and_nobody_elses(fake: FakeServer) -> None:
    released = threading.Event()
    with fake_server() as other:
        fake.behave = lambda _: assert_waits(released)
        watched, _ = agent_for(fake.url, other.url, interval=1.0)
        started = time.monotonic()
        judged = watched.round()
        took = time.monotonic() - started
        by_target = {engine.key.target: engine for engine in judged.engines}
        assert by_target[other.url].observed["running_requests"] == 3
        status, summary = status_of(by_target[fake.url], "metrics_missing")
        assert status is Status.CRITICAL
        assert "no complete page within 0.8 s" in summary
        assert took < 5

        judged = watched.round()  # the first request is still on its way; no second one is sent
        assert fake.requests.count("/metrics") == 1
        assert other.requests.count("/metrics") == 2

        fake.behave = None
        released.set()
        eventually(lambda: all(scrape.failure is None for scrape in watched.round().scrapes))
        watched.close()


def test_facts_that_hang_do_not_make_the_page_late(fake: FakeServer) -> None:
    released = threading.Event()
    handle = fake.handle

    def slow_facts(handler: BaseHTTPRequestHandler) -> None:
        if handler.path != "/metrics":
            assert_waits(released)
        handle(handler)

    fake.handle = slow_facts  # type: ignore[method-assign]
    watched, _ = agent_for(fake.url, interval=0.5)
    for _ in range(3):
        judged = watched.round()
        assert judged.scrapes[0].failure is None
        assert judged.engines[0].observed["running_requests"] == 3
    released.set()
    eventually(lambda: watched.round().engines[0].capacity.max_model_len == 4096)
    watched.close()


def test_a_fault_of_kvwatch_in_a_scrape_is_a_failed_scrape(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: bytes) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(agent_module, "decode", broken)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    watched, _ = agent_for(fake.url)
    assert "kvwatch failed" in says(watched.round())
    watched.close()


# Engines that come and go ---------------------------------------------------------------------------------------------
