"""Proposals that rest on a simulation of the engine's load."""

import json
import random
import tarfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from pages import capture, without

import kvwatch
from kvwatch.capacity import EngineFacts
from kvwatch.finding import Status
from kvwatch.flag_releases import FIRST_RELEASE, has_flag
from kvwatch.objective import CALM_PREEMPTIONS_PER_REQUEST, Objective
from kvwatch.proposal import SettingOption, SimulationBasis
from kvwatch.render.data import report_data, to_json
from kvwatch.render.text import report_text
from kvwatch.report import EngineReport, Report, report
from kvwatch.simulation import CostModel, Request, SchedulerSettings
from kvwatch.sources.capture import read_capture
from kvwatch.versions import parse_version, version_text
from kvwatch.vllm_metrics import PREFIX_CACHE_HITS, PREFIX_CACHE_QUERIES, REQUEST_PREFILL_KV_COMPUTED_TOKENS
from kvwatch.window import Window, windows

RECORDING = Path(kvwatch.__file__).parent / "data/demo/recording.tar.gz"
POOL = SchedulerSettings(num_gpu_blocks=256, block_size=128, max_model_len=4096, max_num_seqs=256)
COST = CostModel(step_seconds=0.0055, per_token_seconds=9e-5)
ROOMY = SchedulerSettings(num_gpu_blocks=4096, block_size=16, max_model_len=4096, max_num_seqs=8)


@lru_cache(maxsize=16)
def played(settings: SchedulerSettings = POOL, clients: int = 28) -> Window:
    """280 requests of 900 to 1,500 tokens, answered with 600 to 1,200."""
    rng = random.Random(17)
    requests = [Request(prompt_tokens=rng.randint(900, 1500), output_tokens=rng.randint(600, 1200)) for _ in range(280)]
    return FakeEngine(settings, COST, requests, clients=clients).window()


def judged(window: Window, *, objective: Objective = "balanced", **facts: Any) -> Report:
    return report([window], facts={window.key.target: EngineFacts(**facts)}, simulate=True, objective=objective)


def asked(window: Window, *, objective: Objective = "balanced", **facts: Any) -> EngineReport:
    (engine,) = judged(window, objective=objective, **facts).engines
    return engine


def proposed(engine: EngineReport) -> dict[str, Any]:
    return {made.setting: made.proposed for made in engine.recommendations}


def option(engine: EngineReport, name: str) -> SettingOption:
    return next(option for option in engine.options if option.name == name)


def applied(engine: EngineReport) -> SchedulerSettings:
    changes = proposed(engine)
    return replace(
        POOL,
        max_num_seqs=int(changes.get("max_num_seqs", POOL.max_num_seqs)),
        watermark=changes.get("watermark", POOL.watermark),
    )


# What is proposed ----------------------------------------------------------------------------------------------------


def test_thrashing_ends_at_no_loss_of_throughput() -> None:
    best = option(asked(played()), "proposed")
    now = option(asked(played()), "now")
    assert now.preemptions_per_request > 0.5
    assert best.preemptions_per_request < 0.1 * now.preemptions_per_request
    assert best.output_throughput_ratio >= 0.97


def test_the_simulation_reproduces_what_was_seen() -> None:
    basis = asked(played()).simulation
    assert basis is not None
    assert basis.simulated_preemptions_per_request == pytest.approx(basis.observed_preemptions_per_request, rel=0.2)
    assert basis.cost_error_ratio is not None
    assert basis.cost_error_ratio < 0.1


def test_what_works_now_comes_before_flags() -> None:
    engine = asked(capture("thrash"))
    now, *later = [made.apply for made in engine.recommendations]
    assert (now, set(later)) == ("now", {"restart"})
    assert engine.recommendations[0].setting == "gateway_max_in_flight"
    assert engine.recommendations[0].current == 28


def test_a_watermark_that_prevents_preemptions_stays_beside_a_cap_that_prevents_nearly_all() -> None:
    """Lengths grow, and the cap does not follow them."""
    engine = asked(played())
    assert {"max_num_seqs", "watermark"} <= proposed(engine).keys()
    cap_alone, both = option(engine, "max_num_seqs only"), option(engine, "proposed")
    assert both.preemptions_per_request < cap_alone.preemptions_per_request < 0.02


def test_the_cap_that_ends_an_incident_may_be_lower_than_any_that_serves_for_good(tmp_path: Path) -> None:
    with tarfile.open(RECORDING) as archive:
        for name in sorted(archive.getnames())[:20]:  # the beginning of the trouble: an open loop so far
            member = archive.extractfile(name)
            assert member is not None
            (tmp_path / name).write_bytes(member.read())
    (window,) = windows(read_capture(tmp_path, target="demo", notes=[]))
    engine = asked(window)
    now, gateway = option(engine, "now"), option(engine, "gateway")
    assert gateway.preemptions_per_request <= 0.1 * now.preemptions_per_request
    assert gateway.output_throughput_ratio >= 0.9


