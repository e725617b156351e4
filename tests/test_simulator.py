import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_cases import closed_loop_case, random_case, requests_of, simulated

from kvwatch.errors import SettingError
from kvwatch.samples import Samples
from kvwatch.simulation import CostModel, KvGroup, Request, Retry, SchedulerSettings, SimulationResult, StepTrace
from kvwatch.simulator import simulate

COST = CostModel(step_seconds=0.02, per_token_seconds=1e-5, per_kv_token_seconds=1e-8)
SECOND_PER_STEP = CostModel(step_seconds=1.0)
SEEDS = st.integers(min_value=0, max_value=10**6)


def engine(**changes: Any) -> SchedulerSettings:
    base: dict[str, Any] = {"num_gpu_blocks": 101, "max_num_seqs": 8, "enable_prefix_caching": False}
    return SchedulerSettings(**(base | changes))


def request(prompt: int, output: int, at: float = 0.0, **more: Any) -> Request:
    return Request(prompt_tokens=prompt, output_tokens=output, at_seconds=at, **more)


def traced(
    settings: SchedulerSettings, cost: CostModel, requests: Sequence[Request], **more: Any
) -> tuple[list[StepTrace], SimulationResult]:
    steps: list[StepTrace] = []
    return steps, simulate(settings, cost, requests, trace=steps.append, **more)


# ---- the clock ------------------------------------------------------------------------------------------------------


def test_one_request_costs_its_prompt_then_one_step_per_token() -> None:
    steps, result = traced(engine(), COST, [request(100, 3)])
    assert [step.scheduled for step in steps] == [((0, 100),), ((0, 1),), ((0, 1),)]
    # steps: 100 tokens holding 0, 1 token holding 100, 1 token holding 101
    assert result.makespan_seconds == pytest.approx(3 * 0.02 + 102e-5 + 201e-8, rel=1e-15)
    assert result.ttft_p50_seconds == pytest.approx(0.02 + 100e-5, rel=1e-15)
    assert result.itl_p99_seconds == pytest.approx(0.02 + 1e-5 + 101e-8, rel=1e-15)
    assert (result.scheduled_tokens, result.output_tokens) == (102, 3)
    assert result.output_tokens_per_second == 3 / result.makespan_seconds


def test_a_token_counts_at_the_end_of_its_step_and_an_arrival_at_the_start() -> None:
    # B arrives exactly when the second step starts: it is in it. C arrives just after and waits for the third.
    steps, _ = traced(engine(), SECOND_PER_STEP, [request(10, 5), request(10, 1, at=1.0), request(10, 1, at=1.0000001)])
    assert [dict(step.scheduled) for step in steps] == [{0: 10}, {0: 1, 1: 10}, {0: 1, 2: 10}, {0: 1}, {0: 1}]


def test_fifty_steps_of_a_fiftieth_second_make_exactly_one_second() -> None:
    steps, _ = traced(engine(), CostModel(step_seconds=0.02), [request(10, 100), request(10, 1, at=1.0)])
    assert next(step for step in steps if len(step.scheduled) == 2).step == 50


def test_an_empty_engine_jumps_to_the_next_arrival() -> None:
    steps, result = traced(engine(), SECOND_PER_STEP, [request(10, 2), request(10, 1, at=100.0)])
    assert [step.start_seconds for step in steps] == [0.0, 1.0, 100.0]
    assert result.makespan_seconds == 101.0


def test_requests_that_arrive_between_two_steps_queue_in_file_order() -> None:
    # both come while the first step runs; the file names the later one first
    steps, _ = traced(
        engine(max_num_seqs=1), SECOND_PER_STEP, [request(5, 1), request(6, 1, at=0.9), request(7, 1, at=0.1)]
    )
    assert [step.scheduled for step in steps] == [((0, 5),), ((1, 6),), ((2, 7),)]


