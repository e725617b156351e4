"""Engines read from the history of a Prometheus-compatible server."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner
from pages import CAPTURES, engine_page
from parts import eventually, free_port, prometheus, victoria_metrics
from prometheus_releases import found
from servers import Answer, Replay, answer, server

from kvwatch import vllm_metrics as vm
from kvwatch.cli import cli
from kvwatch.errors import SourceError
from kvwatch.exposition import read_samples
from kvwatch.sources import prometheus as history
from kvwatch.sources.prometheus import History, name_pattern, parse_history, read_history
from kvwatch.window import windows

NOW = 1_800_000_000.0


# What is asked -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("http://h:9090", History(address="http://h:9090", matchers="")),
        ("http://h:9090/?selector={}", History(address="http://h:9090", matchers="")),
        ('http://h/prom?selector={job="vllm"}', History(address="http://h/prom", matchers='job="vllm"')),
        ("http://h?selector=%7Bjob%3D%22a%20b%22%7D", History(address="http://h", matchers='job="a b"')),
        (
            'http://h?step=15s&selector={pod=~"llm-.+&x", job!="a\\"b",}',
            History(address="http://h", matchers='pod=~"llm-.+&x", job!="a\\"b"', step="15s"),
        ),
    ],
)
def test_an_address_with_a_selector(where: str, expected: History) -> None:
    assert parse_history(where) == expected


@pytest.mark.parametrize(
    "where",
    [
        "http://h?selector=job=vllm",
        'http://h?selector={job="vllm"',
        'http://h?selector={job="vllm"} or up',
        "http://h?selector={job=vllm}",
        "http://h?query=up",
    ],
)
def test_what_is_no_selector_is_refused_with_an_example(where: str) -> None:
    with pytest.raises(SourceError, match=re.escape('prometheus+http://HOST:9090?selector={job="vllm"}')):
        parse_history(where)


@pytest.mark.parametrize("step", ["0s", "fast", "15"])
def test_a_step_that_is_no_duration_is_refused(step: str) -> None:
    with pytest.raises(SourceError, match="is not a duration; write 15s or 1m"):
        parse_history(f"http://h?selector={{}}&step={step}")


def test_the_names_asked_for_are_exactly_those_that_kvwatch_reads() -> None:
    pattern = re.compile(name_pattern())
    assert all(pattern.fullmatch(name) for name in (*vm.SERIES, vm.PROCESS_START_TIME))
    others = ["up", "vllm:num_preemptions_created", "xvllm:num_requests_running", "vllm:lora_requests_info", ""]
    assert not any(pattern.fullmatch(name) for name in others)


def test_raw_samples_are_asked_for_unless_a_step_is_given() -> None:
    selector = f'{{__name__=~"{name_pattern()}", job="vllm"}}'
    assert History(address="", matchers='job="vllm"').query(60) == f"{selector}[60000ms]"
    assert History(address="", matchers='job="vllm"', step="15s").query(60) == f"{selector}[60000ms:15s]"


# What comes back -----------------------------------------------------------------------------------------------------


def series(pages: dict[float, str], **labels: str) -> list[dict[str, Any]]:
    """Pages by time -> series as the API gives them, with the labels of the scrape."""
    found: dict[str, dict[str, Any]] = {}
    for at_seconds, page in pages.items():
        for sample in read_samples(page):
            metric = {"__name__": sample.name, **sample.labels, **labels}
            entry = found.setdefault(json.dumps(metric, sort_keys=True), {"metric": metric, "values": []})
            entry["values"].append([at_seconds, str(sample.value)])
    return list(found.values())


def api(result: list[dict[str, Any]], *, asked: list[dict[str, list[str]]] | None = None) -> Answer:
    def send(handler: BaseHTTPRequestHandler) -> None:
        query = parse_qs(urlsplit(handler.path).query)
        if asked is not None:
            asked.append(query)
        if query["query"][0].startswith("count(last_over_time("):
            value = [{"metric": {}, "value": [NOW, str(len(result))]}] if result else []
            answer(json.dumps({"status": "success", "data": {"resultType": "vector", "result": value}}))(handler)
            return
        answer(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}))(handler)

    return send


class Anything(dict[str, Answer]):
    """The same answer for every path."""

    def get(self, _path: str, _default: Any = None) -> Any:
        return self["*"]


def read(result: list[dict[str, Any]], notes: list[str] | None = None) -> Any:
    with server(Anything({"*": api(result)})) as address:
        found = read_history(address, window_seconds=60, now_seconds=NOW, notes=notes if notes is not None else [])
    return windows(found)


TIMES = (NOW - 30, NOW - 15, NOW)


def test_samples_of_one_target_and_time_are_one_page() -> None:
    pages = {at: engine_page(preemptions=n, finished=10 * n) for n, at in enumerate(TIMES)}
    (window,) = read(series(pages, job="vllm", instance="pod-1:8000"))
    assert window.key.target == "pod-1:8000"
    assert [s.at_seconds for s in window.snapshots] == list(TIMES)
    assert (window.increase(vm.PREEMPTIONS), window.increase(vm.REQUEST_SUCCESS)) == (2, 20)
    assert window.latest.cache_config.num_gpu_blocks == 1000
    assert window.observations(vm.REQUEST_PROMPT_TOKENS) == 20


def test_engines_of_several_targets_are_told_apart() -> None:
    one = series({at: engine_page(running=1) for at in TIMES}, instance="a:8000")
    two = series({at + 0.7: engine_page(running=2) for at in TIMES}, instance="b:8000")
    assert {w.key.target: w.value(vm.REQUESTS_RUNNING) for w in read([*one, *two])} == {"a:8000": 1, "b:8000": 2}


@pytest.mark.parametrize("label", ["job", "service", "prometheus_replica"])
def test_a_server_that_is_scraped_twice_is_not_added_up(label: str) -> None:
    pages = {at: engine_page(running=3, preemptions=5) for at in TIMES}
    twice = [s for value in "ab" for s in series(pages, instance="a:8000", **{label: value})]
    (window,) = read(twice)
    assert {s.get(vm.REQUESTS_RUNNING) for s in window.snapshots} == {3}


def test_without_an_instance_label_the_address_names_the_target() -> None:
    (window,) = read(series({NOW: engine_page()}))
    assert window.key.target.startswith("http://127.0.0.1:")


def test_a_target_that_is_no_engine_is_left_out_and_noted() -> None:
    router = 'vllm:num_requests_running{server="http://pod:8000"} 1\n'
    notes: list[str] = []
    pages = [*series({NOW: router}, instance="router:80"), *series({NOW: engine_page()}, instance="a:8000")]
    assert [w.key.target for w in read(pages, notes)] == ["a:8000"]
    assert len(notes) == 1
    assert "router:80" in notes[0]
    assert "left out: this is a router's page" in notes[0]


def test_an_info_series_that_a_store_trimmed_makes_no_engine() -> None:
    page = engine_page(config={"block_size": "16", "engine": "0"})
    whole = series({NOW: page}, instance="a:8000")
    trimmed = [
        {**s, "metric": {k: v for k, v in s["metric"].items() if k != "instance"}} if "block_size" in s["metric"] else s
        for s in whole
    ]
    notes: list[str] = []
    assert [w.key.target for w in read(trimmed, notes)] == ["a:8000"]
    assert "VictoriaMetrics drops labels beyond -maxLabelsPerTimeseries" in notes[0]


def test_the_time_is_given_and_the_headers_are_sent() -> None:
    asked: list[dict[str, list[str]]] = []
    pages = series({NOW: engine_page()}, instance="a:8000")
    headers = {"X-Scope-OrgID": "team"}
    requests: list[Any] = []
    with server(Anything({"*": api(pages, asked=asked)}), seen=requests) as address:
        read_history(address, window_seconds=60, now_seconds=NOW, notes=[], headers=headers)
    assert [query["time"] for query in asked] == [["1800000000.000"]] * 2
    assert {request.headers["X-Scope-OrgID"] for request in requests} == {"team"}


@pytest.mark.parametrize(("hours", "span"), [(1, "[3600000ms]"), (2, "[7200000ms:30s]"), (24, "[86400000ms:300s]")])
def test_of_a_long_window_not_every_sample_is_fetched(hours: int, span: str) -> None:
    asked: list[dict[str, list[str]]] = []
    pages = series({NOW: engine_page()}, instance="a:8000")
    with server(Anything({"*": api(pages, asked=asked)})) as address:
        read_history(address, window_seconds=hours * 3600, now_seconds=NOW, notes=[])
    assert asked[-1]["query"][0].endswith(span)


@pytest.mark.parametrize(
    ("send", "says"),
    [
        (answer("", status=404), "HTTP status 404; is this the address of a Prometheus API"),
        (answer("", status=401), "it wants a login: give --header"),
        (answer("", status=302, headers={"Location": "/login"}), "it redirects"),
        (answer('{"status":"error","error":"parse error: x"}', status=400), "HTTP status 400: parse error: x"),
        (answer("<html>"), "not the answer of a Prometheus API"),
        (answer('{"status":"success"}'), "not the answer of a Prometheus API"),
        (answer('{"status":"success","data":{"result":7}}'), "no list of series"),
        (api([]), "no series of vLLM in the last 60 s"),
    ],
)
def test_an_answer_that_is_none_says_what_to_try(send: Answer, says: str) -> None:
    with server(Anything({"*": send})) as address, pytest.raises(SourceError) as refused:
        read_history(address, window_seconds=60, now_seconds=NOW, notes=[])
    assert says in str(refused.value)
    assert str(refused.value).startswith(address)


def test_a_port_where_nothing_listens_is_named() -> None:
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SourceError, match=f"^{address}.*is Prometheus running"):
        read_history(address, window_seconds=60, now_seconds=NOW, notes=[])


def test_too_many_series_are_refused_before_they_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_SERIES", 10)
    asked: list[dict[str, list[str]]] = []
    pages = series({NOW: engine_page()}, instance="a:8000")
    with (
        server(Anything({"*": api(pages, asked=asked)})) as address,
        pytest.raises(SourceError, match="more than the 10"),
    ):
        read_history(address, window_seconds=60, now_seconds=NOW, notes=[])
    assert len(asked) == 1


def test_an_answer_too_large_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_ANSWER_BYTES", 1000)
    with (
        server(Anything({"*": answer("[" * 5000)})) as address,
        pytest.raises(SourceError, match="more than 1,000 bytes"),
    ):
        read_history(address, window_seconds=60, now_seconds=NOW, notes=[])


def test_without_the_extra_the_command_to_install_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_api_client", None)
    with pytest.raises(SourceError, match="pip install prometheus-api-client"):
        read_history("http://127.0.0.1:9", window_seconds=60, now_seconds=NOW, notes=[])


# Real servers --------------------------------------------------------------------------------------------------------

Starter = Callable[[Path, str], AbstractContextManager[str]]
STORES: dict[str, Starter] = {
    **{str(program): partial(prometheus, path=program.path) for program in found("prometheus")},
    "victoria-metrics": victoria_metrics,
}


@pytest.fixture(scope="module", params=STORES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store that has scraped a whole replayed capture of the thrashing engine."""
    start = STORES[request.param]
    replay = Replay(CAPTURES / "thrash", speed=6)
    with server({"/metrics": replay}) as engine:
        config = f"""
global: {{scrape_interval: 500ms, scrape_timeout: 400ms}}
scrape_configs:
  - job_name: vllm
    static_configs:
      - {{targets: ["{urlsplit(engine).netloc}"], labels: {{pod: llm-0, namespace: ai}}}}
"""
        with start(tmp_path_factory.mktemp("store"), config) as address:
            eventually(lambda: replay.ended, within_seconds=30)
            yield address