def test_the_same_window_gives_the_same_answer() -> None:
    assert asked(played()) == asked(played())


def test_a_stable_engine_is_had_for_the_asking() -> None:
    engine = asked(played(), objective="stability")
    assert option(engine, "proposed").preemptions_per_request <= CALM_PREEMPTIONS_PER_REQUEST


def test_stability_is_kept_where_only_a_slow_cap_gives_it() -> None:
    """Before vLLM 0.24 there is no watermark, and the caps that are calm lose throughput."""
    engine = asked(capture("thrash"), objective="stability", vllm_version="0.23.0")
    assert option(engine, "proposed").preemptions_per_request <= CALM_PREEMPTIONS_PER_REQUEST


def test_a_batch_smaller_than_vllms_default_cap_bounds_the_cap() -> None:
    inputs = {name: (value, origin) for name, value, origin in _basis(max_num_batched_tokens=128).inputs}
    assert inputs["max_num_batched_tokens"] == (128, "given")
    assert inputs["max_num_seqs"] == (128, "assumed")


def _basis(**facts: Any) -> SimulationBasis:
    basis = asked(capture("thrash"), **facts).simulation
    assert basis is not None
    return basis


def test_an_engine_that_hangs_gets_no_settings() -> None:
    window = capture("thrash")
    latest = window.latest
    hung = Window(tuple(replace(latest, at_seconds=latest.at_seconds + 30 * number) for number in range(20)))
    engine = asked(hung)
    assert {f.check: f.status for f in engine.findings}["engine_stalled"] is Status.CRITICAL
    assert engine.recommendations == ()
    assert engine.simulation is None


def test_what_more_memory_would_do_is_shown_beside() -> None:
    larger = option(asked(played()), "pool x2")
    assert (larger.num_gpu_blocks, larger.preemptions_per_request) == (512, 0.0)
    assert larger.output_throughput_ratio > 1.2


def test_with_latency_as_the_objective_first_tokens_do_not_come_later() -> None:
    engine = asked(played(), objective="latency")
    best = next((o for o in engine.options if o.name == "proposed"), option(engine, "now"))
    assert best.ttft_p99_ratio is not None
    assert best.ttft_p99_ratio <= 1.0
    assert best.output_throughput_ratio >= 0.97


def test_a_cap_that_is_reached_with_room_in_the_pool_is_raised() -> None:
    engine = asked(played(ROOMY, 40))
    assert proposed(engine)["max_num_seqs"] > 8
    assert option(engine, "proposed").output_throughput_ratio > 1.2
    (made,) = [made for made in engine.recommendations if made.setting == "max_num_seqs"]
    assert (made.current, made.because) == (8, ("sequence_cap_reached",))


def test_a_cap_is_raised_only_as_far_as_the_pool_carries() -> None:
    """What preempts once it is applied would be taken back by the next answer."""
    pool = replace(ROOMY, num_gpu_blocks=1536)
    first = asked(played(pool, 40), max_num_seqs=8)
    assert option(first, "proposed").preemptions_per_request <= CALM_PREEMPTIONS_PER_REQUEST
    raised = int(proposed(first)["max_num_seqs"])
    assert raised > 8
    again = asked(played(replace(pool, max_num_seqs=raised), 40), max_num_seqs=raised)
    assert proposed(again) == {}


def test_nothing_keeps_a_raised_cap_from_being_reached() -> None:
    engine = asked(played(ROOMY, 40), objective="latency", max_num_seqs=8)
    assert proposed(engine).keys() == {"max_num_seqs"}
    (held,) = [held for held in engine.withheld if held.setting == "gateway_max_in_flight"]
    assert held.reason == "a cap of the requests in flight would keep the higher max_num_seqs from being reached"


# When nothing is proposed --------------------------------------------------------------------------------------------


def test_the_answer_applied_is_not_followed_by_another() -> None:
    """The flags are set and the same clients come: whatever remains of preemptions, nothing does better."""
    first = asked(played())
    settings = applied(first)
    again = asked(played(settings), max_num_seqs=settings.max_num_seqs, watermark=settings.watermark)
    assert proposed(again) == {}


def test_the_cap_at_the_gateway_applied_is_never_lifted_again() -> None:
    """A few preemptions may remain, and a little more of the same be proposed, until there is nothing to say."""
    cap = int(proposed(asked(played()))["gateway_max_in_flight"])
    for _ in range(3):
        again = proposed(asked(played(POOL, cap)))
        if not again:
            break
        assert again["gateway_max_in_flight"] < cap
        cap = int(again["gateway_max_in_flight"])
    assert again == {}


