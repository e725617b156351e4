"""From pages to the load that is offered: what the reconstruction gets right, and what it says it assumed."""

import math
import random
from dataclasses import replace
from pathlib import Path

import budget_cases
import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from pages import without

from kvwatch.budget import predict
from kvwatch.capacity import EngineFacts
from kvwatch.checks.check import EngineView, engine_view
from kvwatch.engine import EngineConfig
from kvwatch.errors import NoData
from kvwatch.lengths import length_curve
from kvwatch.settings_now import settings_now
from kvwatch.simulation import CostModel, Request, SchedulerSettings
from kvwatch.snapshot import CacheConfig, Histogram
from kvwatch.sources import parse
from kvwatch.sources.gather import gather
from kvwatch.vllm_metrics import PREFIX_CACHE_HITS, PREFIX_CACHE_QUERIES, REQUEST_PREFILL_KV_COMPUTED_TOKENS
from kvwatch.window import Window, windows
from kvwatch.workload import OfferedLoad, longest_request, offered_load

CAPTURES = Path(__file__).parent / "data" / "captures"
POOL = SchedulerSettings(num_gpu_blocks=2048, block_size=16, max_model_len=8192, max_num_seqs=256)
COST = CostModel(step_seconds=0.02, per_token_seconds=6e-5)


def view_of(window: Window, **facts: object) -> EngineView:
    return engine_view(window, EngineFacts(**facts))  # type: ignore[arg-type]


def capture(name: str) -> Window:
    found = gather((parse(str(CAPTURES / name)),), window_seconds=0, headers={}, progress=lambda _now, _all: None)
    return windows(found.snapshots)[0]


def assumed(load: OfferedLoad) -> dict[str, tuple[object, str]]:
    return {entry.name: (entry.value, entry.origin) for entry in load.assumptions}


def played(draw: "list[Request]", settings: SchedulerSettings = POOL, clients: int | None = 28) -> OfferedLoad:
    return offered_load(view_of(FakeEngine(settings, COST, draw, clients=clients).window()))


def mean(values: list[int]) -> float:
    return math.fsum(values) / len(values)


def test_the_thrash_capture_gives_the_load_that_was_sent() -> None:
    load = offered_load(view_of(capture("thrash")))
    requests = load.requests(seed=1)
    # 28 clients sent prompts of 900 to 1,500 tokens and asked for 600 to 1,200; 47 had started, 30 had finished
    assert load.clients == 28
    assert mean([r.prompt_tokens for r in requests]) == pytest.approx(1200, rel=0.03)
    assert mean([r.output_tokens for r in requests]) == pytest.approx(900, rel=0.05)
    assert min(r.prompt_tokens for r in requests) > 700
    assert max(r.prompt_tokens for r in requests) < 1700
    assert min(r.output_tokens for r in requests) > 500
    assert max(r.output_tokens for r in requests) < 1300


def test_the_thrash_capture_gives_the_pool_and_says_what_is_assumed() -> None:
    load = offered_load(view_of(capture("thrash")))
    told = assumed(load)
    assert told["num_gpu_blocks"] == (256, "observed")
    assert told["tokens_per_block"] == (128, "derived")
    assert told["max_num_seqs"] == (256, "assumed")  # 23 ran at most, so the true 32 was never reached
    assert told["max_num_batched_tokens"] == (2048, "assumed")
    assert told["watermark"] == (0.0, "assumed")
    assert not load.max_num_seqs_known


def test_what_is_given_is_not_assumed() -> None:
    load = offered_load(view_of(capture("thrash"), max_num_seqs=32, watermark=0.05, max_num_batched_tokens=4096))
    told = assumed(load)
    assert told["max_num_seqs"] == (32, "given")
    assert told["watermark"] == (0.05, "given")
    assert told["max_num_batched_tokens"] == (4096, "given")
    assert (load.settings.max_num_seqs, load.settings.watermark) == (32, 0.05)


def test_a_shared_prefix_is_found() -> None:
    load = offered_load(view_of(capture("prefix")))
    # 8 clients shared 1,500 characters of 1,580; a block has 128 tokens, so 11 blocks can be hit
    assert load.prefix_tokens in {1408, 1536}
    assert load.prefixes <= 2


