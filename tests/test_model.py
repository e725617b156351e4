"""config.json -> ModelSpec: families, odd spellings, wrappers, and broken configs."""

import importlib
import json
import math
from pathlib import Path
from typing import Any

import budget_cases
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch import model as model_package
from kvwatch.errors import KvwatchError, ModelError, UnsupportedModel
from kvwatch.model import FAMILIES, FAMILY_BY_ARCHITECTURE, REFUSED, architectures, read_model
from kvwatch.model.nested import WRAPPERS

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
_HELPERS = {"__init__", "spec", "fields", "dims", "nested", "length", "checkpoint"}


def test_the_families_are_the_modules_of_the_folder() -> None:
    folder = Path(str(model_package.__file__)).parent
    modules = {path.stem for path in folder.glob("*.py")} - _HELPERS
    assert modules == {family.__name__.rpartition(".")[2] for family in FAMILIES}


def test_no_architecture_has_two_families() -> None:
    listed = [architecture for family in FAMILIES for architecture in family.ARCHITECTURES]
    assert len(listed) == len(set(listed)) == len(FAMILY_BY_ARCHITECTURE)
    assert not set(listed) & (set(WRAPPERS) | set(REFUSED))
    assert list(architectures()) == sorted(sorted({*listed, *WRAPPERS}), key=str.lower)


def test_every_wrapper_leads_to_a_known_language_model() -> None:
    assert {inner for inner in WRAPPERS.values() if inner} <= set(FAMILY_BY_ARCHITECTURE)


def test_every_family_has_a_layout_function_and_sources() -> None:
    for family in FAMILIES:
        assert callable(family.layout)
        assert "Source: " in str(importlib.import_module(family.__name__).__doc__)


def _kinds(config: dict[str, Any]) -> list[tuple[str, int, int, int | None, int]]:
    spec = read_model(config)
    return [
        (cache.label, cache.kv_heads, cache.head_dim, cache.window_tokens, count) for cache, count in spec.kind_counts
    ]


def test_head_dim_is_read_and_only_then_computed() -> None:
    assert _kinds(LLAMA) == [("full", 2, 64, None, 4)]
    assert _kinds({**LLAMA, "head_dim": 128}) == [("full", 2, 128, None, 4)]


def test_kv_heads_default_to_attention_heads() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert _kinds(config) == [("full", 8, 64, None, 4)]


def test_a_window_that_is_switched_off_does_not_count() -> None:
    config = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 1024, "use_sliding_window": False}
    assert _kinds(config) == [("full", 2, 64, None, 4)]
    assert _kinds({**config, "use_sliding_window": True, "max_window_layers": 0}) == [
        ("sliding_window", 2, 64, 1024, 4)
    ]


def test_falcon_with_multi_query_caches_one_head() -> None:
    config = {
        "architectures": ["FalconForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "hidden_size": 512,
    }
    assert _kinds({**config, "multi_query": True}) == [("full", 1, 64, None, 2)]
    new = {**config, "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 4}
    assert _kinds(new) == [("full", 4, 64, None, 2)]


def test_nemotron_nas_blocks_have_their_own_heads_or_none() -> None:
    blocks = [
        {"attention": {"n_heads_in_group": 4}},
        {"attention": {"no_op": True}},
        {"attention": {"n_heads_in_group": 8}},
    ]
    spec = read_model(
        {**LLAMA, "architectures": ["DeciLMForCausalLM"], "num_hidden_layers": 3, "block_configs": blocks}
    )
    assert [[cache.kv_heads for cache in layer] for layer in spec.layers] == [[2], [], [1]]
    assert spec.cacheless == (("none", 1),)


def test_gemma_4_full_layers_have_heads_of_their_own() -> None:
    config = {
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "sliding_window": 512,
    }
    assert _kinds(config) == [("sliding_window", 4, 256, 512, 5), ("full", 2, 512, None, 2)]


def test_the_window_layers_of_gemma_2_are_every_second_one() -> None:
    spec = budget_cases.model("Gemma-2-9B")
    assert [layer[0].kind for layer in spec.layers[:3]] == ["sliding_window", "full", "sliding_window"]


def test_glm_with_dsa_has_index_keys_only_where_layers_select() -> None:
    config = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_topk_pattern": "CSCSCS",
    }
    assert _kinds(config) == [("mla_indexer", 1, 132, None, 3), ("mla", 1, 576, None, 6)]
    every_third = {key: value for key, value in config.items() if key != "index_topk_pattern"} | {"index_topk_freq": 3}
    # offset 2: layers 0 and 1, then every third from layer 1
    assert _kinds(every_third)[0] == ("mla_indexer", 1, 132, None, 3)


def test_a_hybrid_of_every_letter() -> None:
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "M-*E",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 512,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "ssm_state_size": 16,
    }
    spec = read_model(config)
    assert [cache.label for cache, _ in spec.kind_counts] == ["mamba2", "full"]
    assert spec.cacheless == (("none", 2),)
    assert spec.is_hybrid
    assert not spec.is_attention_free