def test_requests_that_arrive_in_different_steps_queue_by_arrival_even_in_an_unordered_file() -> None:
    steps, _ = traced(
        engine(max_num_seqs=1), SECOND_PER_STEP, [request(5, 5), request(6, 1, at=2.5), request(7, 1, at=0.5)]
    )
    assert [step.scheduled for step in steps[5:]] == [((2, 7),), ((1, 6),)]


def test_a_client_sends_its_next_request_when_its_last_one_finished() -> None:
    steps, result = traced(engine(), SECOND_PER_STEP, [request(10, 2), request(10, 4), request(10, 1)], clients=2)
    assert [dict(step.scheduled) for step in steps] == [{0: 10, 1: 10}, {0: 1, 1: 1}, {1: 1, 2: 10}, {1: 1}]
    assert result.ttft_p99_seconds == 1.0  # counted from the moment the client was free


# ---- decisions ------------------------------------------------------------------------------------------------------


def test_the_last_admitted_request_is_preempted_and_computed_again() -> None:
    # 4 usable blocks of 16: both prompts fit, their outputs do not
    steps, result = traced(engine(num_gpu_blocks=5), SECOND_PER_STEP, [request(30, 20), request(30, 20)])
    first = next(step for step in steps if step.preempted)
    assert (first.step, first.preempted, first.scheduled) == (3, (1,), ((0, 1),))
    resumed = next(step for step in steps[first.step :] if dict(step.scheduled).get(1, 0) > 1)
    assert resumed.scheduled == ((1, 33),)  # 30 prompt tokens and the 3 it had made
    assert (result.preemptions, result.recomputed_tokens) == (1, 32)


def test_a_cached_prefix_is_not_computed_again() -> None:
    shared: dict[str, Any] = {"prefix": "support", "prefix_tokens": 64}
    requests = [request(70, 1, **shared), request(80, 1, at=5.0, **shared)]
    steps, result = traced(engine(enable_prefix_caching=True), SECOND_PER_STEP, requests)
    assert [step.scheduled for step in steps] == [((0, 70),), ((1, 16),)]
    assert result.prefix_hit_tokens == 64


def test_a_prompt_that_is_cached_whole_still_computes_its_last_block() -> None:
    shared: dict[str, Any] = {"prefix": "p", "prefix_tokens": 64}
    requests = [request(64, 1, **shared), request(64, 1, at=5.0, **shared)]
    steps, _ = traced(engine(enable_prefix_caching=True), SECOND_PER_STEP, requests)
    assert [step.scheduled for step in steps] == [((0, 64),), ((1, 16),)]


def test_before_vllm_0_23_the_tail_of_a_finished_request_outlived_older_prefixes() -> None:
    # "old" is cached, then a stranger with one partial block comes and goes, then a request needs all but 4 blocks
    requests = [
        request(64, 1, prefix="old", prefix_tokens=64),
        request(8, 1, at=10.0),
        request(16 * 96, 1, at=20.0),
        request(65, 1, at=30.0, prefix="old", prefix_tokens=64),
    ]
    hits = {
        first: simulate(
            engine(enable_prefix_caching=True, evict_unhashed_first=first), SECOND_PER_STEP, requests
        ).prefix_hit_tokens
        for first in (True, False)
    }
    # Of 100 usable blocks, 4 hold the prefix. Now the big request gets the 95 never used and the stranger's; in the
    # order of release, the stranger's comes after the prefix, whose last block is taken.
    assert hits == {True: 64, False: 48}


def test_the_watermark_holds_back_new_requests_only_while_something_runs() -> None:
    # 100 usable blocks, watermark 50 of 101: the first request takes 60 with nothing running; the second waits
    steps, _ = traced(engine(watermark=0.5), SECOND_PER_STEP, [request(16 * 60, 3), request(16, 1)])
    assert [dict(step.scheduled) for step in steps] == [{0: 960}, {0: 1}, {0: 1}, {1: 16}]


