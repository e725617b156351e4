import json
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from parts import answers, eventually, get, get_json
from prometheus_client.parser import text_string_to_metric_families
from reports import AT_SECONDS

from kvwatch import __version__
from kvwatch.cli.demo import program
from kvwatch.demo import RecordedEngine, Recording, growth_between, load_recording
from kvwatch.exposition import read_samples
from kvwatch.finding import Status
from kvwatch.report import report
from kvwatch.snapshot import snapshots
from kvwatch.window import Window, windows

RECORDING = load_recording()


def window_until(elapsed_seconds: float) -> Window:
    """What an agent with an interval of 2 s has seen so long after the start."""
    seen = [
        snapshot
        for number in range(int(elapsed_seconds // 2) + 1)
        for snapshot in snapshots(
            read_samples(RECORDING.page(2.0 * number).decode()), at_seconds=AT_SECONDS + 2.0 * number, target="demo"
        )
    ]
    (made,) = windows(seen)
    return made


def statuses(elapsed_seconds: float) -> dict[str, Status]:
    (engine,) = report([window_until(elapsed_seconds)]).engines
    return {finding.check: finding.status for finding in engine.findings}


def test_the_recording_is_first_fine_and_critical_within_25_seconds() -> None:
    assert statuses(4)["preemptions_sustained"] is Status.OK
    assert statuses(24)["preemptions_sustained"] is Status.CRITICAL


def cumulative(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of a counter or histogram, by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        if family.type in {"counter", "histogram"}
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


REPEATED_SECONDS = RECORDING.offsets_seconds[-1] - RECORDING.offsets_seconds[RECORDING.repeat_from]


def test_counters_never_fall_over_three_repetitions() -> None:
    end = RECORDING.offsets_seconds[-1]
    before = cumulative(RECORDING.page(0.0))
    for number in range(2, int(end + 3 * REPEATED_SECONDS) + 2, 2):
        after = cumulative(RECORDING.page(float(number)))
        assert before.keys() <= after.keys()
        assert [] == [key for key, value in before.items() if after[key] < value]
        before = after


def test_a_repetition_adds_what_the_recording_counted() -> None:
    first, later = (cumulative(RECORDING.page(30.0 + times * REPEATED_SECONDS)) for times in (0, 3))
    start, end = (cumulative(RECORDING.pages[number]) for number in (RECORDING.repeat_from, -1))
    assert later == pytest.approx({key: first[key] + 3 * (end[key] - start[key]) for key in first})


def test_gauges_are_repeated_as_recorded() -> None:
    usage = re.compile(rb"^(?:vllm:kv_cache_usage_perc|process_start_time_seconds).*$|^.*_created.*$", re.MULTILINE)
    first, later = (usage.findall(RECORDING.page(30.0 + times * REPEATED_SECONDS)) for times in (0, 3))
    assert len(first) > 2
    assert first == later


@pytest.mark.parametrize("elapsed_seconds", [45, 60, 120, 300])
def test_the_verdict_stays_as_long_as_the_recording_is_repeated(elapsed_seconds: float) -> None:
    seen = window_until(elapsed_seconds).last(60)
    (engine,) = report([seen]).engines
    found = {finding.check: finding.status for finding in engine.findings}
    assert (found["preemptions_sustained"], engine.restarts) == (Status.CRITICAL, 0)
    assert found["kv_cache_saturated"] is Status.WARNING


def recording(*pages: bytes, offsets_seconds: tuple[float, ...], repeat_from: int) -> Recording:
    growth = growth_between(pages[repeat_from], pages[-1])
    return Recording(offsets_seconds=offsets_seconds, pages=pages, repeat_from=repeat_from, growth=growth, answers={})


def test_each_page_is_served_at_its_own_time_and_then_those_of_the_repeated_part() -> None:
    pages = [
        b'# TYPE c counter\nc_total{a="x y"} %d.0\n# TYPE g gauge\ng %d.0\n' % (count, gauge)
        for count, gauge in ((0, 1), (1, 2), (5, 3), (7, 4))
    ]
    made = recording(*pages, offsets_seconds=(0.0, 2.0, 5.0, 6.0), repeat_from=1)
    assert [made.page(elapsed) for elapsed in (0.0, 1.9, 2.0, 4.9, 5.0, 5.9)] == [
        pages[number] for number in (0, 0, 1, 1, 2, 2)
    ]
    values = [re.findall(r" ([\d.]+)$", made.page(elapsed).decode(), re.MULTILINE) for elapsed in (6, 8.9, 9, 10, 13)]
    assert values == [["7.0", "2.0"], ["7.0", "2.0"], ["11.0", "3.0"], ["13.0", "2.0"], ["17.0", "3.0"]]


def test_the_packed_recording_is_small_and_names_no_place() -> None:
    packed = Path(sys.modules["kvwatch.demo"].__file__ or "").parent / "data" / "demo" / "recording.tar.gz"
    assert packed.stat().st_size < 300_000
    assert not any(re.search(rb"/(home|root|tmp|work)/", page) for page in RECORDING.pages)


@pytest.fixture
def engine() -> Iterator[RecordedEngine]:
    made = RecordedEngine(RECORDING)
    made.start()
    yield made
    made.stop()


def test_it_answers_as_a_vllm_server_does(engine: RecordedEngine) -> None:
    assert get(f"{engine.url}/metrics") == RECORDING.pages[0].decode()
    assert get_json(f"{engine.url}/version") == {"version": "0.32.0"}
    assert get_json(f"{engine.url}/v1/models")["data"][0]["max_model_len"] == 4096
    assert get(f"{engine.url}/health") == ""


def test_a_client_that_hangs_up_is_no_event(engine: RecordedEngine, capfd: pytest.CaptureFixture[str]) -> None:
    parts = urlsplit(engine.url)
    for _ in range(20):
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets it
            client.sendall(b"GET /metr")
    eventually(lambda: not any("process_request" in thread.name for thread in threading.enumerate()))
    assert capfd.readouterr().err == ""


def test_the_command_it_names_is_one_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = shlex.split(program())
    done = subprocess.run([*words, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"kvwatch, version {__version__}\n")
    program_on_path = tmp_path / "kvwatch"
    program_on_path.touch(mode=0o755)
    assert program() == "kvwatch"


def start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "kvwatch", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


@pytest.mark.slow
def test_the_demo_reaches_a_verdict_and_a_recommendation() -> None:
    process = start("--exit")
    stdout, stderr = process.communicate(timeout=150)
    assert process.returncode == 0, stderr
    verdict, _, recommendation = stdout.strip().partition("\n\n")
    assert verdict.startswith("CRITICAL  preemptions_sustained: ")
    assert recommendation.startswith("CRITICAL  preemptions_sustained: ")
    assert "Now, without a restart:" in recommendation
    assert "gateway_max_in_flight" in recommendation
    assert "preemptions per request" in recommendation
    assert re.search(r"^ +\d+ s  ok ", stderr, re.MULTILINE)
    assert re.search(r"^ +\d+ s  critical ", stderr, re.MULTILINE)
    assert "Traceback" not in stderr
    assert "Ctrl-C" not in stderr  # nothing is served any more, so no address is named either
    assert "The page:" not in stderr


@pytest.mark.slow
def test_the_demo_keeps_serving_its_page_until_it_is_stopped() -> None:
    process = start()
    assert process.stderr is not None
    said = ""
    while not (found := re.search(r"its page is (http://127\.0\.0\.1:\d+)", said)):
        said += process.stderr.readline()
    url = found.group(1)
    eventually(lambda: answers(f"{url}/readyz"))
    assert "<title>" in get(f"{url}/")
    assert json.loads(get(f"{url}/api/v1/report"))["engines"][0]["model_name"] == "tiny-llama"
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in rest
