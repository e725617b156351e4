"""What users name as a source, and servers, files and folders that do not behave."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from pages import CAPTURES, EXPOSITION, engine_page
from parts import free_port
from servers import Answer, Request, answer, raw_server, server, zipped

from kvwatch import vllm_metrics as vm
from kvwatch.errors import ExpositionError, KvwatchError, SourceError
from kvwatch.exposition import MAX_PAGE_BYTES
from kvwatch.sources import Source, base_address, page_address, parse, scrape
from kvwatch.sources.capture import page_times, read_capture
from kvwatch.sources.gather import Gathered, gather, sample_count, sample_interval_seconds
from kvwatch.sources.scrape import Scraper
from kvwatch.window import windows

PAGE = engine_page(running=3)


def read(*given: str, window_seconds: float = 0.0, headers: dict[str, str] | None = None) -> Gathered:
    sources = tuple(parse(one) for one in given)
    return gather(sources, window_seconds=window_seconds, headers=headers or {}, progress=lambda *_: None)


def refusal(*given: str) -> str:
    with pytest.raises(KvwatchError) as refused:
        read(*given)
    return str(refused.value)


# Names of sources ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ("http://pod:8000", "http://pod:8000/metrics"),
        ("http://pod:8000/", "http://pod:8000/metrics"),
        ("http://pod:8000/metrics", "http://pod:8000/metrics"),
        ("https://gate/engine-1/metrics?x=1", "https://gate/engine-1/metrics?x=1"),
        ("HTTP://pod:8000", "http://pod:8000/metrics"),
        ("http://[::1]:8000", "http://[::1]:8000/metrics"),
        ("http://pod:8000/metrics#part", "http://pod:8000/metrics"),
    ],
)
def test_a_base_address_becomes_that_of_the_metrics_page(given: str, where: str) -> None:
    assert parse(given) == Source(given=given, kind="url", where=where)
    assert page_address(given) == where


@pytest.mark.parametrize(
    ("page", "base"),
    [
        ("http://pod:8000/metrics", "http://pod:8000"),
        ("https://gate/engine-1/metrics", "https://gate/engine-1"),
        ("http://pod:8000/other", "http://pod:8000"),
    ],
)
def test_the_api_stands_beside_the_metrics_page(page: str, base: str) -> None:
    assert base_address(page) == base


def test_a_history_keeps_its_selector() -> None:
    given = 'prometheus+https://host:9090/prom?selector={job="vllm"}'
    assert parse(given) == Source(given=given, kind="prometheus", where=given.removeprefix("prometheus+"))


def test_files_folders_and_standard_input_are_told_apart(tmp_path: Path) -> None:
    page = tmp_path / "page.prom"
    page.write_text(PAGE)
    assert [parse(given).kind for given in (str(page), str(tmp_path), "-", os.devnull)] == [
        "file",
        "folder",
        "stdin",
        "file",
    ]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("ftp://pod", "the scheme 'ftp' is not known; give http://HOST:PORT"),
        ("http://", "the address has no host"),
        ("http:///metrics", "the address has no host"),
        ("http://pod:99999", "Port out of range 0-65535"),
        ("http://pod:port", "Port could not be cast to integer"),
        ("http://[::1", "Invalid IPv6 URL"),
        ("prometheus+http://[::1", "Invalid IPv6 URL"),
        ("prometheus+http://", "the address has no host"),
        ("pod:8000", "No such file or directory; for a server give http://pod:8000"),
        ("localhost", "for a server give http://localhost"),
        ("no-such-file.prom", "no-such-file.prom: No such file or directory"),
        ("x" * 5000, "File name too long"),
        ("a\0b", "null"),
        ("", "a SOURCE is empty"),
    ],
)
def test_what_is_no_source_is_refused_with_what_would_be(given: str, says: str) -> None:
    with pytest.raises(SourceError) as refused:
        parse(given)
    assert says in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("scheme", ["http", "https", "prometheus+http"])
def test_a_login_in_an_address_is_refused_without_repeating_it(scheme: str) -> None:
    with pytest.raises(SourceError, match="give --header 'Authorization") as refused:
        parse(f"{scheme}://admin:s3cret@pod:8000")
    assert "s3cret" not in str(refused.value)


# Servers -------------------------------------------------------------------------------------------------------------


def test_a_page_is_read_with_what_the_servers_api_tells() -> None:
    models = json.dumps({"object": "list", "data": [{"id": "m", "max_model_len": 4096}]})
    paths = {"/metrics": answer(PAGE), "/version": answer('{"version":"0.32.0"}'), "/v1/models": answer(models)}
    requests: list[Request] = []
    with server(paths, seen=requests) as address:
        found = read(address, headers={"Authorization": "Bearer t"})
    (snapshot,) = found.snapshots
    assert (snapshot.key.target, snapshot.get(vm.REQUESTS_RUNNING)) == (address, 3)
    facts = found.facts[address]
    assert (facts.vllm_version, facts.max_model_len, facts.source_of("max_model_len")) == ("0.32.0", 4096, "observed")
    assert {r.headers["Authorization"] for r in requests} == {"Bearer t"}
    assert {r.headers["Accept"] for r in requests if r.path == "/metrics"} == {"text/plain;version=0.0.4"}


@pytest.mark.parametrize(
    "lie",
    [
        "[]",
        "not json",
        "[" * 100_000,
        '{"version":7,"data":7}',
        '{"version":null,"data":[7,{},{"max_model_len":"4096"},{"max_model_len":-1}]}',
        f'{{"version":null,"data":[{{"max_model_len":{"9" * 400}}}]}}',
        '{"version":null,"data":[{"max_model_len":true}]}',
    ],
)
def test_an_api_that_lies_or_is_not_there_leaves_the_facts_unknown(lie: str) -> None:
    with server({"/metrics": answer(PAGE), "/version": answer(lie), "/v1/models": answer(lie)}) as address:
        (facts,) = read(address).facts.values()
    assert (facts.vllm_version, facts.max_model_len) == (None, None)


def test_a_zipped_page_is_unpacked() -> None:
    with server({"/metrics": zipped(PAGE)}) as address:
        assert read(address).snapshots[0].get(vm.REQUESTS_RUNNING) == 3


def chunked(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for start in range(0, len(PAGE), 100):
        part = PAGE[start : start + 100].encode()
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
    handler.wfile.write(b"0\r\n\r\n")


def test_a_chunked_page_is_put_together() -> None:
    with server({"/metrics": chunked}) as address:
        assert read(address).snapshots[0].get(vm.REQUESTS_RUNNING) == 3


def half(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(PAGE)))
    handler.end_headers()
    handler.wfile.write(PAGE[: len(PAGE) // 2].encode())
    handler.close_connection = True


def half_chunk(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"ffff\r\nvllm:num")
    handler.close_connection = True


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    line = b'vllm:num_requests_running{engine="0"} 1\n' * 2000
    while True:
        handler.wfile.write(line)


@pytest.mark.parametrize(
    ("send", "says"),
    [
        (half, "the connection broke before the answer was complete"),
        (half_chunk, "the connection broke before the answer was complete"),
        (endless, f"more than {MAX_PAGE_BYTES:,} bytes"),
        (answer("<html><body>log in</body></html>", kind="text/html"), "this is an HTML or XML page"),
        (answer('{"detail":"no"}'), "this is JSON"),
        (answer("\x00\xff\xfe binary".encode("latin-1")), "not UTF-8"),
        (answer(b"\x1f\x8b damaged"), "damaged gzip data"),
        (answer(""), "has no vLLM metric"),
        (answer("node_cpu_seconds_total 5\n"), "has no vLLM metric"),
        (answer(PAGE[:-8]), "ends inside a line"),
        (answer("", status=404), "HTTP status 404; is this a vLLM server? Its page is at /metrics"),
        (answer("", status=401), "HTTP status 401; it wants a login: give --header"),
        (answer("", status=403), "it wants a login"),
        (answer("", status=302, headers={"Location": "/login"}), "it redirects"),
        (answer("", status=503), "HTTP status 503; is the server up?"),
    ],
)
def test_a_server_that_answers_wrongly_is_named_with_the_reason(send: Answer, says: str) -> None:
    with server({"/metrics": send}) as address:
        text = refusal(address)
    assert text.startswith(address)
    assert says in text


def test_a_port_where_nothing_listens() -> None:
    address = f"http://127.0.0.1:{free_port()}"
    assert refusal(address).startswith(f"{address}/metrics: no connection (refused, or no route)")


def test_a_host_name_that_does_not_exist() -> None:
    assert "the host name is not known" in refusal("http://no-such-host.invalid:8000")


def test_an_address_of_ipv6_is_asked() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
        port = probe.getsockname()[1]
    assert "no connection" in refusal(f"http://[::1]:{port}")


@pytest.mark.parametrize("speech", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\nContent-"])
def test_a_server_that_hangs_up_or_does_not_speak_http(speech: bytes) -> None:
    with raw_server(lambda line: line.sendall(speech)) as address:
        assert refusal(address).startswith(address)


def dripping(head: bytes, drop: bytes, over: threading.Event) -> Callable[[socket.socket], None]:
    def send(line: socket.socket) -> None:
        line.sendall(head)
        while not over.wait(0.05):
            line.sendall(drop)

    return send


@pytest.mark.parametrize(
    ("head", "drop"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"v"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n", b"v"),
        (b"HTTP/1.1 200 OK\r\nX-Long: ", b"x"),
        (b"", b"H"),
    ],
)
def test_an_answer_that_drips_is_cut_off(monkeypatch: pytest.MonkeyPatch, head: bytes, drop: bytes) -> None:
    """No timeout of a socket sees it: every byte starts that anew."""
    monkeypatch.setattr(scrape, "TOTAL_SECONDS", 0.5)
    over = threading.Event()
    with raw_server(dripping(head, drop, over)) as address:
        with pytest.raises(SourceError, match=r"not complete after 0.5 s; the server is too slow"):
            Scraper(f"{address}/metrics").page()
        over.set()


def test_a_server_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "READ_SECONDS", 0.2)
    over = threading.Event()

    def silence(_line: socket.socket) -> None:
        over.wait(10)

    with raw_server(silence) as address:
        with pytest.raises(SourceError, match="the server hangs or is overloaded"):
            Scraper(f"{address}/metrics").page()
        over.set()


def test_a_connection_that_the_server_closed_between_two_scrapes_is_made_anew() -> None:
    """uvicorn closes a connection after 5 idle seconds, at times just as the next request is sent."""

    def one_answer(line: socket.socket) -> None:
        line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(PAGE), PAGE.encode()))
        line.recv(65536)  # the next request arrives on a connection that is then closed without an answer

    with raw_server(one_answer) as address:
        scraper = Scraper(f"{address}/metrics")
        assert [scraper.page().body for _ in range(3)] == [PAGE.encode()] * 3
        scraper.close()


def test_a_connection_serves_many_scrapes() -> None:
    requests: list[Request] = []
    with server({"/metrics": answer(PAGE)}, seen=requests) as address:
        scraper = Scraper(f"{address}/metrics")
        for _ in range(4):
            scraper.page()
        scraper.close()
    assert len({request.client for request in requests}) == 1


def test_after_a_page_too_large_the_next_scrape_is_sound() -> None:
    pages: list[Answer] = [answer(b"x" * (MAX_PAGE_BYTES + 10)), answer(PAGE)]

    def in_turn(handler: BaseHTTPRequestHandler) -> None:
        pages.pop(0)(handler)

    with server({"/metrics": in_turn}) as address:
        scraper = Scraper(f"{address}/metrics")
        with pytest.raises(ExpositionError, match="more than"):
            scraper.page()
        assert scraper.page().body == PAGE.encode()
        scraper.close()


# Sampling ------------------------------------------------------------------------------------------------------------


def test_a_live_server_is_sampled_over_the_window() -> None:
    told: list[tuple[float, float]] = []
    with server({"/metrics": answer(PAGE)}) as address:
        found = gather((parse(address),), window_seconds=0.5, headers={}, progress=lambda *times: told.append(times))
    (window,) = windows(found.snapshots)
    assert len(window.snapshots) == 6
    assert window.duration_seconds == pytest.approx(0.5, abs=0.3)
    assert told[-1] == (0.5, 0.5)


@pytest.mark.parametrize(
    ("window", "interval", "count"), [(0, 0, 1), (0.5, 0.1, 6), (10, 2, 6), (60, 2, 31), (7, 1.4, 6)]
)
def test_a_window_has_at_least_six_samples(window: float, interval: float, count: int) -> None:
    assert sample_interval_seconds(window) == pytest.approx(interval)
    assert sample_count(window) == count


def test_a_slow_server_does_not_stretch_the_window() -> None:
    def slow(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.3)
        answer(PAGE)(handler)

    with server({"/metrics": slow}) as address:
        found = read(address, window_seconds=0.5)
    assert 2 <= len(found.snapshots) <= 4


def test_a_source_given_twice_is_read_once() -> None:
    requests: list[Request] = []
    with server({"/metrics": answer(PAGE)}, seen=requests) as address:
        found = read(address, f"{address}/metrics", address)
    assert [r.path for r in requests].count("/metrics") == 1
    assert [s.key.target for s in found.snapshots] == [address]


def test_what_answers_is_read_although_another_source_fails() -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with server({"/metrics": answer(PAGE)}) as address:
        found = read(dead, address, str(EXPOSITION / "nim_llama31_8b.prom"), "README.md")
    assert sorted(s.key.model_name for s in found.snapshots) == ["m", "meta/llama-3.1-8b-instruct"]
    assert [failure.split(": ")[0] for failure in found.failures] == ["README.md", f"{dead}/metrics"]


def test_if_nothing_answers_every_reason_is_given() -> None:
    dead = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    assert [line.split(": ")[0] for line in refusal(*dead).splitlines()] == [f"{a}/metrics" for a in dead]


def test_a_server_that_fails_on_the_way_is_noted() -> None:
    pages: list[Answer] = [answer(PAGE), answer("", status=500)]
    with server({"/metrics": lambda handler: pages.pop(0)(handler) if pages else answer(PAGE)(handler)}) as address:
        found = read(address, window_seconds=0.2)
    assert found.snapshots
    assert found.failures == []
    assert [note.split(";")[0] for note in found.notes] == [f"some scrapes failed: {address}/metrics: HTTP status 500"]


# Files and captures --------------------------------------------------------------------------------------------------


def test_a_file_is_one_page_of_the_time_it_was_written(tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text(PAGE)
    os.utime(page, (1000, 1234.5))
    assert [s.at_seconds for s in read(str(page)).snapshots] == [1234.5]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has no vLLM metric"),
        (b"\x89PNG\r\n\x1a\n\x00", "not UTF-8"),
        (b"x" * (MAX_PAGE_BYTES + 1), "bytes, more than the"),
        (PAGE.encode()[:-3], "ends inside a line"),
    ],
)
def test_a_file_that_is_no_page_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "page.prom"
    file.write_bytes(content)
    text = refusal(str(file))
    assert text.startswith(f"{file}: ")
    assert says in text


def test_the_recorded_captures_are_read_whole() -> None:
    for name in ("healthy", "prefix", "thrash"):
        found = read(str(CAPTURES / name))
        assert (len(found.snapshots), found.notes) == (20, [])


def capture_of(folder: Path, pages: dict[str, bytes | str]) -> Path:
    for name, page in pages.items():
        (folder / name).write_bytes(page.encode() if isinstance(page, str) else page)
    return folder


def test_a_page_that_cannot_be_read_is_left_out_and_noted(tmp_path: Path) -> None:
    folder = capture_of(tmp_path, {"1000.prom": PAGE, "2000.prom": PAGE[:100], "3000.prom": PAGE})
    (folder / "4000.prom").mkdir()
    notes: list[str] = []
    found = list(read_capture(folder, target="t", notes=notes))
    assert [s.at_seconds for s in found] == [1, 3]
    assert len(notes) == 1
    assert notes[0].startswith(f"{folder}: 2 of 4 pages left out; the first: 2000.prom: the page ends inside a line")


def test_an_engine_that_later_pages_do_not_show_is_noted(tmp_path: Path) -> None:
    two = engine_page(engine="0") + engine_page(engine="1", started=None, config={})
    folder = capture_of(tmp_path, {"1000.prom": two, "2000.prom": two, "9000.prom": engine_page(engine="0")})
    assert read(str(folder)).notes == [
        f"m engine 1 on {folder}: not on the pages of the last 7 s; what is said of it is older"
    ]


def test_a_capture_of_unreadable_pages_is_an_error(tmp_path: Path) -> None:
    folder = capture_of(tmp_path, {"1000.prom": b"\xff", "2000.prom": "<html>"})
    assert "none of its 2 pages can be read; the first: 1000.prom" in refusal(str(folder))


def test_other_files_in_a_capture_are_not_pages(tmp_path: Path) -> None:
    names = ["1000.prom", "notes.txt", "latest.prom", "2000.part", "\u00b2.prom", "-5.prom", "1e3.prom"]
    folder = capture_of(tmp_path, dict.fromkeys(names, PAGE))
    assert [path.name for _, path in page_times(folder)] == ["1000.prom"]


def test_a_folder_without_pages_says_how_to_make_them(tmp_path: Path) -> None:
    assert refusal(str(tmp_path)) == (
        f"{tmp_path}: no page named <unix_ms>.prom; `kvwatch record URL --output DIR` writes them"
    )


def test_page_names_of_ten_digits_are_seconds(tmp_path: Path) -> None:
    folder = capture_of(tmp_path, {"1796006801.prom": PAGE, "1796006803500.prom": PAGE})
    assert [at for at, _ in page_times(folder)] == [1796006801000, 1796006803500]


def test_what_a_server_says_moves_no_cursor() -> None:
    speech = b"\x1b[2J\r\x07no HTTP\r\n"
    with raw_server(lambda line: line.sendall(speech)) as address, pytest.raises(SourceError) as refused:
        Scraper(f"{address}/metrics").page()
    assert str(refused.value).isprintable()
    assert "\\u001b[2J" in str(refused.value)


def test_a_file_that_is_gone_since_the_command_line_was_read(tmp_path: Path) -> None:
    source = parse(str(tmp_path))
    gone = replace(source, kind="file", where=str(tmp_path / "gone.prom"))
    with pytest.raises(SourceError, match=r"gone\.prom: No such file or directory"):
        gather((gone,), window_seconds=0.0, headers={}, progress=lambda *_: None)