def test_without_reservation_a_prompt_is_admitted_when_its_first_chunk_fits() -> None:
    requests = [request(16 * 50, 40), request(16 * 60, 1)]
    budget = {"max_num_batched_tokens": 64, "num_gpu_blocks": 101}
    reserved, _ = traced(engine(**budget), SECOND_PER_STEP, requests)
    eager, _ = traced(engine(**budget, scheduler_reserve_full_isl=False), SECOND_PER_STEP, requests)
    assert next(step.step for step in eager if 1 in dict(step.scheduled)) == 12
    assert next(step.step for step in reserved if 1 in dict(step.scheduled)) == 52


def test_active_seqs_limit_admission_below_max_num_seqs() -> None:
    steps, _ = traced(engine(max_num_active_seqs=2), SECOND_PER_STEP, [request(10, 2) for _ in range(4)])
    assert [len(step.scheduled) for step in steps] == [2, 2, 2, 2]


def test_a_sliding_window_group_stops_growing_at_its_window() -> None:
    full, window = KvGroup(block_size=16), KvGroup(block_size=16, max_blocks=3)
    steps, _ = traced(engine(groups=(full, window)), SECOND_PER_STEP, [request(30, 100)])
    free = {step.step: step.free_blocks for step in steps}
    assert free[0] == 100 - 2 - 2
    assert free[3] == 100 - 3 - 3  # the 33rd token needs a block in both groups
    assert free[99] == 100 - 9 - 3  # 129 tokens


def test_a_long_prefill_holds_more_than_its_window_until_the_next_step() -> None:
    window = KvGroup(block_size=16, window_tokens=64)
    steps, _ = traced(engine(groups=(window,), max_num_batched_tokens=320), SECOND_PER_STEP, [request(640, 3)])
    # 20 blocks; 40 less the 16 before token 257; then the window's 4 and the one begun
    assert [100 - step.free_blocks for step in steps] == [20, 24, 5, 5]


def test_a_window_is_reserved_with_the_chunks_that_pass_through_it() -> None:
    # 64 tokens of window and chunks of 320: at most ceil(383 / 16) + 1 = 25 blocks, whatever the prompt
    window = KvGroup(block_size=16, window_tokens=64)
    requests = [request(16 * 70, 50), request(3000, 1)]
    limits: dict[str, Any] = {"groups": (KvGroup(block_size=16), window), "max_num_batched_tokens": 320}
    with pytest.raises(SettingError, match="needs 213 blocks"):
        simulate(engine(**limits), SECOND_PER_STEP, requests)
    assert simulate(engine(**limits, num_gpu_blocks=214), SECOND_PER_STEP, requests).output_tokens == 51


def test_a_hybrid_pool_is_whole_again_when_all_requests_are_done() -> None:
    groups = (KvGroup(block_size=16), KvGroup(block_size=16), KvGroup(block_size=32, window_tokens=40))
    settings = engine(groups=groups, enable_prefix_caching=True, num_gpu_blocks=120)
    requests = [request(100, 60, prefix="p", prefix_tokens=50) for _ in range(12)] + [request(16, 1, at=1e6)]
    steps, result = traced(settings, COST, requests)
    assert result.preemptions > 0
    assert steps[-1].free_blocks == settings.usable_blocks - settings.blocks(16)


# ---- clients that give up -------------------------------------------------------------------------------------------


def test_a_client_that_waited_too_long_sends_its_request_again_and_then_gives_up() -> None:
    retry = Retry(first_token_timeout_seconds=3.0, max_attempts=2, backoff_seconds=1.0)
    steps, result = traced(engine(max_num_seqs=1), SECOND_PER_STEP, [request(10, 20), request(10, 1)], retry=retry)
    assert (result.timeouts, result.abandoned_requests) == (2, 1)
    assert {index for step in steps for index, _ in step.scheduled} == {0}