def restarted(first: Window, then: Window) -> Window:
    """The pages of two processes, one after the other."""
    later = first.latest.at_seconds + 5.0
    after = [replace(s, at_seconds=s.at_seconds + later, process_start_seconds=later) for s in then.snapshots]
    return Window((*first.snapshots, *after))


def test_what_was_preempted_before_a_rollout_is_not_held_against_it() -> None:
    engine = asked(restarted(played(), played(replace(POOL, num_gpu_blocks=1024))))
    assert {f.check for f in engine.findings if f.status is Status.CRITICAL} == {"preemptions_sustained"}
    assert engine.recommendations == ()
    (held,) = engine.withheld
    assert held.reason.startswith("requests were preempted before the engine restarted, and hardly any in the ")
    (estimated,) = report([restarted(played(), played(replace(POOL, num_gpu_blocks=1024)))]).engines
    assert (estimated.recommendations, estimated.withheld) == ((), (held,))


def test_what_holds_requests_back_since_a_restart_is_ended_nonetheless() -> None:
    engine = asked(restarted(played(), played(ROOMY, 40)))
    (made,) = engine.recommendations
    assert (made.setting, made.because) == ("max_num_seqs", ("sequence_cap_reached",))
    assert made.proposed == proposed(asked(played(ROOMY, 40)))["max_num_seqs"]


def test_only_pages_of_the_present_process_are_simulated() -> None:
    engine = asked(restarted(played(ROOMY, 40), played()))
    assert (engine.options, engine.recommendations) == (asked(played()).options, asked(played()).recommendations)


def test_an_engine_that_is_fine_is_not_simulated() -> None:
    engine = asked(played(replace(POOL, num_gpu_blocks=1024)))
    assert (engine.recommendations, engine.withheld, engine.options, engine.simulation) == ((), (), (), None)


def test_a_report_simulates_only_where_asked() -> None:
    (engine,) = report([played()]).engines
    assert engine.options == ()
    assert {made.predicted["method"] for made in engine.recommendations} == {"analytic"}


# Flags and versions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", sorted({version_text(v) for v in FIRST_RELEASE.values()} | {"0.23.0", "0.33.0"}))
def test_no_flag_is_proposed_before_the_release_that_has_it(version: str) -> None:
    engine = asked(played(), vllm_version=version)
    made = [made.setting for made in engine.recommendations if made.apply == "restart"]
    assert made
    assert all(has_flag(setting, parse_version(version)) for setting in made)
    assert ("watermark" in made) <= (parse_version(version) >= (0, 24))
    notes = " ".join(made.note for made in engine.recommendations)
    assert ("--max-num-active-seqs" in notes) <= (parse_version(version) >= (0, 31))


def test_an_unknown_version_has_only_what_all_have() -> None:
    assert [setting for setting in FIRST_RELEASE if has_flag(setting, None)] == [
        "max_num_seqs",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "max_model_len",
        "enable_prefix_caching",
        "tensor_parallel_size",
    ]


@pytest.mark.parametrize(
    ("version", "is_simulated"), [("0.6.6", False), ("0.7.3", False), ("0.8.5", True), (None, True)]
)
def test_a_scheduler_that_is_not_modelled_is_not_simulated(version: str | None, is_simulated: bool) -> None:
    engine = asked(played(), vllm_version=version)
    assert bool(engine.options) == is_simulated
    made = {made.predicted["method"] for made in engine.recommendations}
    assert made == ({"simulated"} if is_simulated else {"analytic"})
    if not is_simulated:
        assert f"not simulated: vLLM {version} decides otherwise" in engine.withheld[-1].reason


# What it rests on ----------------------------------------------------------------------------------------------------


def test_without_a_fitted_cost_no_time_is_claimed() -> None:
    """The machine of the capture was busy with other work: the same steps took now 10 ms, now 170 ms."""
    engine = asked(capture("thrash"))
    assert engine.simulation is not None
    assert engine.simulation.cost_error_ratio is None
    best = option(engine, "proposed")
    assert best.output_tokens_per_second is None
    assert (best.ttft_p50_ratio, best.ttft_p99_ratio, best.itl_p50_ratio, best.itl_p99_ratio) == (None,) * 4
    assert best.steps_ratio > 1.0
    assert all(made.predicted["cost"] == "assumed" for made in engine.recommendations)
    assert "high" not in {made.confidence for made in engine.recommendations}


