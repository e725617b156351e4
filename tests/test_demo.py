import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from parts import answers, eventually, get, get_json
from reports import AT_SECONDS

from kvwatch.demo import RecordedEngine, Recording, load_recording
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


def test_the_recording_starts_over_as_an_engine_that_restarted() -> None:
    assert window_until(RECORDING.period_seconds - 2).restarts == 0
    assert window_until(RECORDING.period_seconds + 4).restarts == 1
    assert window_until(2 * RECORDING.period_seconds + 4).restarts == 2


def test_each_page_is_served_at_its_own_time() -> None:
    made = Recording(offsets_seconds=(0.0, 2.0, 5.0), pages=(b"a", b"b", b"c"), answers={})
    served = [made.page(elapsed) for elapsed in (0.0, 1.9, 2.0, 4.9, 5.0, 7.4)]
    assert served == [b"a", b"a", b"b", b"b", b"c", b"c"]
    assert made.period_seconds == 7.5
    assert made.page(7.5) == b"a"


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