def test_mamba_groups_are_padded_to_whole_ones_on_each_rank() -> None:
    recurrence = budget_cases.model("Nemotron-H-8B").kind_counts[0][0].recurrence
    assert recurrence is not None
    assert recurrence.conv_elements(tensor_parallel_size=1, num_speculative_tokens=0) == (8192 + 2 * 8 * 128) * 3
    assert (
        recurrence.conv_elements(tensor_parallel_size=16, num_speculative_tokens=0) == (8192 + 2 * 16 * 128) // 16 * 3
    )


def test_a_multimodal_config_is_read_through_its_text_config() -> None:
    text = {key: value for key, value in LLAMA.items() if key not in {"architectures", "torch_dtype"}}
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "torch_dtype": "float16",
        "text_config": {**text, "model_type": "llama"},
    }
    spec = read_model(config, name="llava")
    assert (spec.architecture, spec.family, spec.dtype, spec.max_model_len) == (
        "LlavaForConditionalGeneration",
        "full",
        "float16",
        4096,
    )
    assert _kinds(config) == [("full", 2, 64, None, 4)]


def test_a_nested_config_may_leave_out_what_its_model_type_implies() -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    }
    spec = read_model(config)
    assert [(cache.kv_heads, cache.head_dim, count) for cache, count in spec.kind_counts] == [(4, 256, 29), (4, 256, 5)]
    assert "num_key_value_heads" in spec.assumed


def test_whisper_caches_the_encoder_once_per_layer() -> None:
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "decoder_layers": 4,
        "decoder_attention_heads": 8,
        "d_model": 512,
        "max_target_positions": 448,
    }
    assert _kinds(config) == [("full", 8, 64, None, 4), ("cross", 8, 64, None, 4)]
    assert read_model(config).max_model_len == 448


@pytest.mark.parametrize(
    ("quantization", "wanted"),
    [
        (None, None),
        ({"quant_method": "fp8"}, None),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "fp8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
        ({"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "fp8"}}, "fp8_e4m3"),
        (
            {"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
            "fp8_e4m3",
        ),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": True, "num_bits": 8, "type": "float"}}, None),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "int3"}, None),
    ],
)
def test_a_checkpoint_may_ask_for_a_kv_dtype(quantization: Any, wanted: str | None) -> None:
    assert read_model({**LLAMA, "quantization_config": quantization}).kv_cache_dtype == wanted


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (None, 4096),
        ({"rope_type": "llama3", "factor": 8.0}, 4096),
        ({"type": "linear", "factor": 2.0}, 8192),
        ({"rope_type": "dynamic", "factor": 4}, 16384),
        ({"rope_type": "longrope"}, 4096),
    ],
)
def test_rope_scaling_lengthens_the_context_only_where_vllm_multiplies(rope: Any, length: int) -> None:
    assert read_model({**LLAMA, "rope_scaling": rope}).max_model_len == length


def test_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="BrandNewForCausalLM is not an architecture") as refused:
        read_model({**LLAMA, "architectures": ["BrandNewForCausalLM"]})
    assert "head_dim, layer_types" in str(refused.value)


def test_a_known_but_unsized_architecture_says_why() -> None:
    with pytest.raises(UnsupportedModel, match="DeepseekV4ForCausalLM is not supported: compressed attention"):
        read_model({**LLAMA, "architectures": ["DeepseekV4ForCausalLM"]})


