"""How many blocks requests hold, and how many requests a pool carries."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import LENGTH_BOUNDS, capture, engine_page, histogram, window_of

from kvwatch.capacity import EngineFacts, live_capacity
from kvwatch.errors import NoData
from kvwatch.footprint import Footprint, footprint
from kvwatch.window import Window

PROBABILITY = 0.95


def blocks_of_16(tokens: float) -> float:
    return math.ceil(tokens / 16)


def no_rule(_tokens: float) -> None:
    return None


def lengths(name: str, values: list[float]) -> str:
    counts = [sum(value <= bound for value in values) for bound in (*LENGTH_BOUNDS, math.inf)]
    return histogram(f"vllm:request_{name}_tokens", counts, LENGTH_BOUNDS, sum(values), model_name="m", engine="0")


def finished(
    prompts: list[float], outputs: list[float], *, running: int = 0, usage: float = 0.0, extra: str = ""
) -> Window:
    """A window in which requests of these lengths finished."""
    pages = [
        engine_page(
            running=running,
            usage=usage,
            without=["request_prompt_tokens", "request_generation_tokens"],
            extra=f"{lengths('prompt', p)}\n{lengths('generation', o)}\n{extra}",
        )
        for p, o in (([], []), (prompts, outputs))
    ]
    return window_of(pages)


def of(window: Window, *, usable_blocks: int = 1000, max_model_len: int | None = 4096) -> Footprint:
    return footprint(window, blocks_for=blocks_of_16, usable_blocks=usable_blocks, max_model_len=max_model_len)


def recorded(name: str) -> tuple[Footprint, int]:
    seen = capture(name)
    capacity = live_capacity(seen.latest.cache_config, EngineFacts())
    assert capacity.usable_blocks is not None
    size = footprint(
        seen,
        blocks_for=capacity.blocks_for,
        usable_blocks=capacity.usable_blocks,
        max_model_len=capacity.max_model_len,
    )
    return size, capacity.usable_blocks


# Against what is known -----------------------------------------------------------------------------------------------


def test_the_thrashing_engine_carries_17() -> None:
    """The real engine preempted 50 times at 32, 41 at 20, once at 17, never at 16 (84 requests of this workload)."""
    size, usable = recorded("thrash")
    assert size.carried_by(usable, PROBABILITY) == 17
    assert size.source == "window"
    assert (round(size.prompt_tokens_mean), round(size.output_tokens_mean)) == (1154, 855)


def test_requests_that_share_a_prefix_are_not_counted_as_if_they_did_not() -> None:
    """8 requests of 1,580 tokens in blocks of 128 were seen to hold 27 blocks together, not 8 x 13."""
    size, usable = recorded("prefix")
    assert 3 < size.live_blocks_mean < 4
    assert size.carried_by(usable, PROBABILITY) > 50


def test_one_length_has_the_footprint_of_the_formula() -> None:
    size = of(finished([800.0] * 50, [320.0] * 50))
    # bucket ends hide that all are alike, the exact means do not: 800 + 320/2 = 960 tokens and half a block
    assert size.live_blocks_mean == pytest.approx(960 / 16 + 0.5, rel=0.02)


def test_a_mix_of_lengths_has_the_footprint_that_a_running_engine_shows() -> None:
    """Against a simulation: requests in flight, seen at random moments."""
    rng = random.Random(7)
    prompts = [float(rng.randint(100, 2000)) for _ in range(400)]
    outputs = [float(rng.randint(20, 900)) for _ in range(400)]
    held = [
        blocks_of_16(prompt + rng.random() * output)
        for prompt, output in zip(
            rng.choices(prompts, k=20000), rng.choices(outputs, weights=outputs, k=20000), strict=True
        )
    ]
    mean = math.fsum(held) / len(held)
    deviation = math.sqrt(math.fsum((h - mean) ** 2 for h in held) / len(held))
    size = of(finished(prompts, outputs))
    assert size.live_blocks_mean == pytest.approx(mean, rel=0.03)
    assert size.live_blocks_deviation == pytest.approx(deviation, rel=0.08)


def test_what_running_requests_hold_raises_the_mean() -> None:
    lengths_only = of(finished([100.0] * 20, [100.0] * 20))
    seen = of(finished([100.0] * 20, [100.0] * 20, running=10, usage=0.5))
    assert lengths_only.live_blocks_mean < 15
    assert seen.live_blocks_mean == pytest.approx(50)


def test_young_requests_do_not_lower_the_mean() -> None:
    lengths_only = of(finished([500.0] * 20, [100.0] * 20))
    assert of(finished([500.0] * 20, [100.0] * 20, running=50, usage=0.05)) == lengths_only


def test_a_layout_with_a_fixed_cost_keeps_it() -> None:
    seen = finished([500.0] * 20, [100.0] * 20)
    size = footprint(seen, blocks_for=lambda tokens: 90 + tokens / 16, usable_blocks=1000, max_model_len=4096)
    assert size.live_blocks_mean == pytest.approx(90 + 550 / 16, rel=0.02)


def test_a_layout_that_stops_growing_is_bounded() -> None:
    seen = finished([1500.0] * 20, [500.0] * 20)
    size = footprint(seen, blocks_for=lambda tokens: min(64, tokens / 16), usable_blocks=1000, max_model_len=4096)
    assert (size.live_blocks_mean, size.live_blocks_deviation, size.peak_blocks_p95) == (64, 0, 64)


def test_no_request_is_longer_than_the_engine_allows() -> None:
    assert of(finished([1900.0] * 20, [1900.0] * 20), max_model_len=2000).peak_blocks_p95 == 125


# Where lengths come from ---------------------------------------------------------------------------------------------


def test_a_few_finished_requests_are_too_few_and_the_engines_life_counts() -> None:
    pages = [engine_page(finished=100), engine_page(finished=103)]
    size = of(window_of(pages))
    assert (size.source, size.observations) == ("lifetime", 103)


def test_a_single_page_has_the_engines_life() -> None:
    assert of(window_of([engine_page(finished=100)])).source == "lifetime"


@pytest.mark.parametrize(
    ("page", "missing"),
    [
        (engine_page(), "vllm:request_prompt_tokens has no observation yet"),
        (engine_page(without=["prompt_tokens"]), "vllm:request_prompt_tokens is not exposed"),
        (engine_page(finished=9, without=["generation"]), "vllm:request_generation_tokens is not exposed"),
    ],
)
def test_missing_lengths_are_named(page: str, missing: str) -> None:
    with pytest.raises(NoData) as refused:
        of(window_of([page, page]))
    assert str(refused.value) == missing


def test_a_model_without_a_rule_for_its_blocks_is_refused() -> None:
    with pytest.raises(NoData, match="give --model and its flags"):
        footprint(window_of([engine_page(finished=9)]), blocks_for=no_rule, usable_blocks=9, max_model_len=None)


# Laws ----------------------------------------------------------------------------------------------------------------

several = st.lists(st.integers(1, 2000).map(float), min_size=10, max_size=40)


@settings(max_examples=40)
@given(several, several)
def test_means_are_those_of_the_histograms(prompts: list[float], outputs: list[float]) -> None:
    outputs = [outputs[i % len(outputs)] for i in range(len(prompts))]
    size = of(finished(prompts, outputs))
    assert size.prompt_tokens_mean == pytest.approx(math.fsum(prompts) / len(prompts), rel=0.01, abs=2)
    assert size.output_tokens_mean == pytest.approx(math.fsum(outputs) / len(outputs), rel=0.01, abs=2)


footprints = st.builds(
    Footprint,
    live_blocks_mean=st.floats(0.5, 5000),
    live_blocks_deviation=st.floats(0, 5000),
    peak_blocks_p95=st.just(1.0),
    prompt_tokens_mean=st.just(1.0),
    output_tokens_mean=st.just(1.0),
    observations=st.just(1.0),
    source=st.just("window"),
)
pools = st.integers(1, 200_000)


@given(footprints, pools)
def test_what_a_pool_carries_fits_and_one_more_does_not(size: Footprint, usable: int) -> None:
    carried = size.carried_by(usable, PROBABILITY)
    assert size.demand_blocks(carried, PROBABILITY) <= usable < size.demand_blocks(carried + 1, PROBABILITY)


@given(footprints, pools, pools)
def test_a_larger_pool_carries_as_many_or_more(size: Footprint, one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert size.carried_by(small, PROBABILITY) <= size.carried_by(large, PROBABILITY)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 400), min_size=10, max_size=20), st.lists(st.integers(1, 400), min_size=20, max_size=20))
def test_longer_requests_are_carried_in_smaller_numbers(prompts: list[int], outputs: list[int]) -> None:
    carried = [
        of(finished([float(f * p) for p in prompts], [float(f * o) for o in outputs[: len(prompts)]])).carried_by(
            4000, PROBABILITY
        )
        for f in (1, 2, 5)
    ]
    assert all(longer <= shorter for shorter, longer in pairwise(carried))
