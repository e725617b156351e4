import logging
from dataclasses import replace
from pathlib import Path

import pytest
from pages import CAPTURES
from parts import eventually

from kvwatch import checks
from kvwatch import recommend as recommend_module
from kvwatch.adviser import Adviser
from kvwatch.analytic import estimate
from kvwatch.capacity import EngineFacts, live_capacity
from kvwatch.checks.check import EngineView
from kvwatch.proposal import Proposals
from kvwatch.sources.capture import read_capture
from kvwatch.thresholds import DEFAULTS
from kvwatch.window import Window, windows


def view_of(capture: str) -> EngineView:
    (window,) = windows(read_capture(Path(CAPTURES / capture), target="t", notes=[]))
    return EngineView(
        window=window, capacity=live_capacity(window.latest.cache_config, EngineFacts()), facts=EngineFacts()
    )


def ask(adviser: Adviser, view: EngineView) -> Proposals:
    return adviser(view, checks.evaluate_all(view, DEFAULTS), DEFAULTS)


def test_the_formula_answers_until_the_simulation_is_ready() -> None:
    adviser, view = Adviser(window_seconds=0), view_of("thrash")
    assert estimate(view, checks.evaluate_all(view, DEFAULTS), DEFAULTS) == ask(adviser, view)
    eventually(lambda: ask(adviser, view).options, within_seconds=60)
    simulated = ask(adviser, view)
    assert simulated.simulation is not None
    assert simulated == recommend_module.recommend(view, checks.evaluate_all(view, DEFAULTS), DEFAULTS)


def test_trouble_must_last_before_it_is_simulated() -> None:
    adviser, view = Adviser(window_seconds=3600), view_of("thrash")
    assert [(), ()] == [ask(adviser, view).options, ask(adviser, view).options]
    assert adviser._worker is None


def test_pages_from_before_the_trouble_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute of thrashing behind half a minute without: the load that is simulated is that of the former."""
    view, seen = view_of("thrash"), list[float]()
    middle = replace(view, window=Window(view.window.snapshots[: len(view.window.snapshots) // 2]))
    elapsed = view.window.latest.at_seconds - middle.window.latest.at_seconds

    def note(view: EngineView, *_: object) -> Proposals:
        seen.append(view.window.duration_seconds)
        return Proposals()

    monkeypatch.setattr(recommend_module, "recommend", note)
    adviser, findings = Adviser(window_seconds=elapsed), checks.evaluate_all(view, DEFAULTS)
    adviser(middle, findings, DEFAULTS)
    assert seen == []
    adviser(view, findings, DEFAULTS)
    eventually(lambda: seen, within_seconds=20)
    assert seen == [pytest.approx(elapsed, abs=2.1)]


def test_an_engine_that_is_fine_again_gets_no_old_advice() -> None:
    adviser, view = Adviser(window_seconds=0), view_of("thrash")
    ask(adviser, view)
    eventually(lambda: ask(adviser, view).options, within_seconds=60)
    assert Proposals() == ask(adviser, view_of("healthy"))
    assert {} == adviser._cases


def test_a_simulation_that_fails_leaves_the_formula(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> Proposals:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(recommend_module, "recommend", broken)
    adviser, view = Adviser(window_seconds=0), view_of("thrash")
    with caplog.at_level(logging.ERROR):
        ask(adviser, view)
        eventually(lambda: "could not be simulated" in caplog.text, within_seconds=20)
    assert estimate(view, checks.evaluate_all(view, DEFAULTS), DEFAULTS) == ask(adviser, view)