def test_a_retry_that_finds_room_is_served_and_its_wait_counts_from_the_first_attempt() -> None:
    retry = Retry(first_token_timeout_seconds=3.0, max_attempts=9)
    _, result = traced(engine(max_num_seqs=1), SECOND_PER_STEP, [request(10, 5), request(10, 1)], retry=retry)
    assert (result.timeouts, result.abandoned_requests) == (1, 0)
    assert result.ttft_p99_seconds == 6.0


def test_a_request_that_makes_tokens_is_not_given_up() -> None:
    retry = Retry(first_token_timeout_seconds=3.0)
    assert simulate(engine(), SECOND_PER_STEP, [request(10, 50)], retry=retry).timeouts == 0


def test_what_a_timed_out_prefill_computed_is_counted_as_recomputed() -> None:
    # 300 tokens in chunks of 64: the client gives up after 3 steps; the retry starts anew
    retry = Retry(first_token_timeout_seconds=3.0, max_attempts=1)
    _, result = traced(engine(max_num_batched_tokens=64), SECOND_PER_STEP, [request(300, 1)], retry=retry)
    assert (result.scheduled_tokens, result.output_tokens, result.abandoned_requests) == (192, 0, 1)
    assert result.itl_p50_seconds is result.ttft_p50_seconds is None


# ---- laws -----------------------------------------------------------------------------------------------------------


@given(SEEDS)
@settings(max_examples=60, deadline=None)
def test_every_token_is_scheduled_once_plus_those_recomputed_minus_those_cached(seed: int) -> None:
    case = random_case(seed)
    steps, result = simulated(case)
    needed = sum(item["prompt_tokens"] + item["output_tokens"] - 1 for item in case["requests"])
    assert result.scheduled_tokens == needed - result.prefix_hit_tokens + result.recomputed_tokens
    assert result.scheduled_tokens == sum(n for scheduled, _, _ in steps for _, n in scheduled)
    assert result.output_tokens == sum(item["output_tokens"] for item in case["requests"])


@given(SEEDS)
@settings(max_examples=60, deadline=None)
def test_no_step_exceeds_the_limits(seed: int) -> None:
    case = random_case(seed)
    limits = SchedulerSettings(**case["engine"])
    for scheduled, _, free in simulated(case)[0]:
        assert sum(n for _, n in scheduled) <= limits.max_num_batched_tokens
        assert len(scheduled) <= limits.active_seqs_limit
        assert 0 <= free <= limits.usable_blocks


@given(SEEDS)
@settings(max_examples=40, deadline=None)
def test_all_blocks_are_free_again_at_the_end(seed: int) -> None:
    case = random_case(seed)
    case.pop("clients", None)
    last = {"prompt_tokens": 1, "output_tokens": 1, "at_seconds": 1e6}
    steps = simulated(case | {"requests": [*case["requests"], last]})[0]
    assert steps[-1] == [[[len(case["requests"]), 1]], [], case["engine"]["num_gpu_blocks"] - 2]


@given(SEEDS)
@settings(max_examples=40, deadline=None)
def test_a_watermark_smaller_than_one_block_is_none(seed: int) -> None:
    case = random_case(seed)
    without = case | {"engine": case["engine"] | {"watermark": 0.0}}
    tiny = case | {"engine": case["engine"] | {"watermark": 0.9 / case["engine"]["num_gpu_blocks"]}}
    assert simulated(without) == simulated(tiny)


@given(SEEDS)
@settings(max_examples=40, deadline=None)
def test_tracing_changes_no_result(seed: int) -> None:
    case = random_case(seed)
    untraced = simulate(
        SchedulerSettings(**case["engine"]), CostModel(**case["cost"]), requests_of(case), case.get("clients")
    )
    assert simulated(case)[1] == untraced


