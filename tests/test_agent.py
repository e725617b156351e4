"""What the agent makes of its rounds: reports, windows, logs."""

import logging
import threading
import time

import pytest
from fake_server import FakeServer, agent_for, refuse, status_of
from hypothesis import given
from hypothesis import strategies as st
from pages import CAPTURES, engine_page
from parts import eventually

from kvwatch.agent import next_round
from kvwatch.errors import SettingError, SourceError
from kvwatch.finding import Status
from kvwatch.report import Report
from kvwatch.snapshot import EngineKey

THRASH = sorted((CAPTURES / "thrash").glob("*.prom"))


def test_a_round_scrapes_judges_and_publishes(fake: FakeServer) -> None:
    watched, board = agent_for(fake.url)
    judged = watched.round()
    assert board.latest is not None
    assert board.latest.report is judged
    (engine,) = judged.engines
    assert engine.key == EngineKey(target=fake.url, model_name="m", engine="0")
    assert engine.observed["running_requests"] == 3
    assert judged.scrapes[0].failure is None
    watched.close()


def test_what_the_server_tells_about_itself_is_in_the_first_report(fake: FakeServer) -> None:
    watched, _ = agent_for(fake.url)
    (engine,) = watched.round().engines
    assert (engine.vllm_version, engine.capacity.max_model_len) == ("0.32.0", 4096)
    watched.round()
    assert fake.requests == ["/metrics", "/version", "/v1/models", "/metrics"]
    watched.close()


def test_the_server_is_asked_again_after_a_restart(fake: FakeServer) -> None:
    watched, _ = agent_for(fake.url)
    watched.round()
    fake.page, fake.version = engine_page(running=1, started=1_700_000_500.0), "0.33.0"
    (engine,) = watched.round().engines
    assert engine.vllm_version == "0.33.0"
    assert engine.restarts == 1
    watched.close()


def test_a_fallen_counter_is_a_restart_as_well(fake: FakeServer) -> None:
    watched, _ = agent_for(fake.url)
    fake.page = engine_page(tokens=500, started=None)
    watched.round()
    fake.page, fake.version = engine_page(tokens=10, started=None), "0.33.0"
    assert watched.round().engines[0].vllm_version == "0.33.0"
    watched.close()


def test_headers_go_to_the_target(fake: FakeServer) -> None:
    watched, _ = agent_for(fake.url, headers={"Authorization": "Bearer x"})
    watched.round()
    assert set(fake.headers) == {"Bearer x"}
    watched.close()


def test_a_recorded_thrash_is_critical_with_a_recommendation(fake: FakeServer) -> None:
    watched, _ = agent_for(fake.url, interval=0.2)
    for path in THRASH[:12]:
        fake.page = path.read_text()
        judged = watched.round()
    (engine,) = judged.engines
    assert status_of(engine, "preemptions_sustained")[0] is Status.CRITICAL
    settled = {item.setting for item in engine.recommendations} | {item.setting for item in engine.withheld}
    assert "gateway_max_in_flight" in settled
    watched.close()


# Faults --------------------------------------------------------------------------------------------------------------


def two_engines(first: float, second: float | None, started: float = 1_700_000_000.0) -> str:
    pages = [engine_page(running=first, started=started)]
    if second is not None:
        pages.append(engine_page(running=second, engine="1", started=None))
    return "".join(pages)


def test_an_engine_that_vanishes_from_a_page_that_still_comes_is_critical(fake: FakeServer) -> None:
    watched, _ = agent_for(fake.url)
    fake.page = two_engines(1, 2)
    assert len(watched.round().engines) == 2
    fake.page = two_engines(1, None)
    engines = {engine.key.engine: engine for engine in watched.round().engines}
    assert engines["0"].observed["running_requests"] == 1
    assert engines["1"].observed == {}
    assert "no longer on the page" in status_of(engines["1"], "metrics_missing")[1]
    watched.close()


def test_engines_of_a_former_process_are_forgotten(fake: FakeServer) -> None:
    watched, _ = agent_for(fake.url)
    fake.page = engine_page(running=1, model_name="old", started=1_700_000_000.0)
    watched.round()
    fake.page = engine_page(running=1, model_name="new", started=1_700_000_900.0)
    assert [engine.key.model_name for engine in watched.round().engines] == ["new"]
    watched.close()


def test_the_window_covers_its_span_and_is_bounded(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, _ = agent_for(fake.url, interval=5.0)
    now = 1_800_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    spans = []
    for number in range(40):
        now = 1_800_000_000.0 + 5.0 * number + (number % 3) * 0.05
        spans.append(watched.round().window_seconds)
    assert all(60.0 <= span <= 66.25 for span in spans[13:])
    now += 600
    assert watched.round().window_seconds == 0
    watched.close()


def test_a_clock_that_went_back_starts_the_window_anew(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, _ = agent_for(fake.url)
    watched.round()
    watched.round()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    fake.page = engine_page(running=7)
    judged = watched.round()
    assert judged.engines[0].observed["running_requests"] == 7
    assert judged.window_seconds == 0
    watched.close()


# Rounds --------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.floats(0, 10**6), st.floats(0.2, 3600))
def test_rounds_are_never_made_up_for_and_never_skipped_without_need(
    number: int, elapsed: float, interval: float
) -> None:
    following = next_round(number, elapsed, interval)
    assert following >= number + 1
    assert following * interval >= elapsed * (1 - 1e-9) or following == number + 1
    assert following == number + 1 or (following - 1) * interval < elapsed


@pytest.mark.parametrize(("elapsed", "following"), [(0.1, 1), (4.9, 1), (5.1, 2), (7.0, 2), (3600.0, 720)])
def test_after_a_pause_there_is_one_round_and_no_burst(elapsed: float, following: int) -> None:
    assert next_round(0, elapsed, 5.0) == following


def test_a_round_that_fails_is_logged_and_the_next_one_comes(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched, board = agent_for(fake.url, interval=0.2)
    real, stop_it, calls = watched.judge, threading.Event(), []

    def sometimes() -> Report:
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError
        return real()

    monkeypatch.setattr(watched, "judge", sometimes)
    thread = threading.Thread(target=watched.run, args=(stop_it,))
    thread.start()
    eventually(lambda: board.latest)
    stop_it.set()
    thread.join()
    assert any(record.getMessage() == "a round failed; the next one follows" for record in caplog.records)


def test_only_changes_are_logged(fake: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    watched, _ = agent_for(fake.url)
    for behave in (None, None, refuse, refuse, None, None):
        fake.behave = behave
        watched.round()
    assert [record.getMessage().partition(": ")[2][:14] for record in caplog.records] == [
        "scrape failed:",
        "readable again",
    ]
    watched.close()


@pytest.mark.parametrize("target", ["-", "tests", "prometheus+http://h:1?selector={}"])
def test_what_is_no_server_cannot_be_watched(target: str) -> None:
    with pytest.raises((SettingError, SourceError)):
        agent_for(target)


# The command ---------------------------------------------------------------------------------------------------------
