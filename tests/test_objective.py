from dataclasses import replace
from typing import Any

import pytest
from simulator_cases import closed_loop_case, requests_of

from kvwatch.errors import SettingError
from kvwatch.objective import Option, choose
from kvwatch.simulation import CostModel, SchedulerSettings
from kvwatch.simulator import simulate

NOW = SchedulerSettings(num_gpu_blocks=2048, max_num_seqs=32, enable_prefix_caching=False)
BASE = simulate(NOW, CostModel(step_seconds=1.0), requests_of(closed_loop_case())[:1])


def option(
    seats: int = 32, *, watermark: float = 0.0, throughput: float, preemptions: int = 0, ttft: float | None = 1.0
) -> Option:
    """An option of 100 requests with these results."""
    result = replace(
        BASE,
        requests=100,
        preemptions=preemptions,
        preemptions_per_request=preemptions / 100,
        output_tokens_per_second=throughput,
        ttft_p99_seconds=ttft,
    )
    return Option(settings=replace(NOW, max_num_seqs=seats, watermark=watermark), result=result)


def test_balanced_takes_the_fewest_preemptions_among_those_with_97_percent_of_the_best_throughput() -> None:
    thrashing = option(throughput=1000, preemptions=51, ttft=1.0)
    calmer = option(watermark=0.05, throughput=970, preemptions=14, ttft=9.0)
    slow = option(16, throughput=969, preemptions=0, ttft=0.5)
    assert choose([thrashing, calmer, slow], "balanced", NOW) is calmer


def test_balanced_breaks_ties_by_ttft_then_by_the_smaller_change() -> None:
    late = option(throughput=1000, ttft=3.0)
    two_changes = option(20, watermark=0.05, throughput=1000, ttft=2.0)
    far = option(16, throughput=1000, ttft=2.0)
    near = option(24, throughput=1000, ttft=2.0)
    assert choose([late, two_changes, far, near], "balanced", NOW) is near


def test_stability_takes_the_highest_throughput_with_at_most_two_preemptions_per_hundred_requests() -> None:
    thrashing = option(throughput=1000, preemptions=3)
    calm = option(17, throughput=900, preemptions=2)
    calmest = option(16, throughput=850)
    assert choose([thrashing, calm, calmest], "stability", NOW) is calm


def test_stability_takes_the_calmest_if_none_is_calm() -> None:
    options = [option(throughput=1000, preemptions=30), option(24, throughput=900, preemptions=9)]
    assert choose(options, "stability", NOW) is options[1]


def test_latency_takes_the_lowest_ttft_among_the_fast() -> None:
    options = [
        option(throughput=1000, ttft=5.0),
        option(28, throughput=980, ttft=4.0, preemptions=40),
        option(8, throughput=500, ttft=0.1),
    ]
    assert choose(options, "latency", NOW) is options[1]


def test_no_first_token_at_all_is_worst() -> None:
    options = [option(throughput=0, ttft=None), option(16, throughput=0, ttft=100.0)]
    assert choose(options, "latency", NOW) is options[1]


def test_nothing_to_choose_from_is_an_error() -> None:
    with pytest.raises(SettingError, match="no settings to choose from"):
        choose([], "balanced", NOW)


def test_a_thrashing_engine_is_better_off_with_a_watermark_than_with_fewer_seats() -> None:
    case: dict[str, Any] = closed_loop_case()
    now = SchedulerSettings(**case["engine"], max_num_seqs=32)
    options = [
        Option(settings=tried, result=simulate(tried, CostModel(**case["cost"]), requests_of(case), case["clients"]))
        for tried in (replace(now, max_num_seqs=seats, watermark=mark) for seats in (32, 16) for mark in (0.0, 0.05))
    ]
    assert choose(options, "balanced", now).settings == replace(now, watermark=0.05)
    assert choose(options, "stability", now).settings == replace(now, max_num_seqs=16)