@pytest.mark.real
def test_the_history_of_a_thrashing_engine_is_judged_critical(store: str) -> None:
    source = f'prometheus+{store}?selector={{job="vllm",pod=~"llm-.+"}}'

    def judged() -> Any:
        result = CliRunner().invoke(cli, ["check", source, "--output", "json"])
        assert result.exit_code in {0, 1}, result.output
        report = json.loads(result.stdout)
        statuses = {finding["check"]: finding["status"] for finding in report["engines"][0]["findings"]}
        return report if statuses["preemptions_sustained"] == "critical" else None

    report = eventually(judged, every_seconds=0.5)
    (engine,) = report["engines"]
    assert engine["model_name"] == "tiny-llama"
    assert engine["target"].endswith("/ai/llm-0")
    if engine["capacity"]["num_gpu_blocks"] is None:  # VictoriaMetrics trims the series that says it
        assert any("raise it to 60" in note for note in report["notes"])
    else:
        assert engine["capacity"]["num_gpu_blocks"] == 256
    assert engine["window_seconds"] > 3


@pytest.mark.real
def test_what_a_store_gives_is_what_was_scraped(store: str) -> None:
    """Counters of the last page, to the last digit."""
    last = read_samples(max((CAPTURES / "thrash").glob("*.prom")).read_text())
    expected = {s.value for s in last if s.name == "vllm:num_preemptions_total"}

    def latest() -> bool:
        found = read_history(f"{store}?selector={{}}", window_seconds=60, now_seconds=time.time(), notes=[])
        (window,) = windows(found)
        return {window.latest.get(vm.PREEMPTIONS)} == expected

    assert eventually(latest, every_seconds=0.5)


@pytest.mark.real
def test_a_selector_that_finds_nothing_says_so(store: str) -> None:
    result = CliRunner().invoke(cli, ["check", f'prometheus+{store}?selector={{job="other"}}'])
    assert result.exit_code == 2
    assert "no series of vLLM" in result.stderr


@pytest.mark.real
def test_a_step_thins_the_samples_out(store: str) -> None:
    found = read_history(f"{store}?selector={{}}&step=2s", window_seconds=60, now_seconds=time.time(), notes=[])
    (window,) = windows(found)
    times = [s.at_seconds for s in window.snapshots]
    assert {round(after - before, 3) for before, after in pairwise(times)} == {2.0}