@given(SEEDS)
@settings(max_examples=40, deadline=None)
def test_how_steps_are_grouped_changes_no_decision_and_no_time(seed: int) -> None:
    # a probe that arrives every few steps, and queues behind all others, cuts the stretches short
    case = random_case(seed)
    case.pop("clients", None)
    case["requests"].sort(key=lambda item: item["at_seconds"])
    case["engine"]["long_prefill_token_threshold"] = 0  # it looks at the number of waiting requests
    steps, result = simulated(case)
    settings_, cost = SchedulerSettings(**case["engine"]), CostModel(**case["cost"])
    patient = Retry(first_token_timeout_seconds=1e9)  # wakes the engine at every arrival; nobody ever gives up
    again: list[Any] = []
    with_wake_ups = simulate(
        settings_,
        cost,
        requests_of(case),
        trace=lambda s: again.append([[list(pair) for pair in s.scheduled], sorted(s.preempted), s.free_blocks]),
        retry=patient,
    )
    assert again == steps
    # the timeline and the sums of floats aside, all figures are the same
    assert replace(with_wake_ups, usage_timeline=(), itl_p50_seconds=0.0, itl_p99_seconds=0.0) == replace(
        result, usage_timeline=(), itl_p50_seconds=0.0, itl_p99_seconds=0.0
    )


@given(SEEDS)
@settings(max_examples=40, deadline=None)
def test_latencies_are_those_that_the_steps_themselves_tell(seed: int) -> None:
    case = random_case(seed)
    case["engine"]["enable_prefix_caching"] = False
    case.pop("clients", None)
    steps, result = simulated(case)
    ttfts, itls, queues = measured(case, steps)
    assert result.ttft_p50_seconds == pytest.approx(naive_percentile(ttfts, 50), rel=1e-12)
    assert result.ttft_p99_seconds == pytest.approx(naive_percentile(ttfts, 99), rel=1e-12)
    assert result.queue_p99_seconds == pytest.approx(naive_percentile(queues, 99), rel=1e-12, abs=1e-12)
    if itls:
        assert result.itl_p50_seconds == pytest.approx(naive_percentile(itls, 50), rel=1e-9)
        assert result.itl_p99_seconds == pytest.approx(naive_percentile(itls, 99), rel=1e-9)
    else:
        assert result.itl_p50_seconds is None


def measured(case: dict[str, Any], steps: list[Any]) -> tuple[list[float], list[float], list[float]]:
    """TTFT, ITL and queue times, told step by step from who was scheduled: no prefix cache, open loop."""
    cost = {name: Decimal(repr(value)) for name, value in case["cost"].items()}
    arrivals = [Decimal(repr(item["at_seconds"])) for item in case["requests"]]
    tokens = [item["prompt_tokens"] for item in case["requests"]]
    computed: defaultdict[int, int] = defaultdict(int)
    token_times: defaultdict[int, list[Decimal]] = defaultdict(list)
    first_start: dict[int, Decimal] = {}
    active: set[int] = set()
    now = Decimal(0)
    for scheduled, preempted, _ in steps:
        for index in preempted:
            computed[index] = 0
        if not active:
            now = max(now, min(at for index, at in enumerate(arrivals) if index not in first_start))
        start, held = now, sum(computed[index] for index, _ in scheduled)
        now += cost["step_seconds"] + sum(n for _, n in scheduled) * cost["per_token_seconds"]
        now += held * cost["per_kv_token_seconds"]
        for index, count in scheduled:
            first_start.setdefault(index, start)
            active.add(index)
            computed[index] += count
            if computed[index] == tokens[index]:
                token_times[index].append(now)
                tokens[index] += 1
                if len(token_times[index]) == case["requests"][index]["output_tokens"]:
                    active.remove(index)
    ttfts = [float(times[0] - arrivals[index]) for index, times in token_times.items()]
    itls = [float(b - a) for times in token_times.values() for a, b in pairwise(times)]
    return ttfts, itls, [float(start - arrivals[index]) for index, start in first_start.items()]


