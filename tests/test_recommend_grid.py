"""Settings chosen for 37 workloads with known truth: from the true requests, and from /metrics pages alone.

Truth is every cap times every watermark in the simulator, whose decisions are vLLM's own, step for step; a handful of
the cases is played by vLLM's scheduler itself. docs/simulator.md shows the distributions.
"""

from dataclasses import asdict
from functools import lru_cache
from typing import Any

import pytest
from grid_cases import CASES, WANTED, WANTED_OF_PAGES, GridCase, Wanted, truth_of
from simulator_cases import run_oracle
from vllm_server import vllm_python

from kvwatch.simulation import SchedulerSettings, SimulationResult
from kvwatch.what_if import best_settings

pytestmark = pytest.mark.slow
Each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# An engine with 4 preemptions in 260 requests counts as fine, so nothing is proposed; 3 would be as good as the best.
FINE_AND_NOT_PERFECT = ["opposites, poisson, pool 0.6 x demand, load 1.1"]


def chosen_from_truth(case: GridCase) -> SimulationResult:
    return case.play(best_settings(case.trial).best.settings)


@lru_cache(maxsize=64)
def chosen_from_pages(case: GridCase) -> SchedulerSettings:
    return case.chosen_from_pages()


@Each
def test_the_choice_from_the_true_requests_is_as_good_as_the_best(case: GridCase) -> None:
    assert truth_of(case).is_good(chosen_from_truth(case), WANTED)


def test_nothing_changes_where_the_present_settings_are_as_good() -> None:
    as_good = Wanted(kept=0.97, ratio=1.0, preemptions=0)
    fine = [case for case in CASES if truth_of(case).is_good(truth_of(case).now, as_good)]
    assert len(fine) >= 4
    for case in fine:
        assert best_settings(case.trial).best.settings == case.settings, case.name
        assert chosen_from_pages(case) == case.settings, case.name


@Each
def test_no_choice_from_pages_alone_makes_things_worse(case: GridCase) -> None:
    truth, result = truth_of(case), case.play(chosen_from_pages(case))
    assert truth.throughput_ratio(result) >= 0.92
    assert result.preemptions <= max(3, 0.35 * truth.now.preemptions) or result.preemptions == truth.now.preemptions


def test_every_choice_from_pages_alone_for_an_engine_in_trouble_is_as_good_as_the_best() -> None:
    missed = [
        case.name for case in CASES if not truth_of(case).is_good(case.play(chosen_from_pages(case)), WANTED_OF_PAGES)
    ]
    assert missed == FINE_AND_NOT_PERFECT


@pytest.mark.real
def test_the_truth_is_that_of_vllm_itself() -> None:
    python = vllm_python()
    some = [case for case in CASES if case.name.startswith(("mixed", "one prefix, closed"))][:4]
    played = [(case, settings) for case in some for settings in (case.settings, truth_of(case).best.settings)]
    answers = run_oracle(python, [_as_oracle_case(case, settings) for case, settings in played])
    for (case, settings), answer in zip(played, answers, strict=True):
        ours = case.play(settings)
        assert len(answer["steps"]) == ours.steps
        assert sum(len(preempted) for _, preempted, _ in answer["steps"]) == ours.preemptions
        assert answer["end_seconds"] == pytest.approx(ours.makespan_seconds, rel=1e-9)


def _as_oracle_case(case: GridCase, settings: SchedulerSettings) -> dict[str, Any]:
    engine = {k: v for k, v in asdict(settings).items() if k not in {"groups", "evict_unhashed_first"}}
    requests = [{k: v for k, v in asdict(request).items() if v is not None} for request in case.requests]
    document = {"engine": engine, "cost": asdict(case.cost), "requests": requests}
    return document if case.clients is None else {**document, "clients": case.clients}
