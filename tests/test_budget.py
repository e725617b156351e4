"""The budget: figures that have to hold, rules by version, parallelism, laws."""

from dataclasses import replace
from typing import Any

import budget_cases
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.budget import Budget, DoesNotFit, costs, payload_bytes, plan_for, predict, predict_from
from kvwatch.budget_explain import steps
from kvwatch.budget_report import Memory, budget_report
from kvwatch.demand import arrivals, largest_context, mix, most_requests, row
from kvwatch.engine import Device, EngineConfig
from kvwatch.errors import CapacityError, SettingError, UnsupportedModel
from kvwatch.kv_dtypes import KV_CACHE_DTYPES, check_latent_dtype, latent_token_bytes, token_bytes
from kvwatch.model import ModelSpec, read_model
from kvwatch.planning import stage_sizes

GIB = budget_cases.GIB
H100 = Device(name="NVIDIA H100 80GB HBM3", memory_bytes=85028896768, capability=(9, 0))
LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "hidden_size": 16384,
    "max_position_embeddings": 131072,
}
LLAMA_8B = budget_cases.model("Llama-3.1-8B")
LLAMA_70B = budget_cases.model("Llama-3.1-70B")
MODELS = sorted(budget_cases.truth()["configs"])
FULL = ["Llama-3.1-8B", "Llama-3.1-70B", "Qwen3-30B-A3B", "Falcon-7B"]


# --- figures that have to hold ---


def test_bytes_per_token_of_llama_3_1() -> None:
    models = (LLAMA_8B, LLAMA_70B, read_model(LLAMA_405B))
    assert [costs(model, EngineConfig())[1].bytes_per_token for model in models] == [131072, 327680, 516096]


def test_a_pool_of_40_gib_holds_32_sequences_of_4096_tokens_of_llama_70b() -> None:
    budget = predict(LLAMA_70B, EngineConfig(max_model_len=4096), 40 * GIB)
    assert budget.max_concurrency == 32.0
    assert most_requests(budget.plan, budget, context_tokens=4096) == 32
    rows = [row(budget.plan, budget, context_tokens=4096, concurrency=count) for count in (31, 32, 33)]
    assert [(found.fits, found.free_blocks) for found in rows] == [(True, 255), (True, -1), (False, -257)]


def test_payload_of_50_users_and_of_one_long_request() -> None:
    planned = plan_for(LLAMA_70B, EngineConfig())
    assert row(planned, None, context_tokens=2000, concurrency=50).kv_cache_bytes == 32_768_000_000
    assert row(planned, None, context_tokens=64000, concurrency=1).kv_cache_bytes == 20_971_520_000


def test_one_byte_decides_whether_llama_70b_starts() -> None:
    edge = 40 * GIB + 5_242_880
    assert predict(LLAMA_70B, EngineConfig(vllm_version=(0, 32, 0)), edge).num_gpu_blocks == 8193
    with pytest.raises(DoesNotFit) as refused:
        predict(LLAMA_70B, EngineConfig(vllm_version=(0, 32, 0)), edge - 1)
    assert refused.value.estimated_max_model_len == 131056
    assert "the longest --max-model-len that fits is 131056" in str(refused.value)


# --- rules by version ---


def test_the_null_block_counts_against_the_fit_only_since_0_29() -> None:
    assert predict(LLAMA_70B, EngineConfig(vllm_version=(0, 28, 0)), 40 * GIB).num_gpu_blocks == 8192
    with pytest.raises(DoesNotFit):
        predict(LLAMA_70B, EngineConfig(vllm_version=(0, 29, 0)), 40 * GIB)


def _gpt_oss(version: tuple[int, int, int], **flags: Any) -> Budget:
    engine = EngineConfig(vllm_version=version, device=H100, **flags)
    return predict(budget_cases.model("gpt-oss-20b"), engine, 40 * GIB)


def test_the_tokens_line_changed_its_meaning_twice() -> None:
    new, middle, old = _gpt_oss((0, 32, 0)), _gpt_oss((0, 19, 0)), _gpt_oss((0, 10, 2))
    assert new.capacity_tokens == int(new.max_concurrency * 131072)
    assert middle.capacity_tokens == middle.num_gpu_blocks // 2 * 16
    assert old.capacity_tokens == old.num_gpu_blocks * 16