def test_a_missing_field_is_named_with_the_architecture() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM is known, but config\.json lacks num_hidden_layers"):
        read_model(config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({"num_hidden_layers": 5000}, "no model has more than 4096 layers"),
        ({"num_key_value_heads": math.nan}, "num_key_value_heads is nan"),
        ({"num_key_value_heads": 2.5}, "num_key_value_heads is 2.5"),
        ({"num_key_value_heads": 16}, "16 KV heads for 8 attention heads"),
        ({"hidden_size": 4}, "hidden_size 4 is smaller"),
        ({"head_dim": []}, r"head_dim is \[\]"),
        ({"torch_dtype": "int7"}, "torch_dtype is 'int7'"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": [None]}, r"architectures is \[None\]"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor is 'two'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0, which makes 4096 tokens 0"),
        ({"rope_scaling": {"type": "dynamic", "factor": -8.0}}, "factor is -8, which"),
        ({"rope_scaling": {"type": "linear", "factor": 1e308}}, "factor is 1e\\+308, which"),
        ({"architectures": ["Llama\n\x1b[31m"]}, "architectures is .*, but has to be a list with a name"),
    ],
)
def test_a_broken_field_is_one_clear_error(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_model({**LLAMA, **change})


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("Llama-3.1-8B", {"rope_scaling": {"rope_type": [{}]}}),
        ("Gemma-3-4B(text)", {"layer_types": [["full_attention"]] * 34}),
        ("Nemotron-H-8B", {"hybrid_override_pattern": 7}),
        ("Nemotron-H-8B", {"hybrid_override_pattern": [["M"]] * 52}),
        ("Llama-4-Scout(text)", {"no_rope_layers": [{}] * 48}),
    ],
)
def test_lists_and_objects_in_place_of_names_are_read_as_absent_or_refused(model: str, change: dict[str, Any]) -> None:
    try:
        found = read_model({**budget_cases.truth()["configs"][model], **change})
    except ModelError as error:
        assert next(iter(change)) in str(error)
    else:
        assert found.max_model_len == 131072


def _nested(depth: int, inner: Any, key: str) -> Any:
    for _ in range(depth):
        inner = {key: inner}
    return inner


@pytest.mark.parametrize(
    "change",
    [
        {"quantization_config": "x" * 1_000_000},
        {"architectures": ["A" * 1_000_000]},
        {"num_hidden_layers": 10**4000},
        {"torch_dtype": _nested(5000, 1, "a")},
        {"num_hidden_layers": None, "text_config": _nested(5000, {"a": 1}, "text_config")},
    ],
    ids=["text", "name", "number", "nested", "text-configs"],
)
def test_an_error_is_short_whatever_the_file_holds(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as refused:
        read_model({**LLAMA, **change})
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("broken", [None, [], "LlamaForCausalLM", 3])
def test_a_config_that_is_no_object_is_refused(broken: Any) -> None:
    with pytest.raises(ModelError, match="has to be an object"):
        read_model(broken)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = [
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "sliding_window",
    "layer_types",
    "sliding_window_pattern",
    "num_kv_shared_layers",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "index_head_dim",
    "index_topk",
    "hybrid_override_pattern",
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
    "quantization_config",
    "rope_scaling",
    "torch_dtype",
    "max_position_embeddings",
    "text_config",
    "block_configs",
    "linear_attn_config",
    "no_rope_layers",
]


@given(
    architecture=st.sampled_from(architectures()),
    fields=st.dictionaries(st.sampled_from(FIELDS), JSON | st.integers(1, 64), max_size=12),
)
def test_any_json_gives_a_model_or_one_known_error(architecture: str, fields: dict[str, Any]) -> None:
    try:
        spec = read_model({"architectures": [architecture], **fields})
    except KvwatchError as error:
        assert str(error)
    else:
        assert spec.max_model_len > 0


def test_every_model_known_by_name_can_be_read() -> None:
    known = json.loads((Path(str(model_package.__file__)).parents[1] / "data" / "models.json").read_text())
    for name, entry in known.items():
        spec = read_model(entry["config"], name=name)
        assert spec.layers, name