def test_pages_without_the_prefix_cache_give_low_confidence_and_say_what_is_assumed() -> None:
    bare = without(played(), PREFIX_CACHE_HITS, PREFIX_CACHE_QUERIES, REQUEST_PREFILL_KV_COMPUTED_TOKENS)
    engine = asked(bare)
    assert {made.confidence for made in engine.recommendations} == {"low"}
    assert engine.simulation is not None
    assert ("prefix_tokens", 0, "assumed") in engine.simulation.inputs


def test_a_load_that_cannot_be_reconstructed_is_estimated_by_formula() -> None:
    window = played()
    without = Window(
        tuple(
            replace(s, histograms={k: h for k, h in s.histograms.items() if k != "request_prompt_tokens"})
            for s in window.snapshots
        )
    )
    engine = asked(without)
    assert engine.options == ()
    assert any(held.reason.startswith("not simulated: ") for held in engine.withheld)


@pytest.mark.parametrize("gauge", ["num_requests_running", "num_requests_waiting"])
def test_requests_in_flight_that_the_latest_pages_lack_are_those_of_the_window(gauge: str) -> None:
    pages = played().snapshots
    kept = len(pages) // 3
    without = [replace(s, values={k: v for k, v in s.values.items() if k != gauge}) for s in pages[kept:]]
    (made,) = [m for m in asked(Window((*pages[:kept], *without))).recommendations if m.apply == "now"]
    assert (made.setting, made.current) == ("gateway_max_in_flight", 28)


def test_a_cap_at_the_gateway_leaves_the_flags_as_they_are() -> None:
    """In an open loop what the gateway holds back is simulated as a queue; that is no flag of the engine's."""
    rng = random.Random(3)
    lengths = [(rng.randint(900, 1500), rng.randint(600, 1200)) for _ in range(280)]
    burst = [Request(prompt_tokens=p, output_tokens=o, at_seconds=n // 40 * 40.0) for n, (p, o) in enumerate(lengths)]
    gateway = option(asked(FakeEngine(POOL, COST, burst).window()), "gateway")
    assert gateway.gateway_max_in_flight is not None
    assert gateway.max_num_seqs is None


def test_a_simulation_that_does_not_show_the_harm_decides_nothing() -> None:
    """With 16 sequences at most, as is wrongly said, the pool would hold every request to its end."""
    engine = asked(played(), max_num_seqs=16)
    assert {made.predicted["method"] for made in engine.recommendations} == {"analytic"}
    assert "the simulation gives 0.00 preemptions per request where 0.70 were seen" in engine.withheld[-1].reason
    assert not {"proposed", "gateway"} & {option.name for option in engine.options}
    assert engine.simulation is not None  # its inputs show what may be wrong


def test_a_simulation_with_preemptions_that_nobody_saw_decides_nothing() -> None:
    """Pages that say of a crowded pool that it preempts nobody, as by a counter that is not kept."""
    silent = [replace(s, values={**s.values, "num_preemptions_total": 0.0}) for s in played().snapshots]
    engine = asked(Window(tuple(silent)))
    assert {f.check for f in engine.findings if f.status is Status.WARNING} >= {"kv_cache_saturated"}
    assert engine.recommendations == ()
    (held,) = engine.withheld
    assert held.reason.startswith("the simulation gives 0.64 preemptions per request where 0.00 were seen")


def test_the_present_settings_are_the_measure() -> None:
    now = option(asked(played()), "now")
    assert now.output_throughput_ratio == now.steps_ratio == now.ttft_p99_ratio == 1.0
    assert now.max_num_seqs is None  # 256 is vLLM's default, and was never reached


# How it is shown -----------------------------------------------------------------------------------------------------


def test_json_has_every_option_with_its_figures() -> None:
    document = json.loads(to_json(report_data(judged(played()))))
    (engine,) = document["engines"]
    assert [row["name"] for row in engine["options"]][:3] == ["now", "proposed", "gateway"]
    assert {"max_num_seqs", "watermark", "preemptions_per_request", "itl_p99_ratio"} <= engine["options"][0].keys()
    assert {"name": "clients", "value": 28, "origin": "derived"} in engine["simulation"]["inputs"]


@pytest.mark.parametrize("name", ["fitted", "assumed"])
def test_the_table_fits_eighty_columns(name: str) -> None:
    text = report_text(
        judged(played() if name == "fitted" else capture("thrash")), width=80, recommendations_first=True
    )
    assert max(map(len, text.splitlines())) <= 80
    assert "\n    now  " in text
    assert "\n    proposed  " in text


def test_flags_that_belong_together_are_one_entry() -> None:
    text = report_text(judged(played()), width=100, recommendations_first=True)
    changes = proposed(asked(played()))
    assert f"--max-num-seqs {changes['max_num_seqs']} --watermark {changes['watermark']}\n" in text