def test_without_the_metrics_of_the_prefix_cache_it_is_not_known_whether_requests_share_one() -> None:
    bare = without(capture("prefix"), PREFIX_CACHE_HITS, PREFIX_CACHE_QUERIES, REQUEST_PREFILL_KV_COMPUTED_TOKENS)
    load = offered_load(view_of(bare))
    assert not load.prefixes_known
    assert assumed(load)["prefix_tokens"] == (0, "assumed")
    assert assumed(load)["prefixes"] == (0, "assumed")


def test_a_pinned_batch_with_room_in_the_pool_gives_max_num_seqs() -> None:
    rng = random.Random(3)
    requests = [Request(prompt_tokens=rng.randint(100, 300), output_tokens=rng.randint(200, 400)) for _ in range(200)]
    window = FakeEngine(replace(POOL, max_num_seqs=12), COST, requests, clients=40).window()
    found = settings_now(view_of(window))
    assert found.settings.max_num_seqs == 12
    assert [a.origin for a in found.assumptions if a.name == "max_num_seqs"] == ["derived"]


@pytest.mark.parametrize("clients", [6, 28, 60])
def test_a_closed_loop_is_told_by_its_steady_number_in_flight(clients: int) -> None:
    rng = random.Random(clients)
    requests = [Request(prompt_tokens=rng.randint(300, 900), output_tokens=rng.randint(200, 600)) for _ in range(240)]
    assert played(requests, clients=clients).clients == clients


@pytest.mark.parametrize("seconds_between", [0.35, 0.7])
def test_an_open_loop_repeats_the_arrivals_that_the_pages_show(seconds_between: float) -> None:
    rng = random.Random(5)
    at, requests = 0.0, []
    for _ in range(240):
        at += rng.expovariate(1 / seconds_between)
        requests.append(Request(prompt_tokens=400, output_tokens=rng.randint(50, 500), at_seconds=round(at, 3)))
    load = played(requests, clients=None)
    assert load.clients is None
    drawn = sorted(r.at_seconds for r in load.requests(seed=0))
    assert len(drawn) == pytest.approx(240, abs=5)
    # the arrivals of any two pages' interval are those of the load, so no time is off by more than an interval
    assert max(abs(ours - theirs.at_seconds) for ours, theirs in zip(drawn, requests, strict=False)) < 5


def test_of_more_arrivals_than_are_wanted_the_first_are_drawn() -> None:
    """A counter may jump by more than memory holds."""
    rng = random.Random(5)
    at = [rng.uniform(0, 100) for _ in range(240)]
    load = played(
        [Request(prompt_tokens=400, output_tokens=200, at_seconds=round(t, 3)) for t in sorted(at)], clients=None
    )
    many = replace(load, arrivals=tuple(replace(span, requests=span.requests * 10**12) for span in load.arrivals[1:]))
    many = replace(many, arrivals=(load.arrivals[0], *many.arrivals))
    drawn = [request.at_seconds for request in many.requests(seed=0, count=200)]
    assert len(drawn) == 200
    assert max(drawn) < 1e-6


def test_long_prompts_with_long_answers_are_told_from_long_prompts_with_short_ones() -> None:
    rng = random.Random(7)

    def load(*, together: bool) -> OfferedLoad:
        requests = []
        for _ in range(400):
            is_long = rng.random() < 0.5
            prompt = rng.randint(1500, 3000) if is_long else rng.randint(50, 200)
            answer = rng.randint(400, 800) if is_long == together else rng.randint(20, 100)
            requests.append(Request(prompt_tokens=prompt, output_tokens=answer))
        return played(requests, settings=replace(POOL, num_gpu_blocks=8000), clients=20)

    assert load(together=True).correlation > 0.5
    assert load(together=False).correlation < -0.5


def test_drawn_requests_have_the_lengths_of_the_histogram_whatever_the_seed() -> None:
    load = offered_load(view_of(capture("thrash")))
    first, second = load.requests(seed=1), load.requests(seed=2)
    assert first != second
    assert first == load.requests(seed=1)
    assert sorted(r.prompt_tokens for r in first) == sorted(r.prompt_tokens for r in second)
    assert sorted(r.output_tokens for r in first) == sorted(r.output_tokens for r in second)


def test_no_drawn_request_is_longer_than_the_pool_or_the_context() -> None:
    load = offered_load(view_of(capture("thrash")))
    small = replace(load, settings=replace(load.settings, num_gpu_blocks=12))
    assert longest_request(small.settings) == 11 * 128 + 1
    assert max(r.prompt_tokens + r.output_tokens for r in small.requests(seed=0)) <= 11 * 128 + 1


