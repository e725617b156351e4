"""Counters, gauges and histograms of one engine in time."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import capture, engine_page, histogram, read, window_of

from kvwatch import vllm_metrics as vm
from kvwatch.errors import NoData
from kvwatch.snapshot import EngineKey, Histogram, Snapshot
from kvwatch.window import Window, quantile, window, windows

KEY = EngineKey(target="t", model_name="m", engine="0")


def counted(values: list[float], *, started: list[float | None] | None = None, every: float = 10.0) -> Window:
    """Snapshots that differ in the preemption counter and the process start time only."""
    starts = started or [None] * len(values)
    return window(
        Snapshot(at_seconds=i * every, key=KEY, values={vm.PREEMPTIONS.name: value}, process_start_seconds=start)
        for i, (value, start) in enumerate(zip(values, starts, strict=True))
    )


# Counters ------------------------------------------------------------------------------------------------------------


def test_a_counter_grows_by_what_it_rose() -> None:
    seen = counted([5, 7, 7, 12])
    assert (seen.increase(vm.PREEMPTIONS), seen.rate(vm.PREEMPTIONS)) == (7, 7 / 30)


def test_a_counter_that_fell_is_a_restart() -> None:
    seen = counted([100, 110, 3, 5])
    assert (seen.restarts, seen.increase(vm.PREEMPTIONS), seen.counted_seconds) == (1, 12, 20)


def test_a_new_process_is_a_restart_although_the_counter_rose() -> None:
    seen = counted([1, 2, 50, 51], started=[100, 100, 900, 900])
    assert (seen.restarts, seen.increase(vm.PREEMPTIONS)) == (1, 2)


def test_a_start_time_that_moves_within_a_second_is_the_same_process() -> None:
    assert counted([1, 2], started=[100.0, 100.4]).increase(vm.PREEMPTIONS) == 1


def test_a_counter_that_steps_back_a_little_is_no_restart_and_no_growth() -> None:
    seen = counted([100, 110, 108, 118])
    assert (seen.restarts, seen.increase(vm.PREEMPTIONS), seen.counted_seconds) == (0, 18, 30)


@pytest.mark.parametrize("started", [1.0, None], ids=["the start of the process is known", "it is not"])
@pytest.mark.parametrize("old", [[2.0], [2.0, 3.0]], ids=["one page", "two"])
def test_the_way_back_from_an_old_page_is_no_growth(old: list[float], started: float | None) -> None:
    values = [1000.0, 1010.0, *old, 1030.0, 1040.0]
    seen = counted(values, started=[started] * len(values))
    assert (seen.increase(vm.PREEMPTIONS), seen.counted_seconds) == (40, 10.0 * (len(values) - 1))


def test_a_level_that_is_not_reached_again_is_no_level() -> None:
    """One of several API servers is gone, and its counts with it."""
    seen = counted([100, 110, 80, 90], started=[1, 1, 1, 1])
    assert (seen.restarts, seen.increase(vm.PREEMPTIONS), seen.counted_seconds) == (0, 20, 20)


def test_in_one_process_no_fall_is_a_restart() -> None:
    assert counted([100, 3, 5], started=[1, 1, 1]).restarts == 0


def test_a_histogram_that_fell_is_a_restart_where_the_page_has_no_counter() -> None:
    bars = [histogram("request_prompt_tokens", [n, n], [5.0], n, model_name="m") for n in (9, 1, 2)]
    seen = window_of([f'num_requests_running{{model_name="m"}} 1\n{text}\n' for text in bars])
    assert (seen.restarts, seen.observations(vm.REQUEST_PROMPT_TOKENS)) == (1, 1)


def test_the_interval_of_a_restart_counts_for_no_metric() -> None:
    """Else preemptions could seem to happen while, it seems, no request finishes."""
    before, after = engine_page(preemptions=0, finished=100), engine_page(preemptions=5, finished=60, started=1.8e9)
    seen = window_of([before, before, after])
    assert (seen.increase(vm.PREEMPTIONS), seen.increase(vm.REQUEST_SUCCESS), seen.counted_seconds) == (0, 0, 10)


def test_pages_of_servers_behind_a_load_balancer_are_recognised() -> None:
    seen = counted([100, 7, 101, 8], started=[50, 90, 50, 90])
    assert seen.several_servers
    with pytest.raises(NoData, match="load balancer: give each engine's address"):
        seen.increase(vm.PREEMPTIONS)
    assert not counted([100, 7, 8], started=[50, 90, 90]).several_servers


def test_what_is_held_is_held_by_the_present_process() -> None:
    seen = counted([100, 110, 3, 5, 6], started=[50, 50, 90, 90, 90])
    assert [s.at_seconds for s in seen.since_restart.snapshots] == [20, 30, 40]
    assert [s.at_seconds for s in seen.held(60).snapshots] == [20, 30, 40]
    assert [s.at_seconds for s in seen.held(15).snapshots] == [30, 40]
    assert [s.at_seconds for s in seen.last(60).snapshots] == [0, 10, 20, 30, 40]


def test_a_page_is_not_joined_by_the_one_before_the_restart() -> None:
    seen = counted([100, 3], started=[50, 90], every=60)
    assert [s.at_seconds for s in seen.held(30).snapshots] == [60]


def test_without_a_restart_everything_is_of_the_present_process() -> None:
    assert counted([1, 2, 3]).since_restart.snapshots == counted([1, 2, 3]).snapshots


def test_of_servers_behind_a_load_balancer_every_page_is_present() -> None:
    seen = counted([100, 7, 101, 8], started=[50, 90, 50, 90])
    assert seen.since_restart == seen


@pytest.mark.parametrize(
    ("values", "started", "reason"),
    [
        ([5], None, "a rate needs two pages, and there is one; give --window or a capture folder"),
        ([5, 1], None, "the engine restarted; a rate needs two pages since then"),
        ([5, 4], None, "the counters step back, as the sum over several API servers does; sample a longer --window"),
    ],
)
def test_without_two_pages_of_one_process_there_is_no_rate(values: list[float], started: None, reason: str) -> None:
    with pytest.raises(NoData) as refused:
        counted(values, started=started).rate(vm.PREEMPTIONS)
    assert str(refused.value) == reason


def test_a_missing_counter_is_named() -> None:
    with pytest.raises(NoData) as refused:
        counted([1, 2]).increase(vm.PROMPT_TOKENS)
    assert str(refused.value) == "vllm:prompt_tokens_total is not exposed"


def test_one_part_of_a_split_counter_grows_alone() -> None:
    pages = [
        engine_page(extra=f'vllm:admission_rejections_total{{model_name="m",reason="queue_full"}} {n}') for n in (1, 4)
    ]
    assert window_of(pages).increase_of_part(vm.ADMISSION_REJECTIONS, "queue_full") == 3


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=12))
def test_an_increase_is_never_negative_and_without_falls_it_is_the_sum_of_the_steps(steps: list[int]) -> None:
    values = [float(sum(steps[: i + 1])) for i in range(len(steps))]
    assert counted(values).increase(vm.PREEMPTIONS) == values[-1] - values[0]


@given(st.lists(st.integers(0, 50), min_size=2, max_size=12))
def test_whatever_a_counter_does_its_increase_is_at_most_what_it_rose(values: list[int]) -> None:
    rises = sum(max(0, b - a) for a, b in pairwise(values))
    try:
        increase = counted([float(v) for v in values]).increase(vm.PREEMPTIONS)
    except NoData:
        return
    assert 0 <= increase <= rises


# Gauges and spans ----------------------------------------------------------------------------------------------------


def test_gauges_have_extremes_a_mean_and_a_latest_value() -> None:
    seen = window_of([engine_page(running=n) for n in (2, 6, 4)])
    metric = vm.REQUESTS_RUNNING
    assert (seen.minimum(metric), seen.maximum(metric), seen.mean(metric), seen.value(metric)) == (2, 6, 4, 4)


def test_a_gauge_that_the_latest_page_lacks_has_no_value_but_a_history() -> None:
    seen = window_of([engine_page(running=2), engine_page(without=["num_requests_running"])])
    assert seen.maximum(vm.REQUESTS_RUNNING) == 2
    with pytest.raises(NoData, match="num_requests_running is not exposed"):
        seen.value(vm.REQUESTS_RUNNING)


def test_the_last_seconds_are_open_on_the_left() -> None:
    assert [s.at_seconds for s in counted([0] * 5).last(30).snapshots] == [20, 30, 40]


def test_pages_further_apart_than_the_span_still_show_what_lasts() -> None:
    assert [s.at_seconds for s in counted([0] * 5, every=60).last(30).snapshots] == [180, 240]


def test_a_stale_page_says_nothing_about_the_last_seconds() -> None:
    assert [s.at_seconds for s in counted([0] * 5, every=3600).last(30).snapshots] == [4 * 3600]


@given(st.permutations(range(6)))
def test_snapshots_may_come_in_any_order_and_twice(order: list[int]) -> None:
    known = counted([0, 1, 2, 3, 4, 5]).snapshots
    assert window([*(known[i] for i in order), *known]).snapshots == known


def test_of_two_snapshots_at_one_instant_the_last_given_wins() -> None:
    first, second = (read(engine_page(running=n))[0] for n in (1, 2))
    assert window([first, second]).snapshots == (second,)


def test_every_engine_has_its_own_window_and_one_that_vanished_keeps_its_own() -> None:
    early = read(engine_page(engine="0") + engine_page(engine="1", started=None, config={}), 0)
    late = read(engine_page(engine="0"), 10)
    made = {w.key.engine: w for w in windows([*late, *early])}
    assert {engine: w.latest.at_seconds for engine, w in made.items()} == {"0": 10, "1": 0}


def test_without_a_page_there_is_no_window() -> None:
    with pytest.raises(NoData, match="no page was read"):
        window([])


# Histograms ----------------------------------------------------------------------------------------------------------


def bars(*counts: float, total: float | None = None, bounds: tuple[float, ...] = (1.0, 2.0, 4.0)) -> Histogram:
    return Histogram(bounds=(*bounds, math.inf), counts=counts, sum=total, count=counts[-1])


@pytest.mark.parametrize(
    ("q", "expected"),
    [(0.0, 0.0), (0.25, 0.5), (0.5, 1.0), (0.75, 1.5), (1.0, 2.0)],
)
def test_quantiles_are_linear_inside_a_bucket(q: float, expected: float) -> None:
    assert quantile(bars(2, 4, 4, 4), q) == expected


def test_a_quantile_beyond_the_last_bound_is_the_last_bound() -> None:
    assert quantile(bars(0, 0, 1, 10), 0.99) == 4.0


def test_a_quantile_of_buckets_that_lack_some_observations_is_finite() -> None:
    assert quantile(replace(bars(1, 2, 3, 3), count=9), 0.99) < 4.0


def test_without_a_finite_bucket_there_is_no_quantile() -> None:
    with pytest.raises(NoData, match="no bucket but"):
        quantile(Histogram(bounds=(math.inf,), counts=(5,), sum=9, count=5), 0.5)


def test_an_empty_histogram_has_no_quantile() -> None:
    with pytest.raises(NoData, match="empty"):
        quantile(bars(0, 0, 0, 0), 0.5)


@given(
    st.lists(st.integers(0, 100), min_size=4, max_size=4).filter(any),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_quantiles_ascend_and_stay_inside_the_bounds(steps: list[int], a: float, b: float) -> None:
    made = bars(*(float(sum(steps[: i + 1])) for i in range(4)))
    low, high = sorted((a, b))
    assert 0 <= quantile(made, low) <= quantile(made, high) <= 4


def with_bars(*made: Histogram | None) -> Window:
    return window(
        Snapshot(at_seconds=i * 10.0, key=KEY, histograms={vm.QUEUE_TIME.name: one} if one else {})
        for i, one in enumerate(made)
    )


def test_only_observations_inside_the_window_count() -> None:
    seen = with_bars(bars(10, 10, 10, 10, total=5), bars(10, 12, 12, 12, total=8))
    assert (seen.observations(vm.QUEUE_TIME), seen.average(vm.QUEUE_TIME)) == (2, 1.5)
    assert seen.quantile(vm.QUEUE_TIME, 0.5) == 1.5


def test_no_observation_in_the_window_is_a_count_of_0_but_no_average() -> None:
    seen = with_bars(bars(1, 1, 1, 1, total=1), bars(1, 1, 1, 1, total=1))
    assert seen.observations(vm.QUEUE_TIME) == 0
    with pytest.raises(NoData, match="has no observation in 10 s"):
        seen.average(vm.QUEUE_TIME)


def test_histograms_with_other_buckets_after_an_upgrade_are_not_subtracted() -> None:
    new = bars(3, 5, 6, 6, total=9, bounds=(1.0, 3.0, 9.0))
    seen = with_bars(bars(1, 1, 1, 1, total=1), replace(new, counts=(1, 1, 1, 1), sum=1.0, count=1), new)
    assert seen.observed(vm.QUEUE_TIME) == replace(new, counts=(2, 4, 5, 5), sum=8.0, count=5)


def test_a_histogram_that_one_page_lacks_counts_where_two_neighbours_have_it() -> None:
    seen = with_bars(bars(1, 1, 1, 1), None, bars(2, 2, 2, 2), bars(2, 5, 5, 5))
    assert seen.observations(vm.QUEUE_TIME) == 3


# Recorded engines ----------------------------------------------------------------------------------------------------


def test_the_thrash_capture_shows_its_preemptions() -> None:
    seen = capture("thrash")
    assert (len(seen.snapshots), seen.restarts, seen.several_servers) == (20, 0, False)
    assert seen.increase(vm.PREEMPTIONS) == 25
    assert seen.increase(vm.REQUEST_SUCCESS) == 30