def naive_percentile(values: list[float], percent: int) -> float:
    return sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.sampled_from([0.0, 0.25, 1.0, 0.1]), st.integers(1, 30), st.integers(1, 5)),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 100),
)
def test_a_percentile_of_runs_is_that_of_their_samples(runs: list[tuple[int, float, int, int]], percent: int) -> None:
    samples = Samples()
    plain: list[float] = []
    for first, increment, count, weight in runs:
        samples.add_run(first=float(first), increment=increment, count=count, weight=weight)
        plain += [first + i * increment for i in range(count) for _ in range(weight)]
    assert samples.nearest_rank(percent) == naive_percentile(plain, percent)


def test_many_runs_have_exact_percentiles_too() -> None:
    samples = Samples()
    for i in range(5000):
        samples.add_run(first=float(i * 7919 % 5000), increment=0.5, count=2, weight=1 + i % 3)
    plain = [i * 7919 % 5000 + j * 0.5 for i in range(5000) for j in range(2) for _ in range(1 + i % 3)]
    assert [samples.nearest_rank(p) for p in (1, 50, 99, 100)] == [naive_percentile(plain, p) for p in (1, 50, 99, 100)]


# ---- measures of the whole run --------------------------------------------------------------------------------------


def test_the_timeline_reaches_the_peak_and_covers_the_run() -> None:
    result = simulated(closed_loop_case(max_num_seqs=32))[1]
    assert max(result.usage_timeline) == result.peak_usage_ratio == 1.0
    assert len(result.usage_timeline) <= 256
    assert len(result.usage_timeline) == pytest.approx(
        result.makespan_seconds / result.usage_timeline_step_seconds, abs=1
    )


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda: engine(num_gpu_blocks=1), "num_gpu_blocks is 1"),
        (lambda: engine(watermark=1.0), "0 <= watermark < 1"),
        (lambda: engine(max_num_seqs=4096), "max_num_batched_tokens (2048) is smaller than max_num_seqs (4096)"),
        (lambda: engine(max_num_active_seqs=9), "max_num_active_seqs (9) is greater than max_num_seqs (8)"),
        (lambda: engine(long_prefill_token_threshold=5000), "greater than max_model_len (4096)"),
        (lambda: engine(groups=(KvGroup(block_size=32),)), "must have the block_size of the engine, 16"),
        (lambda: KvGroup(block_size=16, window_tokens=9, max_blocks=2), "both window_tokens (9) and max_blocks (2)"),
        (lambda: KvGroup(block_size=16, max_blocks=0), "max_blocks is 0"),
        (lambda: CostModel(step_seconds=float("nan")), "step_seconds is nan"),
        (lambda: request(0, 1), "prompt_tokens is 0"),
        (lambda: request(10, 1, prefix="p", prefix_tokens=11), "prefix_tokens (11) is greater than prompt_tokens (10)"),
        (lambda: request(10, 1, prefix_tokens=5), "no prefix is named"),
        (lambda: Retry(first_token_timeout_seconds=0), "first_token_timeout_seconds is 0"),
        (lambda: Retry(first_token_timeout_seconds=math.inf), "first_token_timeout_seconds is inf"),
        (lambda: simulate(engine(), COST, []), "no requests"),
        (lambda: simulate(engine(), COST, [request(1, 1)], clients=0), "clients is 0"),
        (lambda: simulate(engine(), COST, [request(4000, 97)]), "more than max_model_len 4096: vLLM rejects it"),
        (lambda: simulate(engine(), COST, [request(1600, 2)]), "needs 101 blocks"),
    ],
)
def test_what_vllm_would_refuse_is_refused_with_the_value(run: Any, text: str) -> None:
    with pytest.raises(SettingError) as refused:
        run()
    assert text in str(refused.value)


def test_the_largest_request_that_fits_runs() -> None:
    assert simulate(engine(), COST, [request(1600, 1)]).peak_usage_ratio == 1.0