def test_a_page_without_a_pool_is_refused_with_what_is_missing() -> None:
    window = capture("thrash")
    config = replace(window.latest.cache_config, num_gpu_blocks=None)
    bare = Window(tuple(replace(snapshot, cache_config=config) for snapshot in window.snapshots))
    with pytest.raises(NoData, match="num_gpu_blocks"):
        offered_load(view_of(bare))


def test_a_model_with_several_block_tables_needs_a_budget() -> None:
    window = capture("thrash")
    # 5.5 requests of 4,096 tokens in 256 blocks of 128: no whole number of tokens per block explains it
    odd = replace(window.latest.cache_config, kv_cache_max_concurrency=5.5, kv_cache_size_tokens=22528)
    hybrid = Window(tuple(replace(snapshot, cache_config=odd) for snapshot in window.snapshots))
    with pytest.raises(NoData, match="give --model"):
        offered_load(view_of(hybrid))


BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, math.inf)


@given(st.lists(st.integers(1, 8000), min_size=1, max_size=200))
def test_a_curve_keeps_the_mean_and_the_bucket_of_every_request(lengths: list[int]) -> None:
    counts = tuple(float(sum(length <= bound for length in lengths)) for bound in BOUNDS)
    histogram = Histogram(bounds=BOUNDS, counts=counts, sum=float(sum(lengths)), count=float(len(lengths)))
    curve = length_curve(histogram, longest=8192)
    drawn = curve.sample(4000)
    assert drawn == sorted(drawn)
    assert mean([round(d * 1000) for d in drawn]) / 1000 == pytest.approx(mean(lengths), rel=0.02, abs=0.6)
    for bound, count in zip(BOUNDS[:-1], counts, strict=False):
        share = sum(length <= bound + 1e-6 for length in drawn) / len(drawn)
        assert share >= count / len(lengths) - 0.001


@pytest.mark.parametrize("spread", [(900, 1500), (600, 1200), (100, 3000)])
def test_even_lengths_across_wide_buckets_are_reconstructed_as_even(spread: tuple[int, int]) -> None:
    rng = random.Random(1)
    lengths = sorted(rng.randint(*spread) for _ in range(2000))
    counts = tuple(float(sum(length <= bound for length in lengths)) for bound in BOUNDS)
    histogram = Histogram(bounds=BOUNDS, counts=counts, sum=float(sum(lengths)), count=2000.0)
    drawn = length_curve(histogram).sample(2000)
    apart = mean([round(abs(ours - theirs)) for ours, theirs in zip(drawn, lengths, strict=True)])
    assert apart < 0.02 * mean(lengths)


@pytest.mark.parametrize("name", ["Gemma-3-27B(text)", "gpt-oss-20b", "Qwen3-Next-80B-A3B", "Llama-3.1-8B"])
def test_a_budget_gives_the_block_tables_of_a_model(name: str) -> None:
    """A long request holds in the simulator what the budget says it holds, within a block per window."""
    model = budget_cases.model(name)
    budget = predict(model, EngineConfig(max_model_len=8192), 40 * budget_cases.GIB)
    window = capture("thrash")
    config = CacheConfig(num_gpu_blocks=budget.num_gpu_blocks, block_size=budget.block_size_tokens)
    window = Window(tuple(replace(snapshot, cache_config=config) for snapshot in window.snapshots))
    found = settings_now(view_of(window, budget=budget, max_model_len=8192)).settings
    assert len(found.kv_groups) == len(budget.groups)
    for tokens in (100, 1000, 8000):
        held, planned = found.blocks(tokens), budget.blocks_for_request(tokens)
        in_flight = 2 * -(-budget.engine.in_flight_tokens // budget.block_size_tokens)
        assert held <= planned + 1
        assert held >= planned - len(budget.groups) * (1 + in_flight)


def test_a_bucket_of_next_to_no_requests_has_a_density() -> None:
    counts = (1e-300, 5.0, 10.0, 10.0 + 1e-300)
    curve = length_curve(Histogram(bounds=(10.0, 20.0, 50.0, math.inf), counts=counts, sum=250.0, count=10.0))
    assert curve.moment(1) == pytest.approx(25.0, rel=0.02)
