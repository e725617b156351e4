"""Whether it starts, what is missing, and which single change makes it start."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvwatch
from kvwatch.budget import Budget, DoesNotFit
from kvwatch.engine import Device, EngineConfig
from kvwatch.errors import CapacityError, SettingError
from kvwatch.gpu import find_gpu
from kvwatch.model import read_model
from kvwatch.what_fits import Predict, WhatFits, minimum_kv_cache_bytes, predictor, what_fits

GIB = 1 << 30
MODELS: dict[str, dict[str, Any]] = json.loads(
    (Path(kvwatch.__file__).parent / "data" / "models.json").read_text(encoding="utf-8")
)
LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"
LLAMA_70B = "meta-llama/Llama-3.1-70B-Instruct"


def device(text: str) -> Device:
    gpu = find_gpu(text)
    return Device(name=gpu.name, memory_bytes=gpu.memory_bytes, capability=gpu.capability)


def predictor_of(name: str) -> Predict:
    entry = MODELS[name]
    model = read_model(entry["config"], name=name)
    return predictor(entry["config"], model, checkpoint_bytes=entry["weights_bytes"])


def engine(**flags: Any) -> EngineConfig:
    return EngineConfig(**{"vllm_version": (0, 32, 0), **flags})


def values(answer: WhatFits) -> dict[str, int | float | str]:
    return {fit.setting: fit.value for fit in answer.fits}


def test_an_engine_that_starts_needs_no_change() -> None:
    answer = what_fits(engine(device=device("H100")), predictor_of(LLAMA_8B))
    assert answer.budget is not None
    assert answer.refusal is None
    assert answer.shortfall_bytes == 0
    assert values(answer) == {"max_model_len": 131_072}


def test_the_minimum_is_exact_to_the_byte_and_counts_the_null_block_since_0_29() -> None:
    # vLLM 0.32.0: 40 GiB do not start; one block (5,242,880 bytes) more does.
    predict = predictor_of(LLAMA_70B)
    block = 5_242_880
    assert minimum_kv_cache_bytes(engine(), predict) == 40 * GIB + block
    assert minimum_kv_cache_bytes(engine(vllm_version=(0, 28, 0)), predict) == 40 * GIB
    answer = what_fits(engine(kv_cache_memory_bytes=40 * GIB), predict)
    assert answer.shortfall_bytes == block
    assert what_fits(engine(kv_cache_memory_bytes=40 * GIB + block), predict).shortfall_bytes == 0


def test_the_shortfall_on_a_gpu_is_what_is_missing_to_the_minimum() -> None:
    predict = predictor_of(LLAMA_8B)
    flags = engine(device=device("L4"))
    answer = what_fits(flags, predict)
    assert answer.budget is None
    assert answer.minimum_kv_cache_bytes is not None
    assert answer.shortfall_bytes is not None
    there = answer.minimum_kv_cache_bytes - answer.shortfall_bytes
    with pytest.raises(DoesNotFit):
        predict(replace(flags, kv_cache_memory_bytes=there))
    assert predict(replace(flags, kv_cache_memory_bytes=there + answer.shortfall_bytes)).max_model_len == 131_072
    assert answer.refusal is not None
    assert answer.refusal.startswith("vLLM would refuse to start: one request of max_model_len 131072 needs 16.00 GiB")


def test_the_longest_context_starts_and_one_token_more_does_not() -> None:
    predict = predictor_of(LLAMA_8B)
    flags = engine(device=device("L4"))
    longest = values(what_fits(flags, predict))["max_model_len"]
    assert isinstance(longest, int)
    assert predict(replace(flags, max_model_len=longest)).max_model_len == longest
    with pytest.raises(DoesNotFit):
        predict(replace(flags, max_model_len=longest + 1))


def test_the_longest_context_is_not_longer_than_the_one_asked_for() -> None:
    answer = what_fits(engine(device=device("H100"), max_model_len=8192), predictor_of(LLAMA_8B))
    assert values(answer) == {"max_model_len": 8192}


def test_each_single_change_is_the_least_of_its_kind() -> None:
    flags = engine(device=device("H100"))
    predict = predictor_of("Qwen/Qwen3-32B")
    answer = what_fits(flags, predict)
    found = values(answer)
    assert list(found) == ["max_model_len", "gpu_memory_utilization", "kv_cache_dtype", "tensor_parallel_size", "gpu"]
    assert found["kv_cache_dtype"] == "fp8"
    assert found["tensor_parallel_size"] == 2
    assert found["gpu"] == "NVIDIA H100 NVL"
    percent = round(100 * float(found["gpu_memory_utilization"]))
    with pytest.raises(DoesNotFit):
        predict(replace(flags, gpu_memory_utilization=(percent - 1) / 100))
    for fit in answer.fits:
        assert fit.budget.usable_blocks >= fit.budget.blocks_per_max_len_request


def test_a_given_memory_leaves_the_gpu_and_its_share_out_of_it() -> None:
    answer = what_fits(engine(device=device("H100"), kv_cache_memory_bytes=40 * GIB), predictor_of(LLAMA_70B))
    assert values(answer) == {"max_model_len": 131_056, "kv_cache_dtype": "fp8", "tensor_parallel_size": 2}


def test_weights_that_do_not_fit_need_more_gpus_or_larger_ones() -> None:
    answer = what_fits(engine(device=device("H100"), max_model_len=4096), predictor_of(LLAMA_70B))
    assert list(values(answer)) == ["tensor_parallel_size", "gpu"]
    assert values(answer)["gpu"] != "NVIDIA GB10"


def test_only_the_given_gpus_are_considered() -> None:
    flags = engine(device=device("L4"))
    answer = what_fits(flags, predictor_of(LLAMA_8B), gpus=[find_gpu("H200"), find_gpu("A10")])
    assert values(answer)["gpu"] == "NVIDIA H200"
    assert "gpu" not in values(what_fits(flags, predictor_of(LLAMA_8B), gpus=[find_gpu("T4")]))


def test_a_number_of_ranks_that_vllm_refuses_is_passed_over() -> None:
    # 14 attention heads: two ranks divide them, four do not.
    name = "Qwen/Qwen2.5-0.5B-Instruct"
    answer = what_fits(engine(kv_cache_memory_bytes=100 << 20, tensor_parallel_size=2), predictor_of(name))
    assert answer.budget is None
    assert "tensor_parallel_size" not in values(answer)


def test_settings_that_vllm_refuses_are_raised_and_not_searched_around() -> None:
    with pytest.raises(SettingError, match="--tensor-parallel-size 3 does not divide"):
        what_fits(engine(device=device("H100"), tensor_parallel_size=3), predictor_of(LLAMA_8B))


def test_an_override_of_the_blocks_needs_no_gpu() -> None:
    answer = what_fits(engine(num_gpu_blocks_override=9000), predictor_of(LLAMA_8B))
    assert answer.budget is not None
    assert answer.budget.num_gpu_blocks == 9000


def test_a_refusal_that_is_not_of_memory_has_no_shortfall() -> None:
    def refuse(_: EngineConfig) -> Budget:
        raise CapacityError("no size would do")

    answer = what_fits(engine(), refuse)
    assert answer == WhatFits(
        budget=None, refusal="no size would do", minimum_kv_cache_bytes=None, shortfall_bytes=None, fits=()
    )


@settings(max_examples=25)
@given(st.sampled_from([LLAMA_8B, "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b"]), st.integers(2048, 131_072))
def test_a_pool_of_the_minimum_starts_and_one_byte_less_does_not(name: str, max_model_len: int) -> None:
    predict = predictor_of(name)
    flags = engine(max_model_len=max_model_len)
    minimum = minimum_kv_cache_bytes(flags, predict)
    assert minimum is not None
    budget = predict(replace(flags, kv_cache_memory_bytes=minimum))
    assert budget.usable_blocks >= budget.blocks_per_max_len_request
    with pytest.raises(DoesNotFit):
        predict(replace(flags, kv_cache_memory_bytes=minimum - 1))
