"""Bytes of weights: against published checkpoints, and against what engines logged that they loaded."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvwatch
from kvwatch.errors import ModelError, UnsupportedModel
from kvwatch.parameters import count_parameters
from kvwatch.quantization import storage_of
from kvwatch.weights import header_bytes, index_bytes, stage_layers, weights_of

GIB = 1 << 30
MODELS: dict[str, dict[str, Any]] = json.loads(
    (Path(kvwatch.__file__).parent / "data" / "models.json").read_text(encoding="utf-8")
)
PUBLISHED = {name: entry["weights_bytes"] for name, entry in MODELS.items() if entry["weights_bytes"] is not None}

# The published metadata.total_size that the count does not meet to the byte, and by how much it misses, in millionths.
DEVIATIONS = {
    "deepseek-ai/DeepSeek-R1": -17.38,
    "deepseek-ai/DeepSeek-V3": -17.38,
    "deepseek-ai/DeepSeek-V2-Lite": 0.11,
    "deepseek-ai/DeepSeek-V2-Lite-Chat": 0.11,
    "google/gemma-3-4b-it": -0.54,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 0.01,
    "mistralai/Mixtral-8x7B-v0.1": 0.01,
    "Qwen/Qwen3-235B-A22B": 0.05,
    "Qwen/Qwen3-30B-A3B": 0.20,
    "Qwen/Qwen3.5-122B-A10B": -0.03,
}


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = MODELS[name]["config"]
    return config


def loaded(name: str, **flags: Any) -> tuple[int, ...]:
    return weights_of(config_of(name), name=name, **flags).loaded_bytes_per_rank


# Computed sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_computed_size_is_the_published_one(name: str) -> None:
    computed = weights_of(config_of(name), name=name).checkpoint_bytes
    assert round(1e6 * (computed / PUBLISHED[name] - 1), 2) == DEVIATIONS.get(name, 0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_computed_size_is_within_the_error_it_states(name: str) -> None:
    weights = weights_of(config_of(name), name=name)
    assert weights.source == "derived"
    assert abs(weights.checkpoint_bytes / PUBLISHED[name] - 1) <= weights.error_ratio


# GiB that vLLM printed after "Model loading took" (tests/data/startup_memory.csv and public start-up logs), and how far
# the computed ones are off, in per cent.
LOADED = [
    ("meta-llama/Llama-3.1-8B-Instruct", {}, 14.99, -0.2),
    ("Qwen/Qwen3-0.6B", {}, 1.12, -0.9),
    ("Qwen/Qwen3-32B", {}, 61.03, 0.0),
    ("Qwen/Qwen3-32B", {"tensor_parallel_size": 2}, 30.59, -0.3),
    ("openai/gpt-oss-20b", {}, 13.47, -0.2),
    ("meta-llama/Llama-3.3-70B-Instruct", {"quantization": "fp8", "tensor_parallel_size": 2}, 33.88, -0.1),
    ("zai-org/GLM-5-FP8", {"tensor_parallel_size": 8}, 89.39, -0.5),
]


@pytest.mark.parametrize(("name", "flags", "measured_gib", "off_percent"), LOADED)
def test_what_a_rank_loads_is_what_engines_logged(
    name: str, flags: dict[str, Any], measured_gib: float, off_percent: float
) -> None:
    (computed,) = loaded(name, **flags)
    assert round(100 * (computed / GIB / measured_gib - 1), 1) == off_percent


@pytest.mark.parametrize("name", ["google/gemma-3n-E4B-it", "google/gemma-4-26B-A4B"])
def test_an_architecture_that_is_not_counted_is_refused_with_a_way_out(name: str) -> None:
    with pytest.raises(UnsupportedModel) as raised:
        weights_of(config_of(name), name=name)
    architecture = config_of(name)["architectures"][0]
    assert str(raised.value) == (
        f"the weights of {name} ({architecture}) cannot be computed from its config.json: kvwatch does not know its "
        "modules. Pass the folder that also holds its model.safetensors.index.json as --model, or give "
        "--kv-cache-memory-bytes."
    )


def test_an_architecture_that_is_not_counted_is_divided_evenly_when_its_size_is_known() -> None:
    weights = weights_of(config_of("google/gemma-3n-E4B-it"), checkpoint_bytes=16_000_000_000, tensor_parallel_size=2)
    assert weights.loaded_bytes_per_rank == (8_000_000_000,)
    assert (weights.source, weights.error_ratio) == ("given", 0.05)


def test_a_known_size_decides_and_the_config_only_divides_it() -> None:
    name = "meta-llama/Llama-3.1-8B-Instruct"
    weights = weights_of(config_of(name), checkpoint_bytes=PUBLISHED[name] + 1000)
    assert weights.checkpoint_bytes == PUBLISHED[name] + 1000
    assert weights.loaded_bytes_per_rank == (PUBLISHED[name] + 1000,)
    assert weights.source == "given"


def test_tied_embeddings_are_stored_once() -> None:
    parameters = count_parameters(config_of("Qwen/Qwen2.5-0.5B-Instruct"))
    assert parameters.is_tied
    assert parameters.total == 494_032_768
    untied = count_parameters({**config_of("Qwen/Qwen2.5-0.5B-Instruct"), "tie_word_embeddings": False})
    assert untied.total - parameters.total == parameters.vocab_size * parameters.hidden_size


# Division over ranks and stages ---------------------------------------------------------------------------------------


def test_a_rank_holds_more_than_its_share_since_norms_are_on_each() -> None:
    name = "meta-llama/Llama-3.1-70B-Instruct"
    (whole,) = loaded(name)
    (eighth,) = loaded(name, tensor_parallel_size=8)
    norms = (2 * 80 + 1) * 8192 * 2
    assert eighth == (whole - norms) // 8 + norms


def test_kv_heads_are_replicated_once_there_are_more_ranks_than_heads() -> None:
    name = "Qwen/Qwen2.5-7B-Instruct"
    (whole,) = loaded(name)
    (two,) = loaded(name, tensor_parallel_size=2)
    (four,) = loaded(name, tensor_parallel_size=4)
    key_and_value = 28 * 2 * 3584 * 4 * 128 * 2
    assert 0 < four - whole / 4
    assert (two - whole / 2) < (four - whole / 4)
    (many,) = loaded(name, tensor_parallel_size=28)
    assert many > (whole - key_and_value) / 28 + key_and_value / 4


def test_experts_are_divided_over_the_ranks_of_all_data_parallel_engines() -> None:
    name = "Qwen/Qwen3-30B-A3B"
    (alone,) = loaded(name)
    (shared,) = loaded(name, data_parallel_size=8)
    experts = 48 * 128 * (3 * 2048 * 768 + 1) * 2
    assert alone - shared == experts - experts // 8


def test_a_dense_model_is_whole_on_every_data_parallel_engine() -> None:
    name = "meta-llama/Llama-3.1-8B-Instruct"
    assert loaded(name, data_parallel_size=8) == loaded(name)


def test_stages_hold_their_layers_and_embedding_and_head_lie_on_the_ends() -> None:
    name = "meta-llama/Llama-3.1-8B-Instruct"
    first, middle, last = loaded(name, pipeline_parallel_size=3)
    layer = (4096 * (4096 + 2048 + 4096) + 3 * 4096 * 14336 + 2 * 4096) * 2
    embedding = 128_256 * 4096 * 2
    assert (first, middle, last) == (11 * layer + embedding, 11 * layer, 10 * layer + embedding + 2 * 4096)


def test_a_tied_embedding_is_on_the_first_and_on_the_last_stage() -> None:
    name = "Qwen/Qwen2.5-3B-Instruct"
    (whole,) = loaded(name)
    config = config_of(name)
    embedding = config["vocab_size"] * config["hidden_size"] * 2
    assert sum(loaded(name, pipeline_parallel_size=2)) == whole + embedding


def test_draft_layers_are_stored_and_loaded_only_for_speculative_decoding() -> None:
    name = "deepseek-ai/DeepSeek-V3"
    weights = weights_of(config_of(name), tensor_parallel_size=8)
    with_draft = weights_of(config_of(name), tensor_parallel_size=8, loads_draft=True)
    assert with_draft.checkpoint_bytes == weights.checkpoint_bytes
    assert with_draft.loaded_bytes_per_rank > weights.loaded_bytes_per_rank
    assert weights.loaded_bytes_per_rank[0] * 8 < 688_586_727_753 + 8 * 2 * GIB


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(32, 1, [32]), (32, 2, [16, 16]), (32, 3, [11, 11, 10]), (61, 8, [7, 7, 8, 8, 8, 8, 8, 7]), (5, 4, [1, 1, 2, 1])],
)
def test_a_remainder_of_layers_goes_to_the_stages_before_the_last(layers: int, stages: int, sizes: list[int]) -> None:
    assert [len(indices) for indices in stage_layers(layers, stages)] == sizes


@given(st.integers(1, 200), st.integers(1, 32))
def test_every_layer_lies_on_one_stage_in_order(layers: int, stages: int) -> None:
    split = stage_layers(layers, stages)
    assert [index for indices in split for index in indices] == list(range(layers))
    assert max(map(len, split)) - min(map(len, split)) <= 1


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from(sorted(PUBLISHED)))
def test_all_ranks_together_hold_at_least_the_model(ranks: int, stages: int, name: str) -> None:
    held = loaded(name, tensor_parallel_size=ranks, pipeline_parallel_size=stages)
    (whole,) = loaded(name)
    assert len(held) == stages
    assert sum(held) * ranks >= whole - ranks * stages


# Formats --------------------------------------------------------------------------------------------------------------


def llama(quantization: dict[str, Any] | None) -> dict[str, Any]:
    config = {**config_of("meta-llama/Llama-3.1-8B-Instruct")}
    return config if quantization is None else {**config, "quantization_config": quantization}


LINEAR = 32 * (4096 * (4096 + 2048 + 4096) + 3 * 4096 * 14336)  # parameters that may be quantised
REST = 16_060_522_496 - 2 * LINEAR  # bytes of embedding, head and norms


@pytest.mark.parametrize(
    ("quantization", "bits_per_parameter"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 16384),
        ({"quant_method": "fbgemm_fp8"}, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, 8 + 24 / 32),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, 8),
        ({"quant_method": "modelopt_fp4", "quantization": {"quant_algo": "NVFP4"}}, 4.5),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
            },
            8,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
            },
            4 + 16 / 128,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
            },
            4.5,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 64, "symmetric": False}}
                },
            },
            4 + 20 / 64,
        ),
    ],
)
def test_a_format_stores_its_bits_and_scales_per_linear_parameter(
    quantization: dict[str, Any], bits_per_parameter: float
) -> None:
    weights = weights_of(llama(quantization))
    assert weights.checkpoint_bytes == pytest.approx(REST + LINEAR * bits_per_parameter / 8, abs=1)
    assert weights.error_ratio == 0.05


@pytest.mark.parametrize(
    "pattern", ["model.layers.0.self_attn.q_proj", "re:.*layers\\.0\\.self_attn\\.q_proj", "*.0.self_attn.q_proj"]
)
def test_a_module_on_the_list_of_exceptions_stays_as_it_was(pattern: str) -> None:
    without = weights_of(llama({"quant_method": "fp8"})).checkpoint_bytes
    with_exception = weights_of(llama({"quant_method": "fp8", "modules_to_not_convert": [pattern]})).checkpoint_bytes
    assert with_exception - without == 4096 * 4096


def test_mxfp4_holds_experts_only_and_pads_their_rows_when_loaded() -> None:
    config = config_of("openai/gpt-oss-20b")
    weights = weights_of(config)
    experts = 24 * 32 * 3 * 2880 * 2880
    assert weights.loaded_bytes_per_rank[0] - weights.checkpoint_bytes == experts * 4.25 / 8 * (3072 - 2880) / 2880


def test_quantisation_on_loading_makes_the_loaded_weights_smaller_than_the_checkpoint() -> None:
    weights = weights_of(llama(None), quantization="fp8")
    assert weights.checkpoint_bytes == 16_060_522_496
    assert weights.loaded_bytes_per_rank == (REST + LINEAR,)


def test_a_float32_checkpoint_is_loaded_in_the_engines_dtype() -> None:
    config = {**llama(None), "torch_dtype": "float32"}
    weights = weights_of(config, dtype="bfloat16")
    assert weights.checkpoint_bytes == 2 * 16_060_522_496
    assert weights.loaded_bytes_per_rank == (16_060_522_496,)


@pytest.mark.parametrize("method", ["exl2", "quark", "modelopt_mixed"])
def test_an_unknown_format_is_refused_by_name(method: str) -> None:
    quantization = {"quant_method": method, "quantization": {"quant_algo": "W4A8_MIXED"}}
    with pytest.raises(UnsupportedModel, match=f"quantization_config names '{method}' in a form"):
        storage_of(llama(quantization))


# The checkpoint's own account ----------------------------------------------------------------------------------------


def test_the_index_states_the_size() -> None:
    assert index_bytes({"metadata": {"total_size": 16060522496}, "weight_map": {}}) == 16060522496
    assert index_bytes({"metadata": {"total_size": 688586727753.0}}) == 688586727753


@pytest.mark.parametrize("metadata", [None, {}, {"total_size": None}, {"format": "pt"}])
def test_an_index_that_states_no_size_leaves_it_to_be_computed(metadata: object) -> None:
    assert index_bytes({"metadata": metadata}) is None


@pytest.mark.parametrize(
    "metadata", [[], "pt", {"total_size": "12"}, {"total_size": 0.5}, {"total_size": True}, {"total_size": math.inf}]
)
def test_an_index_whose_size_is_no_number_of_bytes_is_an_error_that_says_what_to_do(metadata: object) -> None:
    with pytest.raises(ModelError, match=r"not the checkpoint's size in bytes\. Repair the file or take it away"):
        index_bytes({"metadata": metadata})


@pytest.mark.parametrize("stated", [0, -1, 16_060_522_496 // 11, 16_060_522_496 * 11, 10**30, 10**4000])
def test_a_size_that_the_parameters_rule_out_is_not_believed(stated: int) -> None:
    weights = weights_of(llama(None), checkpoint_bytes=index_bytes({"metadata": {"total_size": stated}}))
    assert weights == replace(weights_of(llama(None)), doubt=weights.doubt)
    assert weights.doubt is not None
    assert f"says {stated:,} bytes" in weights.doubt or stated > 10**50
    assert len(weights.doubt) < 250
    assert "14.96 GiB" in weights.doubt


@pytest.mark.parametrize("stated", [16_060_522_496 // 9, 16_060_522_496 * 9])
def test_a_size_that_the_parameters_allow_is_believed(stated: int) -> None:
    weights = weights_of(llama(None), checkpoint_bytes=stated)
    assert (weights.checkpoint_bytes, weights.source, weights.doubt) == (stated, "given", None)


@pytest.mark.parametrize("stated", [0, -5, 10**30])
@pytest.mark.parametrize(
    "unknown", [{"architectures": ["NobodyKnows"]}, {"quantization_config": {"quant_method": "exl2"}}]
)
def test_a_size_that_nothing_can_have_is_refused_where_none_is_computed(unknown: dict[str, Any], stated: int) -> None:
    with pytest.raises(ModelError, match=rf"states {stated:,} bytes of weights.*--kv-cache-memory-bytes"):
        weights_of({**llama(None), **unknown}, checkpoint_bytes=stated)


def test_the_size_of_a_checkpoint_in_an_unknown_format_is_divided_evenly() -> None:
    config = llama({"quant_method": "exl2"})
    assert weights_of(config, checkpoint_bytes=6 * 10**9, tensor_parallel_size=2).loaded_bytes_per_rank == (3 * 10**9,)


def test_headers_add_up_to_the_size_of_their_tensors() -> None:
    first = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [2, 8], "data_offsets": [0, 32]},
        "b": {"dtype": "F32", "shape": [4], "data_offsets": [32, 48]},
    }
    second = {"c": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}}
    assert header_bytes([first, second]) == 53


@pytest.mark.parametrize("facts", [{}, {"data_offsets": [4, 1]}, {"data_offsets": "0-4"}, 7])
def test_a_header_of_another_form_is_an_error_that_names_the_tensor(facts: object) -> None:
    with pytest.raises(ModelError, match="safetensors header: w has no data_offsets"):
        header_bytes([{"w": facts}])


@pytest.mark.parametrize("headers", [[], [{"__metadata__": {}}]])
def test_headers_without_a_tensor_are_an_error(headers: list[dict[str, Any]]) -> None:
    with pytest.raises(ModelError, match="describe no tensor"):
        header_bytes(headers)


def test_a_hybrid_pattern_in_words_counts_the_same_weights() -> None:
    config = config_of("nvidia/Nemotron-H-8B-Base-8K")
    names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    spelt = {
        **{key: value for key, value in config.items() if key != "hybrid_override_pattern"},
        "layers_block_type": [names[mark] for mark in config["hybrid_override_pattern"]],
    }
    assert weights_of(spelt) == weights_of(config)


def test_a_width_that_is_no_number_is_refused() -> None:
    config = {**config_of("Qwen/Qwen3-Next-80B-A3B-Instruct"), "shared_expert_intermediate_size": "wide"}
    with pytest.raises(ModelError, match="shared_expert_intermediate_size is 'wide'"):
        weights_of(config)
