"""What a larger pool, another batch, shorter requests or more engines would do, and when one of them is proposed."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.budget import Budget, predict
from kvwatch.capacity import EngineFacts
from kvwatch.capacity_changes import MOST_REPLICAS, CapacityChange, _dealt, needed_change
from kvwatch.engine import Device, EngineConfig
from kvwatch.errors import SettingError
from kvwatch.gpu import find_gpu
from kvwatch.model import read_model
from kvwatch.proposal import SettingOption
from kvwatch.report import EngineReport, report
from kvwatch.simulation import CostModel, Request, SchedulerSettings
from kvwatch.simulator import simulate
from kvwatch.sources.model_files import load_model
from kvwatch.what_fits import predictor
from kvwatch.what_if import Tried
from kvwatch.window import Window

FILES = load_model("llama-3.1-8b")
MODEL = read_model(FILES.config)
L4 = find_gpu("L4")
BLOCK_BYTES = 128 * 131_072  # Llama 3.1 8B, 128 tokens a block
GIVEN = EngineConfig(kv_cache_memory_bytes=256 * BLOCK_BYTES, block_size=128, max_model_len=4096)
POOL = SchedulerSettings(num_gpu_blocks=256, block_size=128, max_model_len=4096, max_num_seqs=256)
COST = CostModel(step_seconds=0.0055, per_token_seconds=9e-5)


def played(requests: Sequence[Request], pool: SchedulerSettings = POOL, *, clients: int) -> Window:
    return FakeEngine(pool, COST, requests, clients=clients).window()


def of_lengths(*answers: int) -> list[Request]:
    rng = random.Random(17)
    return [Request(prompt_tokens=rng.randint(900, 1500), output_tokens=rng.randint(*answers)) for _ in range(280)]


def with_documents() -> list[Request]:
    """Three hundred chats, and three documents of a third of the pool."""
    rng = random.Random(5)
    chats = [Request(prompt_tokens=rng.randint(200, 600), output_tokens=rng.randint(100, 400)) for _ in range(300)]
    for place in (60, 140, 220):
        chats[place] = Request(prompt_tokens=5000, output_tokens=100)
    return chats


@lru_cache(maxsize=8)
def window_of(load: str) -> Window:
    if load == "documents":
        pool = replace(POOL, num_gpu_blocks=128, max_model_len=8192)
        return played(with_documents(), pool, clients=24)
    if load == "hard":  # no cap and no watermark ends its preemptions at full throughput
        return played(of_lengths(20, 2500), replace(POOL, num_gpu_blocks=64), clients=6)
    return played(of_lengths(600, 1200), clients=90 if load == "crowd" else 28)


def budgeted(engine: EngineConfig = GIVEN, **facts: Any) -> EngineFacts:
    def under(changes: Mapping[str, Any]) -> Budget:
        return predict(MODEL, replace(engine, **changes))

    return EngineFacts(budget=under({}), budget_under=under, vllm_version="0.32.0", **facts)


@lru_cache(maxsize=32)
def asked(load: str, facts: EngineFacts = EngineFacts()) -> EngineReport:  # noqa: B008 -- it is frozen
    window = window_of(load)
    (engine,) = report([window], facts={window.key.target: facts}, simulate=True).engines
    return engine


def changes(engine: EngineReport) -> dict[tuple[str, Any], SettingOption]:
    return {(option.setting, option.value): option for option in engine.options if option.setting}


# What is tried -------------------------------------------------------------------------------------------------------


def test_an_fp8_cache_is_tried_on_a_pool_of_twice_the_blocks() -> None:
    option = changes(asked("usual", budgeted()))["kv_cache_dtype", "fp8"]
    assert option.num_gpu_blocks == 512
    assert option.preemptions_per_request == 0.0


def test_a_live_pool_that_differs_from_its_budget_grows_by_the_ratio_of_the_budgets() -> None:
    smaller = replace(GIVEN, kv_cache_memory_bytes=200 * BLOCK_BYTES)
    assert changes(asked("usual", budgeted(smaller)))["kv_cache_dtype", "fp8"].num_gpu_blocks == 512


def test_without_a_model_no_pool_is_made_up() -> None:
    assert {setting for setting, _ in changes(asked("usual"))} == {"replicas"}


def test_a_cache_that_is_fp8_already_is_not_halved_again() -> None:
    tried = changes(asked("usual", budgeted(replace(GIVEN, kv_cache_dtype="fp8"))))
    assert ("kv_cache_dtype", "fp8") not in tried


def test_memory_given_in_bytes_does_not_grow_with_the_utilization() -> None:
    assert "gpu_memory_utilization" not in {setting for setting, _ in changes(asked("usual", budgeted()))}


def on_a_gpu(utilization: float | None = None) -> EngineFacts:
    """Llama 3.1 8B on an L4: its weights leave little, so a hundredth of the memory is a good part of the pool."""
    predict_on = predictor(FILES.config, MODEL, checkpoint_bytes=FILES.weights_bytes)
    engine = EngineConfig(
        device=Device(name=L4.name, memory_bytes=L4.memory_bytes, capability=L4.capability),
        max_model_len=4096,
        gpu_memory_utilization=utilization,
    )

    def under(changes: Mapping[str, Any]) -> Budget:
        return predict_on(replace(engine, **changes))

    return EngineFacts(budget=under({}), budget_under=under, vllm_version="0.32.0")


def test_more_of_the_gpu_is_a_larger_pool() -> None:
    engine, facts = asked("usual", on_a_gpu()), on_a_gpu()
    option = changes(engine)["gpu_memory_utilization", 0.95]
    assert facts.budget is not None
    assert facts.budget_under is not None
    other = facts.budget_under({"gpu_memory_utilization": 0.95})
    assert option.num_gpu_blocks == 256 * other.num_gpu_blocks // facts.budget.num_gpu_blocks
    assert option.num_gpu_blocks > 256


def test_a_gpu_that_is_used_up_gives_no_larger_pool() -> None:
    tried = changes(asked("usual", on_a_gpu(0.95)))
    assert "gpu_memory_utilization" not in {setting for setting, _ in tried}


def test_a_larger_batch_is_tried_on_the_pool_that_its_activations_leave() -> None:
    facts = on_a_gpu()
    assert facts.budget is not None
    assert facts.budget_under is not None
    batch = 2 * facts.budget.engine.max_num_batched_tokens
    blocks = facts.budget_under({"max_num_batched_tokens": batch}).num_gpu_blocks
    option = changes(asked("usual", facts))["max_num_batched_tokens", batch]
    assert option.num_gpu_blocks == 256 * blocks // facts.budget.num_gpu_blocks


def test_a_pool_given_in_blocks_is_left_as_it_is() -> None:
    fixed = replace(GIVEN, kv_cache_memory_bytes=None, num_gpu_blocks_override=256)
    assert {setting for setting, _ in changes(asked("usual", budgeted(fixed)))} == {
        "replicas",
        "max_num_batched_tokens",
    }


def test_a_flag_that_vllm_refuses_is_no_option() -> None:
    def refuse(changes: Mapping[str, Any]) -> Budget:
        raise SettingError(f"no {changes}")

    facts = replace(budgeted(), budget_under=refuse, vllm_version="0.31.0")  # equal facts are asked about once
    assert {("replicas", 2)} == {key for key in changes(asked("usual", facts)) if key[0] != "max_num_batched_tokens"}


def test_a_pool_that_the_longest_request_no_longer_fits_is_no_option() -> None:
    """The live pool is smaller than its budget, and a larger batch makes it smaller still: that one row is left out."""
    rng = random.Random(3)
    requests = of_lengths(20, 2500)[:150]
    for place in range(0, 150, 10):
        requests[place] = Request(prompt_tokens=2990, output_tokens=rng.randint(1050, 1100))
    window = played(requests, replace(POOL, num_gpu_blocks=34), clients=6)
    engine = replace(GIVEN, kv_cache_memory_bytes=40 * BLOCK_BYTES, max_num_batched_tokens=2048)

    def under(changes: Mapping[str, Any]) -> Budget:
        size = 34 if changes.get("max_num_batched_tokens") == 4096 else 40
        return predict(MODEL, replace(engine, **{**changes, "kv_cache_memory_bytes": size * BLOCK_BYTES}))

    facts = EngineFacts(budget=under({}), budget_under=under, vllm_version="0.32.0")
    (engine_report,) = report([window], facts={window.key.target: facts}, simulate=True).engines
    assert {("max_num_batched_tokens", 1024), ("replicas", 2)} <= changes(engine_report).keys()
    assert ("max_num_batched_tokens", 4096) not in changes(engine_report)


def test_a_batch_that_is_only_assumed_is_not_varied() -> None:
    assert "max_num_batched_tokens" not in {setting for setting, _ in changes(asked("usual"))}


def test_without_a_model_a_batch_is_only_made_smaller() -> None:
    tried = changes(asked("usual", EngineFacts(max_num_batched_tokens=2048)))
    assert ("max_num_batched_tokens", 1024) in tried
    assert ("max_num_batched_tokens", 4096) not in tried


def test_with_a_model_a_batch_is_varied_both_ways() -> None:
    tried = changes(asked("usual", budgeted(max_num_batched_tokens=2048)))
    assert {("max_num_batched_tokens", 1024), ("max_num_batched_tokens", 4096)} <= tried.keys()


def test_requests_that_are_many_times_as_long_are_left_out_for_comparison() -> None:
    engine = asked("documents", EngineFacts(max_model_len=8192))
    (option,) = [option for option in engine.options if option.setting == "max_model_len"]
    assert isinstance(option.value, int)
    assert 900 < option.value < 5000
    assert "max_model_len" not in proposed(engine)  # nothing says that the long ones are the trouble


def test_requests_alike_in_length_are_not_cut() -> None:
    assert "max_model_len" not in {setting for setting, _ in changes(asked("usual"))}


def test_half_the_clients_on_each_of_two_engines_preempt_no_more() -> None:
    option = changes(asked("usual"))["replicas", 2]
    assert option.preemptions_per_request == 0.0
    assert option.output_throughput_ratio > 1.4


def test_more_replicas_are_tried_until_nothing_is_preempted() -> None:
    tried = [value for setting, value in changes(asked("crowd")) if setting == "replicas"]
    assert tried == list(range(2, MOST_REPLICAS + 1))


@given(st.integers(1, 10_000), st.integers(1, 16))
def test_clients_are_dealt_to_replicas_as_evenly_as_they_go(clients: int, replicas: int) -> None:
    dealt = _dealt(clients, replicas)
    assert sum(dealt) == clients
    assert max(dealt) - min(dealt) <= 1


# When one is proposed ------------------------------------------------------------------------------------------------


def proposed(engine: EngineReport) -> dict[str, Any]:
    return {made.setting: made.proposed for made in engine.recommendations}


def test_what_the_scheduler_settles_needs_no_other_pool() -> None:
    assert {"gateway_max_in_flight", "max_num_seqs", "watermark"} >= proposed(asked("usual", budgeted())).keys()


def test_where_no_scheduler_setting_ends_it_the_cheapest_pool_that_does_is_proposed() -> None:
    engine = asked("hard", budgeted())
    (made,) = [made for made in engine.recommendations if made.setting == "kv_cache_dtype"]
    assert (made.flag, made.current, made.apply) == ("--kv-cache-dtype fp8", "auto", "restart")
    assert made.predicted["num_gpu_blocks"] == 128
    now, then = (made.predicted[f"preemptions_per_request{when}"] for when in ("_now", ""))
    assert float(then) <= 0.2 * float(now)
    assert "replicas" not in proposed(engine)


@pytest.mark.parametrize(("name", "needs"), [("A100-80GB", True), ("H100", False), ("MI300X", False)])
def test_the_note_says_where_fp8_needs_flashinfer(name: str, needs: bool) -> None:
    gpu = find_gpu(name)
    device = Device(name=gpu.name, memory_bytes=gpu.memory_bytes, capability=gpu.capability)
    engine = asked("hard", budgeted(replace(GIVEN, device=device)))
    (made,) = [made for made in engine.recommendations if made.setting == "kv_cache_dtype"]
    assert ("FlashInfer" in made.note) == needs


def test_a_larger_pool_keeps_the_present_cap() -> None:
    engine = asked("hard", budgeted())
    assert "max_num_seqs" not in proposed(engine)
    (row,) = [option for option in engine.options if option.name == "proposed"]
    assert (row.setting, row.max_num_seqs) == ("kv_cache_dtype", None)


def test_flags_that_were_simulated_together_predict_the_same() -> None:
    restart = [made for made in asked("hard", budgeted()).recommendations if made.apply == "restart"]
    assert len({str(made.predicted) for made in restart}) == 1


def test_what_was_simulated_together_is_said_of_each() -> None:
    for facts in (budgeted(), EngineFacts(vllm_version="0.32.0")):
        made = [m for m in asked("hard", facts).recommendations if m.setting != "gateway_max_in_flight"]
        flags = [m.flag for m in made if m.flag]
        assert len(made) > 1
        for one in made:
            others = " ".join(flag for flag in flags if flag != one.flag)
            assert f"together with {others}" in one.note.split("; ")


def test_without_a_model_replicas_are_what_is_left() -> None:
    engine = asked("hard", EngineFacts(vllm_version="0.32.0"))
    (made,) = [made for made in engine.recommendations if made.setting == "replicas"]
    assert (made.flag, made.current, made.apply) == (None, 1, "now")


# Which one is needed, by its figures ---------------------------------------------------------------------------------

RUN = simulate(POOL, COST, tuple(of_lengths(600, 1200)[:50]), 4)  # the rest of a result, which is not looked at


def tried(preemptions: int, *, tokens_per_second: float = 1000.0, ttft_p99_seconds: float = 4.0) -> Tried:
    """100 requests, so many preemptions."""
    tokens = round(tokens_per_second * 100)
    run = replace(RUN, requests=100, preemptions=preemptions, output_tokens=tokens, makespan_seconds=100.0)
    return Tried(settings=POOL, in_flight=None, runs=(replace(run, ttft_p99_seconds=ttft_p99_seconds),))


def change(setting: str, result: Tried) -> CapacityChange:
    return CapacityChange(setting=setting, current=1, proposed=2, apply="restart", tried=result)


def needed(
    *changes: CapacityChange, best: Tried, is_preempting: bool = True, may_refuse: bool = False, is_timed: bool = True
) -> str | None:
    found = needed_change(
        changes,
        now=tried(90),
        best=best,
        harm_per_request=0.10,
        is_preempting=is_preempting,
        may_refuse=may_refuse,
        is_timed=is_timed,
    )
    return found.setting if found else None


@pytest.mark.parametrize(("left", "setting"), [(10, None), (18, None), (19, "kv_cache_dtype")])
def test_flags_that_leave_a_fifth_of_the_preemptions_are_enough(left: int, setting: str | None) -> None:
    assert needed(change("kv_cache_dtype", tried(0)), best=tried(left)) == setting


def test_the_first_change_that_does_it_is_taken() -> None:
    changes = (
        change("gpu_memory_utilization", tried(40)),
        change("kv_cache_dtype", tried(18)),
        change("replicas", tried(0)),
    )
    assert needed(*changes, best=tried(50)) == "kv_cache_dtype"


def test_requests_are_refused_only_where_long_ones_are_the_trouble() -> None:
    changes = (change("max_model_len", tried(0)), change("replicas", tried(0)))
    assert needed(*changes, best=tried(50)) == "replicas"
    assert needed(*changes, best=tried(50), may_refuse=True) == "max_model_len"


@pytest.mark.parametrize(("preemptions", "setting"), [(2, "kv_cache_dtype"), (3, "replicas")])
def test_a_queue_is_not_ended_by_what_preempts(preemptions: int, setting: str) -> None:
    changes = (
        change("kv_cache_dtype", tried(preemptions, tokens_per_second=2000.0)),
        change("replicas", tried(0, tokens_per_second=2000.0)),
    )
    assert needed(*changes, best=tried(0), is_preempting=False) == setting


def test_nothing_is_proposed_where_nothing_ends_it() -> None:
    assert needed(change("replicas", tried(40)), best=tried(50)) is None


@pytest.mark.parametrize(
    ("tokens_per_second", "ttft_p99_seconds", "is_timed", "setting"),
    [
        (1100.0, 4.0, False, "replicas"),
        (1099.0, 4.0, False, None),
        (1000.0, 2.0, True, "replicas"),
        (1000.0, 2.1, True, None),
        (1000.0, 0.1, False, None),
    ],
)
def test_a_queue_without_preemptions_is_ended_by_speed_or_by_early_first_tokens(
    tokens_per_second: float, ttft_p99_seconds: float, is_timed: bool, setting: str | None
) -> None:
    result = tried(0, tokens_per_second=tokens_per_second, ttft_p99_seconds=ttft_p99_seconds)
    assert needed(change("replicas", result), best=tried(0), is_preempting=False, is_timed=is_timed) == setting