def test_a_window_kept_the_tokens_of_one_batch_before_0_26() -> None:
    window_blocks = [
        next(group.blocks_per_max_len_request for group in _gpt_oss(version).groups if group.kind == "sliding_window")
        for version in ((0, 25, 0), (0, 26, 0))
    ]
    assert window_blocks == [-(-(127 + 8192) // 16) + 1, -(-(127 + 16384) // 16) + 1]


def test_without_the_hybrid_manager_every_layer_keeps_every_token() -> None:
    assert [group.kind for group in _gpt_oss((0, 8, 5)).groups] == ["full"]
    assert [group.kind for group in _gpt_oss((0, 32, 0), disable_hybrid_kv_cache_manager=True).groups] == ["full"]


def test_padding_took_the_larger_group_from_0_12_and_more_often_from_0_18() -> None:
    # 13 full and 10 window layers: less than 1.5 times, more than 1.25 times as many
    config = {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 23,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_size": 512,
        "sliding_window": 128,
    }
    spec = read_model(config)
    layers = tuple(spec.layers[0] if index < 10 else spec.layers[1] for index in range(23))
    uneven = replace(spec, layers=layers)

    def groups(version: tuple[int, int, int]) -> list[int]:
        planned = plan_for(uneven, EngineConfig(vllm_version=version, device=H100))
        return [group.num_layers for group in planned.groups]

    assert groups((0, 11, 2)) == groups((0, 17, 0)) == [10, 7, 6]
    assert groups((0, 18, 0)) == [10, 13]


def test_concurrency_was_tokens_over_length_before_0_9() -> None:
    budget = predict(LLAMA_8B, EngineConfig(vllm_version=(0, 8, 5), max_model_len=1000), GIB)
    assert budget.max_concurrency == budget.num_gpu_blocks * 16 / 1000


def test_an_override_replaces_the_memory_in_the_fit_check_since_0_20() -> None:
    short: dict[str, Any] = {"num_gpu_blocks_override": 100, "max_model_len": 8192}
    with pytest.raises(DoesNotFit):
        predict(LLAMA_8B, EngineConfig(vllm_version=(0, 32, 0), **short), 40 * GIB)
    assert predict(LLAMA_8B, EngineConfig(vllm_version=(0, 19, 0), **short), 40 * GIB).num_gpu_blocks == 100


# --- parallelism and flags ---


def test_layers_that_do_not_divide_go_to_the_stages_before_the_last() -> None:
    assert stage_sizes(32, 3) == [11, 11, 10]
    assert stage_sizes(61, 4) == [15, 15, 16, 15]
    assert stage_sizes(3, 1) == [3]


def test_the_smallest_stage_decides() -> None:
    budget = predict(LLAMA_8B, EngineConfig(pipeline_parallel_size=3), [GIB * 40, GIB * 20, GIB * 40])
    assert budget.plan.block_bytes == (11 * 65536, 11 * 65536, 10 * 65536)
    assert budget.num_gpu_blocks == 20 * GIB // (11 * 65536)
    with pytest.raises(CapacityError, match="2 memory figures for 3 pipeline stages"):
        predict(LLAMA_8B, EngineConfig(pipeline_parallel_size=3), [GIB, GIB])


def test_context_parallelism_shares_out_each_sequence() -> None:
    model = budget_cases.model("DeepSeek-V3")
    alone = predict(model, EngineConfig(tensor_parallel_size=8, device=H100), 40 * GIB)
    shared = predict(model, EngineConfig(tensor_parallel_size=8, decode_context_parallel_size=8, device=H100), 40 * GIB)
    assert shared.num_gpu_blocks == alone.num_gpu_blocks
    assert shared.blocks_per_max_len_request * 8 == alone.blocks_per_max_len_request
    assert (alone.bytes_per_token_per_rank, shared.bytes_per_token_per_rank) == (70272, 8784)


def test_auto_fit_finds_the_longest_context() -> None:
    budget = predict(LLAMA_70B, EngineConfig(max_model_len=-1, vllm_version=(0, 32, 0)), 40 * GIB)
    assert budget.max_model_len == 131056
    assert predict(LLAMA_8B, EngineConfig(max_model_len=-1), 40 * GIB).max_model_len == 131072
    with pytest.raises(DoesNotFit, match="finds no length"):
        predict(LLAMA_70B, EngineConfig(max_model_len=-1), 1000)


def test_a_window_as_wide_as_the_context_grows_with_it() -> None:
    config = {**budget_cases.truth()["configs"]["Mistral-7B-v0.1"], "sliding_window": 40960}
    _, found = costs(read_model(config), EngineConfig())
    assert (found.bytes_per_token, found.fixed_bytes_per_request) == (131072, 0)
    _, windowed = costs(budget_cases.model("Mistral-7B-v0.1"), EngineConfig())
    assert (windowed.bytes_per_token, windowed.fixed_bytes_per_request) == (0, 131072 * 4096)


def test_disabling_the_window_ends_the_context_there() -> None:
    budget = predict(budget_cases.model("Mistral-7B-v0.1"), EngineConfig(disable_sliding_window=True), 4 * GIB)
    assert (budget.max_model_len, [group.kind for group in budget.groups]) == (4096, ["full"])


def test_draft_layers_are_paid_for_only_when_speculating() -> None:
    model = budget_cases.model("DeepSeek-V3")
    plain = predict(model, EngineConfig(device=H100), 40 * GIB)
    drafted = predict(model, EngineConfig(device=H100, num_speculative_tokens=1, speculative_method="mtp"), 40 * GIB)
    assert drafted.bytes_per_token - plain.bytes_per_token == 1152
    assert drafted.block_bytes_per_rank == plain.block_bytes_per_rank // 61 * 62


def test_a_draft_model_of_unknown_layers_is_named_as_left_out() -> None:
    eagle = plan_for(LLAMA_8B, EngineConfig(device=H100, num_speculative_tokens=3, speculative_method="eagle3"))
    assert any("draft model is not included" in text for text in eagle.engine.assumptions)
    ngram = plan_for(LLAMA_8B, EngineConfig(device=H100, num_speculative_tokens=3, speculative_method="ngram"))
    assert ngram.engine.assumptions == ()


def test_skipped_layers_keep_the_models_dtype() -> None:
    planned = plan_for(
        LLAMA_8B, EngineConfig(kv_cache_dtype="fp8", kv_cache_dtype_skip_layers=("0", "31"), device=H100)
    )
    group = planned.groups[0]
    found = {page.dtype: layers for page, layers in zip(group.pages, group.stage_layers, strict=True)}
    assert found == {"auto": (2,), "fp8": (30,)}


def test_the_connector_and_a_missing_gpu_are_named_as_assumptions() -> None:
    planned = plan_for(budget_cases.model("gpt-oss-20b"), EngineConfig(kv_connector="LMCacheConnectorV1"))
    assert any("LMCacheConnectorV1" in text for text in planned.engine.assumptions)
    assert any("no GPU named" in text for text in planned.engine.assumptions)


def test_the_cpu_has_blocks_of_128_tokens() -> None:
    cpu = Device(name="cpu", memory_bytes=0)
    assert predict(LLAMA_8B, EngineConfig(device=cpu), 40 * GIB).block_size_tokens == 128


@pytest.mark.parametrize(("prefix_caching", "block_size"), [(None, 2048), (False, 2048), (True, 16)])
def test_a_model_of_states_alone_has_their_block_size(prefix_caching: bool | None, block_size: int) -> None:
    engine = EngineConfig(device=H100, vllm_version=(0, 32, 0), enable_prefix_caching=prefix_caching)
    assert predict(budget_cases.model("Mamba2-2.7B"), engine, 40 * GIB).block_size_tokens == block_size


def test_an_encoder_keeps_nothing() -> None:
    bert = read_model({"architectures": ["BertModel"], "num_hidden_layers": 12, "max_position_embeddings": 512})
    budget = predict(bert, EngineConfig(device=H100), GIB)
    assert (budget.num_gpu_blocks, budget.bytes_per_token, budget.groups) == (1, 0, ())
    assert budget.max_concurrency == float(budget.max_num_seqs)


def test_memory_that_is_not_known_is_asked_for() -> None:
    with pytest.raises(CapacityError, match="--kv-cache-memory-bytes, --num-gpu-blocks-override"):
        predict(LLAMA_8B, EngineConfig())
    assert predict(LLAMA_8B, EngineConfig(kv_cache_memory_bytes=40 * GIB)).num_gpu_blocks == 20480


# --- KV dtypes ---


def test_every_kv_dtype_has_a_size_or_is_refused_for_latent_attention() -> None:
    for dtype in KV_CACHE_DTYPES:
        if dtype.endswith("_ds_mla"):
            assert latent_token_bytes(dtype, 576, "bfloat16") in {656, 352}
            continue
        assert 0 < token_bytes(dtype, 128, 128, "bfloat16") <= 512
        if dtype.startswith(("nvfp4", "turboquant", "ultraquant")) or dtype.endswith(("_per_token_head", "e5m2")):
            with pytest.raises(SettingError, match="does not work with latent attention"):
                check_latent_dtype(dtype, None)
        else:
            check_latent_dtype(dtype, None)
            assert latent_token_bytes(dtype, 576, "bfloat16") in {576, 1152}
    with pytest.raises(SettingError, match="32 divides"):
        token_bytes("ultraquant_4bit", 80, 80, "bfloat16")
    assert token_bytes("ultraquant_4bit", 128, 128, "bfloat16") == 136
    assert token_bytes("ultraquant_4bit", 256, 256, "bfloat16") == 272


def test_fp8_halves_tokens_but_not_every_pool() -> None:
    hybrid = budget_cases.model("Qwen3-Next-80B-A3B")
    plain, quantised = (
        predict(hybrid, EngineConfig(device=H100, kv_cache_dtype=dtype), 40 * GIB) for dtype in ("auto", "fp8")
    )
    assert plain.bytes_per_token == 2 * quantised.bytes_per_token
    assert 1.9 < quantised.max_concurrency / plain.max_concurrency < 2


# --- demand ---


def test_littles_law_and_what_retries_add() -> None:
    load = arrivals(arrival_rate=4, response_time=20, retry_ratio=0.2)
    assert (load.effective_rate_per_second, load.in_flight, load.retries_in_flight) == (5.0, 100.0, 20.0)
    assert arrivals(arrival_rate=0, response_time=5).in_flight == 0
    with pytest.raises(SettingError, match="grows without end"):
        arrivals(arrival_rate=1, response_time=1, retry_ratio=1.0)
    with pytest.raises(SettingError, match="finite"):
        arrivals(arrival_rate=-1, response_time=1)
    with pytest.raises(SettingError, match="inf requests in flight; no fleet has 1e"):
        arrivals(arrival_rate=1e308, response_time=1e308)


def test_unequal_requests_are_summed() -> None:
    budget = predict(LLAMA_70B, EngineConfig(tensor_parallel_size=4), 40 * GIB)
    mixed = mix(budget.plan, budget, [(64000, 1), (2000, 50)])
    assert mixed.blocks == 4000 + 50 * 125
    assert mixed.kv_cache_bytes == 20_971_520_000 + 32_768_000_000
    assert mixed.fits is True


def test_users_are_spread_over_data_parallel_engines() -> None:
    budget = predict(LLAMA_70B, EngineConfig(max_model_len=4096, data_parallel_size=4), 40 * GIB)
    assert row(budget.plan, budget, context_tokens=4096, concurrency=128).fits is True
    assert most_requests(budget.plan, budget, context_tokens=4096) == 128
    assert largest_context(budget.plan, budget, concurrency=256) == 2048


def test_a_context_beyond_the_models_is_refused() -> None:
    planned = plan_for(LLAMA_8B, EngineConfig(max_model_len=8192))
    with pytest.raises(SettingError, match="--context 9000 is more than max_model_len 8192"):
        row(planned, None, context_tokens=9000, concurrency=1)


# --- explanation ---


@pytest.mark.parametrize("name", MODELS)
def test_every_step_names_its_rule_and_source(name: str) -> None:
    memory = Memory(available_kv_cache_bytes_per_rank=(700 * GIB,), source="given", origin="--kv-cache-memory-bytes")
    report = budget_report(budget_cases.model(name), EngineConfig(device=H100), memory)
    found = steps(report)
    assert found[-2].formula.endswith(f"{report.budget.max_concurrency:.2f}" if report.budget else "")
    assert {step.source for step in found} <= {"given", "observed", "derived", "assumed"}
    assert all(step.rule and step.formula for step in found)


# --- laws ---

MEMORY = st.integers(min_value=1 << 30, max_value=1 << 42)
RANKS = st.sampled_from([1, 2, 4, 8])


def _pool(model: ModelSpec, engine: EngineConfig, memory: int) -> Budget:
    return predict_from(plan_for(model, engine), memory, check_fit=False)


@given(name=st.sampled_from(MODELS), memory=MEMORY, more=st.integers(0, 1 << 38))
def test_capacity_grows_with_memory(name: str, memory: int, more: int) -> None:
    model, engine = budget_cases.model(name), EngineConfig(device=H100)
    less, greater = _pool(model, engine, memory), _pool(model, engine, memory + more)
    assert less.num_gpu_blocks <= greater.num_gpu_blocks
    assert less.capacity_tokens <= greater.capacity_tokens


@given(name=st.sampled_from(MODELS), memory=MEMORY, ranks=RANKS, stages=st.sampled_from([1, 2, 3]))
def test_blocks_never_take_more_than_the_memory(name: str, memory: int, ranks: int, stages: int) -> None:
    model = budget_cases.model(name)
    if model.attention_heads % ranks:
        return
    budget = _pool(model, EngineConfig(tensor_parallel_size=ranks, pipeline_parallel_size=stages), memory)
    assert all(budget.num_gpu_blocks * size <= memory for size in budget.plan.block_bytes)


@given(name=st.sampled_from(FULL), memory=MEMORY)
def test_fewer_bytes_per_token_never_mean_less_capacity(name: str, memory: int) -> None:
    model = budget_cases.model(name)
    pools = [
        _pool(model, EngineConfig(kv_cache_dtype=dtype), memory) for dtype in ("auto", "int8_per_token_head", "fp8")
    ]
    assert [pool.bytes_per_token for pool in pools] == sorted((pool.bytes_per_token for pool in pools), reverse=True)
    assert [pool.max_concurrency for pool in pools] == sorted(pool.max_concurrency for pool in pools)


@given(name=st.sampled_from([name for name in FULL if name != "Falcon-7B"]), memory=MEMORY)
def test_more_tensor_parallel_ranks_never_lower_the_concurrency_of_full_attention(name: str, memory: int) -> None:
    model = budget_cases.model(name)
    found = [
        _pool(model, EngineConfig(tensor_parallel_size=ranks), memory).max_concurrency for ranks in (1, 2, 4, 8, 16)
    ]
    assert found == sorted(found)


@given(
    name=st.sampled_from(MODELS),
    tokens=st.integers(1, 200_000),
    ranks=RANKS,
    dtype=st.sampled_from(["auto", "fp8"]),
    stages=st.sampled_from([1, 2]),
)
def test_a_request_never_costs_less_than_its_payload(
    name: str, tokens: int, ranks: int, dtype: str, stages: int
) -> None:
    model = budget_cases.model(name)
    if model.attention_heads % ranks:
        return
    engine = EngineConfig(
        tensor_parallel_size=ranks, pipeline_parallel_size=stages, kv_cache_dtype=dtype, max_model_len=200_000
    )
    planned = plan_for(model, engine)
    allocated = planned.blocks_for_request(tokens) * sum(planned.block_bytes) * ranks
    assert allocated >= payload_bytes(planned, tokens)


@given(name=st.sampled_from(MODELS), tokens=st.integers(1, 200_000))
def test_a_request_holds_no_more_blocks_than_vllm_counts_for_it(name: str, tokens: int) -> None:
    planned = plan_for(budget_cases.model(name), EngineConfig(max_model_len=200_000, device=H100))
    assert 0 < planned.blocks_for_request(tokens) <= planned.blocks_at(tokens)
    assert planned.blocks_for_request(0) == 0


ENGINES = st.builds(
    EngineConfig,
    tensor_parallel_size=RANKS,
    pipeline_parallel_size=st.sampled_from([1, 2, 3]),
    kv_cache_dtype=st.sampled_from(sorted(KV_CACHE_DTYPES)),
    block_size=st.sampled_from([None, 16, 32, 64, 128]),
    enable_prefix_caching=st.sampled_from([None, True, False]),
    disable_hybrid_kv_cache_manager=st.sampled_from([None, True]),
    device=st.sampled_from([None, H100]),
    vllm_version=st.builds(lambda minor: (0, minor, 0), st.integers(6, 33)),
)


@given(name=st.sampled_from(MODELS), engine=ENGINES, memory=MEMORY)
def test_any_combination_gives_a_budget_or_one_known_error(name: str, engine: EngineConfig, memory: int) -> None:
    try:
        budget = predict(budget_cases.model(name), engine, memory)
    except (CapacityError, SettingError, UnsupportedModel) as error:
        assert str(error)
    else:
        assert budget.num_gpu_blocks >= budget.blocks_per_max_len_request
        assert sum(group.num_layers for group in budget.groups) == sum(
            count for _, count in budget.plan.model.kind_counts
        )
