"""What a step costs, fitted to pages."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from fake_engine import FakeEngine

from kvwatch.cost import BusyInterval, assumed_cost, fit_cost, least_squares, seconds_per_step
from kvwatch.simulation import CostModel, Request, SchedulerSettings
from kvwatch.window import Window

SETTINGS = SchedulerSettings(num_gpu_blocks=2048, block_size=16, max_model_len=8192, max_num_seqs=64)


def window_of(cost: CostModel) -> Window:
    """A load that swells and ebbs, so that batch, prompt tokens and cache held differ between intervals."""
    rng = random.Random(2)
    at, requests = 0.0, []
    for number in range(300):
        at += rng.expovariate((4.0 if number % 60 < 30 else 1.0) * 0.02 / cost.step_seconds)
        requests.append(
            Request(prompt_tokens=rng.randint(50, 900), output_tokens=rng.randint(50, 400), at_seconds=round(at, 3))
        )
    return FakeEngine(SETTINGS, cost, requests).window()


@pytest.mark.parametrize(
    "cost",
    [
        CostModel(step_seconds=0.02, per_token_seconds=6e-5),
        CostModel(step_seconds=0.005, per_token_seconds=1e-4, per_kv_token_seconds=1e-7),
        CostModel(step_seconds=0.01, per_kv_token_seconds=5e-7),
    ],
)
def test_the_time_of_steps_is_explained(cost: CostModel) -> None:
    fit = fit_cost(window_of(cost), pool_tokens=2047 * 16, tokens_per_preemption=0.0)
    assert fit is not None
    assert fit.error_ratio < 0.06
    # what counts is the time of a step as it occurs: 20 requests holding 12,000 tokens, with and without a prompt
    for tokens in (20, 520):
        ours = fit.cost.step_seconds + tokens * fit.cost.per_token_seconds + 12_000 * fit.cost.per_kv_token_seconds
        theirs = cost.step_seconds + tokens * cost.per_token_seconds + 12_000 * cost.per_kv_token_seconds
        assert ours == pytest.approx(theirs, rel=0.15)


def test_coefficients_are_never_negative() -> None:
    fit = fit_cost(window_of(CostModel(step_seconds=0.02)), pool_tokens=2047 * 16, tokens_per_preemption=0.0)
    assert fit is not None
    assert fit.cost.step_seconds == pytest.approx(0.02, rel=0.05)
    assert min(fit.cost.per_token_seconds, fit.cost.per_kv_token_seconds) >= 0


def test_pages_whose_times_no_cost_explains_give_none() -> None:
    window = window_of(CostModel(step_seconds=0.02))
    rng = random.Random(9)
    at, warped = 0.0, []
    for snapshot in window.snapshots:  # a machine that is now fast, now slow
        warped.append(replace(snapshot, at_seconds=at))
        at += rng.choice([0.2, 1.0, 8.0])
    assert fit_cost(Window(tuple(warped)), pool_tokens=2047 * 16, tokens_per_preemption=0.0) is None


def test_a_step_that_reads_nothing_takes_time_as_well() -> None:
    """Pages by which time is spent on reading the cache alone: a short prompt with one token would take none."""
    window = window_of(CostModel(step_seconds=0.02))
    at, warped = 0.0, []
    for before, after in pairwise(window.snapshots):
        warped.append(replace(before, at_seconds=at))
        steps = after.histograms["iteration_tokens_total"].count - before.histograms["iteration_tokens_total"].count
        at += 1e-3 + steps * (before.values["kv_cache_usage_perc"] + after.values["kv_cache_usage_perc"])
    fit = fit_cost(Window(tuple(warped)), pool_tokens=2047 * 16, tokens_per_preemption=0.0)
    assert fit is None or fit.cost.step_seconds + fit.cost.per_token_seconds > 1e-4


@pytest.mark.parametrize("seed", range(6))
def test_a_pool_full_all_the_time_leaves_open_whether_steps_or_reading_it_take_the_time(seed: int) -> None:
    """Either alone explains the pages; which of them a little better is chance, and decides nothing."""
    settings = replace(SETTINGS, num_gpu_blocks=512)
    rng = random.Random(seed)
    requests = [Request(prompt_tokens=rng.randint(200, 600), output_tokens=rng.randint(200, 600)) for _ in range(200)]
    cost = CostModel(step_seconds=0.01, per_token_seconds=5e-5, per_kv_token_seconds=0.01 / settings.pool_tokens)
    window = FakeEngine(settings, cost, requests, clients=30).window()
    at, noisy = 0.0, [window.snapshots[10]]
    for before, after in pairwise(window.snapshots[10:-20]):
        at += (after.at_seconds - before.at_seconds) * rng.lognormvariate(0.0, 0.2)
        noisy.append(replace(after, at_seconds=noisy[0].at_seconds + at))
    fit = fit_cost(Window(tuple(noisy)), pool_tokens=settings.pool_tokens, tokens_per_preemption=500.0)
    assert fit is not None
    fixed, reading = fit.cost.step_seconds, fit.cost.per_kv_token_seconds * settings.pool_tokens
    assert 0.05 < fixed / (fixed + reading) < 0.95


def test_pages_without_the_usage_of_the_pool_are_left_out_and_not_read_as_an_empty_pool() -> None:
    window = window_of(CostModel(step_seconds=0.005, per_token_seconds=1e-4, per_kv_token_seconds=1e-7))
    pool = 2047 * 16
    without = tuple(
        replace(s, values={name: v for name, v in s.values.items() if name != "kv_cache_usage_perc"})
        for s in window.snapshots
    )
    assert fit_cost(Window(without), pool_tokens=pool, tokens_per_preemption=0.0) is None
    half = (*window.snapshots[: len(without) // 2], *without[len(without) // 2 :])
    known = Window(window.snapshots[: len(without) // 2])
    assert fit_cost(Window(half), pool_tokens=pool, tokens_per_preemption=0.0) == fit_cost(
        known, pool_tokens=pool, tokens_per_preemption=0.0
    )
    assert seconds_per_step(Window(without)) == seconds_per_step(window)


def test_a_millisecond_does_not_turn_the_costs_around() -> None:
    seconds = (2.21, 2.11, 1.867, 1.988, 1.687, 1.964, 1.749, 1.491, 1.499, 1.56)
    steps = (69, 69, 63, 68, 55, 68, 60, 50, 48, 52)
    tokens = (2240, 1547, 1274, 2260, 2049, 1694, 2820, 1038, 2361, 1376)
    kv_tokens = (280048, 272390, 247787, 264886, 221182, 268458, 235402, 201969, 194623, 206461)

    def reading(seventh_seconds: float) -> float:
        """What a token read costs, if the seventh interval took so long."""
        times = (*seconds[:6], seventh_seconds, *seconds[7:])
        rows = zip(times, steps, tokens, kv_tokens, strict=True)
        found = least_squares([BusyInterval(seconds=s, steps=n, tokens=t, kv_tokens=k) for s, n, t, k in rows])
        assert found is not None
        return found[2]

    assert reading(1.749) == pytest.approx(reading(1.750), rel=0.05)


def test_a_million_steps_in_a_second_are_not_believed() -> None:
    window = window_of(CostModel(step_seconds=0.02))
    hasty = Window(tuple(replace(s, at_seconds=s.at_seconds * 1e-5) for s in window.snapshots))
    assert fit_cost(hasty, pool_tokens=2047 * 16, tokens_per_preemption=0.0) is None
    assert seconds_per_step(hasty) is None


def test_few_pages_give_none() -> None:
    window = window_of(CostModel(step_seconds=0.02))
    few = Window(window.snapshots[10:14])
    assert fit_cost(few, pool_tokens=2047 * 16, tokens_per_preemption=0.0) is None
    assert seconds_per_step(few) == pytest.approx(0.02, rel=0.05)


def test_an_assumed_cost_has_the_mean_step_that_was_seen() -> None:
    cost = assumed_cost(0.03, 150.0)
    assert cost.step_seconds + 150 * cost.per_token_seconds == pytest.approx(0.03)
    assert cost.step_seconds / cost.per_token_seconds == pytest.approx(300)
