"""What each check says of pages that scenario files do not show: missing, impossible and single ones."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pages import EXPOSITION, capture, engine_page, read, window_of

from kvwatch import checks
from kvwatch import vllm_metrics as vm
from kvwatch.capacity import EngineFacts
from kvwatch.checks.check import engine_view
from kvwatch.errors import ExpositionError
from kvwatch.finding import Finding, Status
from kvwatch.thresholds import DEFAULTS
from kvwatch.window import Window, windows

OK, WARNING, CRITICAL, UNKNOWN = Status.OK, Status.WARNING, Status.CRITICAL, Status.UNKNOWN
NOTHING = EngineFacts()


def judged(window: Window, facts: EngineFacts = NOTHING) -> dict[str, Finding]:
    view = engine_view(window, facts)
    return {finding.check: finding for finding in checks.evaluate_all(view, DEFAULTS)}


def of(check: str, window: Window, facts: EngineFacts = NOTHING) -> tuple[Status, str]:
    finding = judged(window, facts)[check]
    return finding.status, finding.summary


def steady(count: int = 8, every_seconds: float = 10.0, **facts: Any) -> Window:
    """An engine that works: 50 tokens and 2 finished requests between two pages."""
    return window_of(
        [engine_page(tokens=50 * n, finished=2 * n, **facts) for n in range(count)],
        every_seconds=every_seconds,
    )


# Recorded engines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["healthy", "prefix"])
def test_nothing_is_found_on_engines_that_were_fine(name: str) -> None:
    assert {f.status for f in judged(capture(name)).values()} <= {OK, UNKNOWN}


def test_the_thrashing_engine_is_found_thrashing() -> None:
    found = judged(capture("thrash"))
    assert found["preemptions_sustained"].status is CRITICAL
    assert found["preemptions_sustained"].summary == "0.66 preemptions per second, 0.83 per finished request"
    bad = {check for check, f in found.items() if f.status in {WARNING, CRITICAL}}
    assert {"kv_cache_saturated", "requests_queueing", "concurrency_oversubscribed"} < bad
    assert {found[check].status for check in ("metrics_missing", "engine_stalled", "sequence_cap_reached")} == {OK}


@pytest.mark.parametrize("page", sorted(EXPOSITION.glob("*.prom")), ids=lambda path: path.stem)
def test_every_recorded_page_is_judged_by_every_check(page: Path) -> None:
    for window in windows(read(page.read_text())):
        found = judged(window)
        assert list(found) == [check.id for check in checks.ALL]
        assert all(f.summary for f in found.values())
        # one page shows no rate, so nothing that needs one is found fine or bad
        assert found["preemptions_sustained"].status is UNKNOWN


# metrics_missing -----------------------------------------------------------------------------------------------------


def test_missing_metrics_are_named() -> None:
    status, summary = of("metrics_missing", window_of([engine_page(without=["preemptions", "waiting"])]))
    assert status is WARNING
    assert "vllm:num_requests_waiting, vllm:num_preemptions_total" in summary


def test_a_usage_that_cannot_be_is_missing() -> None:
    assert "vllm:kv_cache_usage_perc" in of("metrics_missing", window_of([engine_page(usage=1.3)]))[1]


# engine_stalled ------------------------------------------------------------------------------------------------------


def test_an_engine_that_holds_requests_and_does_nothing_hangs() -> None:
    stuck = [engine_page(running=2, waiting=1, usage=0.5, tokens=9)] * 8
    assert of("engine_stalled", window_of(stuck)) == (
        CRITICAL,
        "no token in 70 s with 2 running and 1 waiting: the engine hangs",
    )
    status, summary = of("engine_stalled", window_of([engine_page(waiting=1, tokens=9)] * 8))
    assert (status, summary.split(": ")[1]) == (CRITICAL, "the scheduler is deadlocked")


def test_a_long_prefill_is_no_stall() -> None:
    """Tokens of a prompt are counted when all of it is computed; 100,000 take longer than a minute on many GPUs."""
    pages = [engine_page(running=1, usage=0.1 + 0.05 * n, tokens=9) for n in range(8)]
    assert of("engine_stalled", window_of(pages))[0] is OK


def test_too_short_a_look_does_not_tell_a_stall() -> None:
    status, summary = of("engine_stalled", window_of([engine_page(running=1)] * 3))
    assert status is UNKNOWN
    assert "give --window 70s" in summary


def test_a_sleeping_engine_is_not_stalled() -> None:
    asleep = 'vllm:engine_sleep_state{model_name="m",engine="0",sleep_state="awake"} 0'
    assert of("engine_stalled", window_of([engine_page(running=1, extra=asleep)] * 8))[0] is OK


# preemptions_sustained -----------------------------------------------------------------------------------------------


def preempting(per_page: int, finished_per_page: int) -> Window:
    return window_of([engine_page(preemptions=1000 + per_page * n, finished=finished_per_page * n) for n in range(6)])


@pytest.mark.parametrize(
    ("per_page", "finished", "status"),
    [(0, 10, OK), (1, 100, OK), (1, 40, WARNING), (1, 10, CRITICAL), (1, 0, CRITICAL), (5, 10, CRITICAL)],
)
def test_preemptions_are_judged_by_finished_request(per_page: int, finished: int, status: Status) -> None:
    assert of("preemptions_sustained", preempting(per_page, finished))[0] is status


def test_a_lifetime_of_preemptions_is_history() -> None:
    status, summary = of("preemptions_sustained", preempting(0, 10))
    assert (status, summary) == (OK, "no preemption in the window (1,000 since the engine started are history)")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), min_size=2, max_size=10), st.booleans())
@settings(max_examples=50)
def test_restarts_never_raise_the_alert(steps: list[tuple[int, int]], times_known: bool) -> None:
    """An engine that preempts nobody restarts at some pages; its lifetime counters are large before."""
    preemptions, finished, started, pages = 900, 9000, 1.7e9, []
    for restart, more in steps:
        if restart == 0:
            preemptions, finished, started = 0, 0, started + 60
        finished += more
        pages.append(engine_page(preemptions=preemptions, finished=finished, started=started if times_known else None))
    assert of("preemptions_sustained", window_of(pages))[0] in {OK, UNKNOWN}


# Queues --------------------------------------------------------------------------------------------------------------


def test_a_full_pool_without_a_queue_is_what_vllm_aims_for() -> None:
    assert of("kv_cache_saturated", steady(running=5, usage=1.0))[0] is OK
    assert of("kv_cache_saturated", steady(running=5, usage=1.0, waiting=2))[0] is WARNING


def test_a_full_pool_with_a_queue_on_one_page_may_be_gone_on_the_next() -> None:
    assert of("kv_cache_saturated", window_of([engine_page(usage=1.0, waiting=2)]))[0] is UNKNOWN


@pytest.mark.parametrize("every_seconds", [15, 30, 60, 120])
def test_what_lasts_is_seen_whatever_the_scrape_interval(every_seconds: float) -> None:
    window = steady(6, every_seconds=every_seconds, running=5, usage=1.0, waiting=2, queued_seconds=4)
    assert of("kv_cache_saturated", window)[0] is WARNING
    assert of("requests_queueing", window)[0] is WARNING


def test_a_queue_of_short_waits_is_no_finding() -> None:
    assert of("requests_queueing", steady(running=5, waiting=2, queued_seconds=0.2))[0] is OK


def test_a_queue_behind_which_nothing_finishes_is_one() -> None:
    status, summary = of("requests_queueing", window_of([engine_page(running=4, waiting=3, usage=0.95)] * 4))
    assert (status, summary) == (
        WARNING,
        "at least 3 requests waited all the time and none finished (the KV pool)",
    )


def test_after_a_restart_it_is_not_known_whether_a_request_finished() -> None:
    """The only interval is the one of the restart."""
    pages = [engine_page(waiting=3, finished=50), engine_page(waiting=3, finished=1, started=1.8e9)]
    status, summary = of("requests_queueing", window_of(pages))
    assert status is UNKNOWN
    assert "the engine restarted" in summary


@pytest.mark.parametrize("check", ["kv_cache_saturated", "requests_queueing"])
def test_an_idle_engine_that_restarted_does_not_hide_that_it_is_full_now(check: str) -> None:
    """The pages of the idle one are inside the span that a condition must last for; the alert waits until they left."""
    idle = engine_page(finished=50)
    full = [
        engine_page(running=20, waiting=5, usage=0.99, finished=n, queued_seconds=9, started=1.8e9) for n in range(3)
    ]
    assert of(check, window_of([idle, *full], every_seconds=5))[0] is WARNING


def test_an_engine_that_was_full_before_its_restart_is_not_found_full() -> None:
    full = engine_page(running=20, waiting=5, usage=1.0, finished=50)
    assert of("kv_cache_saturated", window_of([full, full, engine_page(usage=0.9, waiting=1, started=1.8e9)]))[0] is OK


def test_one_page_since_a_restart_does_not_show_what_lasts() -> None:
    idle, full = engine_page(finished=50), engine_page(running=20, waiting=5, usage=1.0, started=1.8e9)
    found = judged(window_of([idle, idle, full]))
    for check in ("kv_cache_saturated", "requests_queueing", "long_context_monopoly", "engine_stalled"):
        assert found[check].status in {OK, UNKNOWN}
    assert found["kv_cache_saturated"].summary == (
        "100% of the pool held, 5 requests waiting on the only page since the engine restarted: ask again when there "
        "are more"
    )
    assert found["engine_stalled"].summary == "the engine restarted; a rate needs two pages since then"


def test_a_trend_is_drawn_through_the_pages_of_one_process() -> None:
    """The pool of the first process was nearly full; that of the second one fills, from nothing."""
    before = [engine_page(running=5, usage=0.9)] * 6
    after = [engine_page(running=5, usage=0.6 + 0.04 * n, started=1.8e9) for n in range(8)]
    assert of("kv_cache_filling", window_of([*before, *after]))[0] is WARNING


def test_the_cap_of_sequences_is_taken_from_a_flag_from_nim_or_inferred() -> None:
    queue: dict[str, Any] = {"running": 8, "waiting": 3, "usage": 0.3}
    inferred = steady(**queue)
    assert "8 sequences (inferred)" in of("sequence_cap_reached", inferred)[1]
    assert "cap of 8 sequences:" in of("sequence_cap_reached", inferred, EngineFacts(max_num_seqs=8))[1]
    assert of("sequence_cap_reached", inferred, EngineFacts(max_num_seqs=64))[0] is OK
    nim = 'vllm:num_request_max{model_name="m",engine="0"} 8'
    assert "cap of 8 sequences:" in of("sequence_cap_reached", window_of([engine_page(**queue, extra=nim)] * 2))[1]


@pytest.mark.parametrize(("pages_at_the_cap", "status"), [(4, OK), (5, OK), (6, WARNING), (8, WARNING)])
def test_a_cap_is_inferred_where_the_same_number_runs_for_a_minute(pages_at_the_cap: int, status: Status) -> None:
    queue: dict[str, Any] = {"waiting": 3, "usage": 0.3}
    moving = [engine_page(running=4 + n % 2, **queue) for n in range(8)]
    pinned = [engine_page(running=8, **queue)] * pages_at_the_cap
    assert of("sequence_cap_reached", window_of([*moving, *pinned]))[0] is status


def test_requests_that_wait_for_something_else_do_not_oversubscribe_the_pool() -> None:
    """A cap of sequences holds them back; the pool never sees them."""
    behind_a_cap = steady(running=8, waiting=200, usage=0.3)
    assert of("concurrency_oversubscribed", behind_a_cap)[0] is OK
    behind_the_pool = steady(running=20, waiting=200, usage=0.97)
    assert of("concurrency_oversubscribed", behind_the_pool)[0] is WARNING


# Capacity ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "status"), [(999 * 16, OK), (999 * 16 + 1, CRITICAL), (64_000, CRITICAL)])
def test_a_request_may_need_every_block_but_the_null_block(length: int, status: Status) -> None:
    assert of("context_exceeds_capacity", steady(), EngineFacts(max_model_len=length))[0] is status


@pytest.mark.parametrize(
    ("check", "missing", "says"),
    [
        ("context_exceeds_capacity", {"config": {}}, "num_gpu_blocks is not exposed"),
        ("context_exceeds_capacity", {}, "give --max-model-len"),
        ("capacity_below_budget", {}, "give --model, the vLLM flags and --gpu"),
        ("concurrency_oversubscribed", {"config": {}}, "num_gpu_blocks is not exposed"),
        ("kv_cache_saturated", {"without": ["usage_perc"]}, "vllm:kv_cache_usage_perc is not exposed"),
        ("preemptions_sustained", {"without": ["preemptions"]}, "vllm:num_preemptions_total is not exposed"),
        ("engine_stalled", {"without": ["running"]}, "vllm:num_requests_running is not exposed"),
    ],
)
def test_what_is_unknown_names_what_is_missing(check: str, missing: dict[str, Any], says: str) -> None:
    status, summary = of(check, window_of([engine_page(**missing)] * 3))
    assert status is UNKNOWN
    assert says in summary


# Laws ----------------------------------------------------------------------------------------------------------------

NAMES = sorted({metric.name for metric in vm.ALL})
LABELS = ["num_gpu_blocks", "block_size", "engine=", "model_name", "_bucket", "_sum", "_count", "+Inf"]


@given(st.lists(st.sampled_from([*NAMES, *LABELS]), max_size=12), st.integers(1, 4))
@settings(max_examples=60)
def test_whatever_is_missing_every_check_answers(without: list[str], pages: int) -> None:
    lines = capture_pages()[-pages:]
    kept = ["".join(line for line in page if not any(word in line for word in without)) for page in lines]
    try:
        found_windows = windows(s for n, page in enumerate(kept) for s in read(page, n * 2.0))
    except ExpositionError:
        return  # nothing of an engine is left, or the labels of a bucket are gone
    for window in found_windows:
        found = judged(window)
        assert list(found) == [check.id for check in checks.ALL]
        assert all(f.summary for f in found.values())


@cache
def capture_pages() -> list[list[str]]:
    folder = EXPOSITION.parent / "captures" / "thrash"
    return [
        [line for line in path.read_text().splitlines(keepends=True) if not line.startswith("#")]
        for path in sorted(folder.glob("*.prom"))
    ]


values = st.sampled_from(["0", "1", "0.99", "-1", "NaN", "+Inf", "1e308", "1e-320", "64", "1e18"])


@given(st.lists(st.lists(values, min_size=8, max_size=8), min_size=1, max_size=4))
@example([["0", "0", "0", "0", "0", "1e308", "1", "1"]])  # overflowed a footprint's sum of lengths, and its variance
@example([["0"] * 8, ["0", "0", "0", "0", "0", "1e308", "1", "1"]])
@example([["1e308", "1e308", "1", "0", "0", "0", "1", "1"]])  # made the pool's demand infinite
@settings(max_examples=60)
def test_whatever_the_values_are_every_check_answers(pages: list[list[str]]) -> None:
    concurrency = "kv_cache_max_concurrency"
    metrics: list[Callable[[str], str]] = [
        lambda v: f'vllm:num_requests_running{{engine="0"}} {v}',
        lambda v: f'vllm:num_requests_waiting{{engine="0"}} {v}',
        lambda v: f'vllm:kv_cache_usage_perc{{engine="0"}} {v}',
        lambda v: f'vllm:num_preemptions_total{{engine="0"}} {v}',
        lambda v: f'vllm:request_success_total{{engine="0"}} {v}',
        lambda v: f'vllm:request_prompt_tokens_bucket{{engine="0",le="{v}"}} 5',
        lambda v: f'vllm:request_generation_tokens_count{{engine="0"}} {v}',
        lambda v: f'vllm:cache_config_info{{engine="0",num_gpu_blocks="{v}",block_size="{v}",{concurrency}="{v}"}} 1',
    ]
    texts = ["\n".join(make(value) for make, value in zip(metrics, page, strict=True)) + "\n" for page in pages]
    for window in windows(s for n, text in enumerate(texts) for s in read(text, n * 20.0)):
        assert list(judged(window)) == [check.id for check in checks.ALL]
