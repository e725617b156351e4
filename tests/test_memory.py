"""The memory for the KV cache: vLLM's arithmetic, and the estimates against published measurements."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvwatch
from kvwatch.engine import Device, EngineConfig, resolve
from kvwatch.errors import SettingError
from kvwatch.gpu import find_gpu
from kvwatch.memory import MemoryPlan, available_kv_cache_bytes, plan_memory, requested_memory_bytes
from kvwatch.model import read_model
from kvwatch.versions import parse_version

GIB = 1 << 30
MODELS: dict[str, dict[str, Any]] = json.loads(
    (Path(kvwatch.__file__).parent / "data" / "models.json").read_text(encoding="utf-8")
)
with (Path(__file__).parent / "data" / "startup_memory.csv").open(encoding="utf-8") as file:
    MEASURED = tuple(csv.DictReader(file))
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def device(text: str) -> Device:
    gpu = find_gpu(text)
    return Device(name=gpu.name, memory_bytes=gpu.memory_bytes, capability=gpu.capability)


def memory(name: str, *, knows_size: bool = True, **flags: Any) -> MemoryPlan:
    entry = MODELS[name]
    engine = EngineConfig(**{"vllm_version": (0, 32, 0), **flags})
    resolved = resolve(engine, read_model(entry["config"], name=name))
    size = entry["weights_bytes"] if knows_size else None
    return plan_memory(entry["config"], engine, resolved, name=name, checkpoint_bytes=size)


def sizes(plan: MemoryPlan) -> dict[str, int]:
    return {term.name: term.bytes_per_rank for term in plan.terms}


def measured_plan(row: dict[str, str]) -> MemoryPlan:
    batch: dict[str, Any] = {
        flag: int(row[flag])
        for flag in ("tensor_parallel_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len")
    }
    return memory(
        row["model"],
        vllm_version=parse_version(row["vllm_version"]),
        device=Device(name="measured", memory_bytes=int(float(row["device_memory_gib"]) * GIB)),
        quantization=row["quantization"] or None,
        gpu_memory_utilization=float(row["gpu_memory_utilization"]),
        **batch,
    )


def rows_with(column: str) -> pytest.MarkDecorator:
    rows = [row for row in MEASURED if row[column]]
    return pytest.mark.parametrize("row", rows, ids=lambda row: f"{row['vllm_version']}-{row['model']}")


# Against measurements -------------------------------------------------------------------------------------------------


@rows_with("activations_gib")
def test_activations_are_within_eight_per_cent_of_the_measured_ones(row: dict[str, str]) -> None:
    activations = sizes(measured_plan(row))["activations"]
    assert abs(activations / GIB / float(row["activations_gib"]) - 1) <= 0.08


@rows_with("activations_gib")
def test_the_stated_bounds_of_each_term_hold_the_measured_one(row: dict[str, str]) -> None:
    columns = {"weights": "weights_gib", "other": "other_gib", "activations": "activations_gib"}
    for term in measured_plan(row).terms:
        text = row[columns[term.name]]
        if text:
            assert term.low_bytes <= float(text) * GIB <= term.high_bytes, term


@rows_with("available_gib")
def test_what_is_left_is_within_a_fifth_of_a_gib_of_what_engines_logged(row: dict[str, str]) -> None:
    plan = measured_plan(row)
    (available,), measured = plan.available_kv_cache_bytes_per_rank, float(row["available_gib"]) * GIB
    assert abs(available - measured) <= 0.21 * GIB
    assert plan.low_bytes_per_rank[0] <= measured <= plan.high_bytes_per_rank[0]


# vLLM's arithmetic ----------------------------------------------------------------------------------------------------


def test_the_share_of_the_gpu_is_rounded_up() -> None:
    assert requested_memory_bytes(1001, 0.9) == 901
    assert requested_memory_bytes(1000, 0.9) == 900
    total = find_gpu("H100").memory_bytes
    assert requested_memory_bytes(total, 0.9) == math.ceil(total * 0.9)


@pytest.mark.parametrize(("version", "left"), [((0, 20, 1), 500), ((0, 20, 2), 400), ((0, 32, 0), 400)])
def test_graphs_are_part_of_the_budget_since_0_20_2(version: tuple[int, int, int], left: int) -> None:
    assert left == available_kv_cache_bytes(
        device_memory_bytes=1000,
        gpu_memory_utilization=0.9,
        weights_bytes=300,
        activation_bytes=80,
        graph_bytes=100,
        other_bytes=20,
        vllm_version=version,
    )


def test_the_terms_and_what_is_left_add_up_to_the_request() -> None:
    plan = memory(LLAMA, device=device("H100"))
    assert plan.requested_bytes == sum(sizes(plan).values()) + plan.available_kv_cache_bytes_per_rank[0]
    assert plan.requested_bytes == requested_memory_bytes(find_gpu("H100").memory_bytes, 0.92)
    assert list(sizes(plan)) == ["weights", "other", "activations", "cuda_graphs"]


def test_a_given_size_is_exact_and_nothing_is_estimated() -> None:
    plan = memory(LLAMA, device=device("H100"), kv_cache_memory_bytes=40 * GIB, pipeline_parallel_size=2)
    assert plan.available_kv_cache_bytes_per_rank == (40 * GIB, 40 * GIB)
    assert plan.is_exact
    assert plan.source == "given"
    assert plan.terms == ()
    assert memory(LLAMA, kv_cache_memory_bytes=40 * GIB).device_memory_bytes is None


def test_without_a_gpu_or_a_size_the_message_says_what_to_give() -> None:
    with pytest.raises(SettingError) as raised:
        memory(LLAMA)
    assert str(raised.value) == (
        "the memory for the KV cache is unknown without a GPU. Give --gpu NAME, --gpu-memory-gib X, or "
        "--kv-cache-memory-bytes N with the bytes per GPU that vLLM logs as 'Available KV cache memory'."
    )


def test_a_model_larger_than_the_gpu_leaves_less_than_nothing() -> None:
    plan = memory("meta-llama/Llama-3.1-70B-Instruct", device=device("H100"))
    assert plan.high_bytes_per_rank[0] < 0


# The terms ------------------------------------------------------------------------------------------------------------


def test_every_term_says_where_it_comes_from() -> None:
    plan = memory(LLAMA, device=device("H100"))
    assert [(term.name, term.source) for term in plan.terms] == [
        ("weights", "given"),
        ("other", "assumed"),
        ("activations", "derived"),
        ("cuda_graphs", "assumed"),
    ]
    assert memory(LLAMA, device=device("H100"), knows_size=False).terms[0].source == "derived"
    assert plan.source == "derived"
    assert not plan.is_exact


def test_weights_are_exact_to_a_hundredth_and_quantised_ones_that_are_computed_to_a_twentieth() -> None:
    for name, knows_size, ratio in ((LLAMA, True, 0.01), ("openai/gpt-oss-120b", False, 0.05)):
        weights = memory(name, device=device("H200"), knows_size=knows_size).terms[0]
        assert weights.high_bytes - weights.bytes_per_rank == int(weights.bytes_per_rank * ratio)


def test_offloaded_weights_do_not_lie_on_the_gpu() -> None:
    whole, offloaded = (memory(LLAMA, device=device("L4"), cpu_offload_gb=gib) for gib in (0, 4))
    assert sizes(whole)["weights"] - sizes(offloaded)["weights"] == 4 * GIB
    assert sizes(memory(LLAMA, device=device("L4"), cpu_offload_gb=100))["weights"] == 0


def test_eager_engines_capture_no_graphs() -> None:
    assert "cuda_graphs" not in sizes(memory(LLAMA, device=device("H100"), enforce_eager=True))
    assert "cuda_graphs" not in sizes(memory(LLAMA, device=device("H100"), vllm_version=(0, 11, 0)))


def test_graphs_are_estimated_for_each_captured_size_and_layer() -> None:
    plan = memory(LLAMA, device=device("H100"), max_num_seqs=16)
    mixed, decode = 3 + 4, 3 + 2  # 1 2 4 and multiples of 8, to 32 and to 16
    assert sizes(plan)["cuda_graphs"] == (128 << 20) + (mixed + decode) * 32 * (256 << 10)


def test_sampling_more_requests_takes_more_and_only_on_the_last_stage() -> None:
    few, many = (memory(LLAMA, device=device("H100"), max_num_seqs=seqs) for seqs in (256, 2048))
    assert sizes(many)["activations"] == int(2048 * 128_256 * 15.5)
    assert sizes(few)["activations"] < sizes(many)["activations"]
    first, last = memory(
        LLAMA, device=device("H100"), max_num_seqs=2048, pipeline_parallel_size=2
    ).available_kv_cache_bytes_per_rank
    assert first > last


def test_each_stage_has_its_own_memory() -> None:
    name = "meta-llama/Llama-3.1-70B-Instruct"
    plan = memory(name, device=device("H100"), tensor_parallel_size=4, pipeline_parallel_size=3)
    first, middle, last = plan.available_kv_cache_bytes_per_rank
    assert middle > first
    assert plan.requested_bytes == sum(sizes(plan).values()) + min(first, middle, last)


def test_mla_profiles_the_context_of_a_chunk() -> None:
    name = "deepseek-ai/DeepSeek-V2-Lite-Chat"
    plan = memory(name, device=device("H100"), max_num_seqs=1, vllm_version=(0, 19, 0))
    chunk = 65_536 * 16 * (128 + 128) * 2
    assert sizes(plan)["activations"] >= chunk


def test_a_vision_model_says_that_its_images_are_left_out() -> None:
    assert any("images" in text for text in memory("google/gemma-3-4b-it", device=device("H100")).assumptions)
    assert not any("images" in text for text in memory(LLAMA, device=device("H100")).assumptions)


@pytest.mark.parametrize("name", MODELS)
def test_every_known_model_has_a_plan_or_says_why_not(name: str) -> None:
    if name in {"google/gemma-3n-E4B-it", "google/gemma-4-26B-A4B"}:  # weights neither published here nor counted
        assert MODELS[name]["weights_bytes"] is None
        return
    plan = memory(name, device=device("B300"), tensor_parallel_size=1, pipeline_parallel_size=1)
    assert all(0 <= term.low_bytes <= term.bytes_per_rank <= term.high_bytes for term in plan.terms)


@given(
    st.sampled_from([LLAMA, "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-120b"]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 4),
    st.floats(0.1, 1.0),
    st.sampled_from([(0, 11, 0), (0, 19, 0), (0, 20, 2), (0, 32, 0)]),
)
def test_the_estimate_lies_within_its_bounds(
    name: str, ranks: int, stages: int, utilization: float, version: tuple[int, int, int]
) -> None:
    plan = memory(
        name,
        device=device("H200"),
        vllm_version=version,
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        gpu_memory_utilization=utilization,
    )
    for low, value, high in zip(
        plan.low_bytes_per_rank, plan.available_kv_cache_bytes_per_rank, plan.high_bytes_per_rank, strict=True
    ):
        assert low <= value <= high


@given(st.integers(1, 1 << 40), st.floats(0.01, 1.0))
def test_a_larger_share_never_asks_for_less(total: int, utilization: float) -> None:
    assert 0 < requested_memory_bytes(total, utilization) <= total
    assert requested_memory_bytes(total, utilization) <= requested_memory_bytes(total, min(1.0, utilization * 1.1))
