"""Models that wrap a language model: which part of the config describes it, and which architecture it is.

A multimodal config.json nests the language model's fields in `text_config` (or a sibling) and may leave out whatever
equals the default of its model type. Source: transformers 5.19.0 (models/*/configuration_*.py for the defaults),
vLLM 0.32.0 (vllm/model_executor/models/registry.py for the wrappers).
"""

from collections.abc import Mapping
from typing import Any

_DEEPEST = 6
SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config", "language_model", "text_model_config")

# Wrapper architecture -> architecture of its language model; None: as `text_config` says.
WRAPPERS: dict[str, str | None] = {
    "AriaForConditionalGeneration": "LlamaForCausalLM",
    "AyaVisionForConditionalGeneration": "Cohere2ForCausalLM",
    "BeeForConditionalGeneration": "Qwen3ForCausalLM",
    "Cohere2VisionForConditionalGeneration": "Cohere2ForCausalLM",
    "DeepseekOCRForCausalLM": "DeepseekV2ForCausalLM",
    "DeepseekVLV2ForCausalLM": "DeepseekV2ForCausalLM",
    "DotsOCRForCausalLM": "Qwen2ForCausalLM",
    "Ernie4_5_VLMoeForConditionalGeneration": "Ernie4_5_MoeForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4ForCausalLM",
    "Glm4vForConditionalGeneration": "Glm4ForCausalLM",
    "Glm4vMoeForConditionalGeneration": "Glm4MoeForCausalLM",
    "Idefics3ForConditionalGeneration": "LlamaForCausalLM",
    "InternS1ForConditionalGeneration": None,
    "InternVLChatModel": None,
    "InternVLForConditionalGeneration": None,
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "KimiVLForConditionalGeneration": "DeepseekV2ForCausalLM",
    "Lfm2VlForConditionalGeneration": "Lfm2ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "LlavaForConditionalGeneration": None,
    "LlavaNextForConditionalGeneration": None,
    "LlavaNextVideoForConditionalGeneration": None,
    "LlavaOnevisionForConditionalGeneration": None,
    "MiniCPMO": "Qwen2ForCausalLM",
    "MiniCPMV": "Qwen2ForCausalLM",
    "Mistral3ForConditionalGeneration": None,
    "NVLM_D": None,
    "NemotronH_Nano_VL_V2": "NemotronHForCausalLM",
    "Ovis2_5": None,
    "PaliGemmaForConditionalGeneration": "GemmaForCausalLM",
    "Phi3VForCausalLM": "Phi3ForCausalLM",
    "Phi4MMForCausalLM": "Phi3ForCausalLM",
    "PixtralForConditionalGeneration": None,
    "Qwen2AudioForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5OmniForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5OmniModel": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3OmniMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "SmolVLMForConditionalGeneration": "LlamaForCausalLM",
    "StepVLForConditionalGeneration": "Qwen3ForCausalLM",
    "Step3VLForConditionalGeneration": "Step3TextForCausalLM",
    "UltravoxModel": None,
    "VoxtralForConditionalGeneration": "MistralForCausalLM",
}

# model_type of a nested config that names no architecture -> architecture.
BY_MODEL_TYPE = {
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}

# What a nested config of this model type may leave out. Only constants: what transformers computes is not listed.
_QWEN2_VL = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "use_sliding_window": False,
    "max_position_embeddings": 32768,
}
_QWEN3_5 = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere2": {"num_hidden_layers": 40, "num_attention_heads": 64, "hidden_size": 8192, "sliding_window": 4096},
    "gemma": {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256,
              "hidden_size": 3072, "max_position_embeddings": 8192},
    "gemma2": {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
               "hidden_size": 2304, "sliding_window": 4096, "max_position_embeddings": 8192},
    "gemma3_text": {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                    "hidden_size": 2304, "sliding_window": 4096, "max_position_embeddings": 131072},
    "gemma3n_text": {"num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
                     "hidden_size": 2048, "sliding_window": 512, "max_position_embeddings": 32768,
                     "num_kv_shared_layers": 15},
    "gemma4_text": {"num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                    "hidden_size": 2304, "sliding_window": 512, "max_position_embeddings": 131072},
    "llama": {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "max_position_embeddings": 2048},
    "llama4_text": {"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
                    "hidden_size": 5120, "attention_chunk_size": 8192, "max_position_embeddings": 131072},
    "ministral3": {"num_hidden_layers": 34, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                   "hidden_size": 4096, "max_position_embeddings": 262144},
    "mistral": {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
                "max_position_embeddings": 131072},
    "qwen2": {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 4096,
              "use_sliding_window": False, "max_position_embeddings": 32768},
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3": {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
              "hidden_size": 4096, "use_sliding_window": False, "max_position_embeddings": 32768},
    "qwen3_5_moe_text": {**_QWEN3_5, "num_hidden_layers": 40, "num_key_value_heads": 2, "hidden_size": 2048},
    "qwen3_5_text": {**_QWEN3_5, "num_hidden_layers": 32, "num_key_value_heads": 4, "hidden_size": 4096},
    "qwen3_vl_moe_text": {"num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
                          "head_dim": 128, "hidden_size": 2048, "max_position_embeddings": 128000},
    "qwen3_vl_text": {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
                      "head_dim": 128, "hidden_size": 4096, "max_position_embeddings": 128000},
}  # fmt: skip


def text_section(config: Mapping[str, Any], *, depth: int = 1) -> tuple[Mapping[str, Any], str] | None:
    """The nested object that describes the language model, and its path; None for a plain text model.

    Qwen Omni nests twice: thinker_config.text_config. Whatever lies deeper than `_DEEPEST` levels is no model's.
    """
    for name in SECTIONS:
        nested = config.get(name)
        if not isinstance(nested, Mapping) or not nested:
            continue
        deeper = text_section(nested, depth=depth + 1) if depth < _DEEPEST else None
        if deeper is not None:
            return deeper[0], f"{name}.{deeper[1]}"
        return nested, name
    return None


def with_defaults(nested: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The nested fields completed by the defaults of its model type, and the names filled in."""
    model_type = nested.get("model_type")
    defaults = DEFAULTS.get(model_type, {}) if isinstance(model_type, str) else {}
    filled = tuple(name for name in defaults if nested.get(name) is None)
    return {**dict(nested), **{name: defaults[name] for name in filled}}, filled


def inner_architecture(wrapper: str, nested: Mapping[str, Any]) -> str | None:
    """The language model's architecture, or None when neither the wrapper nor the nested config settles it."""
    fixed = WRAPPERS.get(wrapper)
    if fixed is not None:
        return fixed
    named = nested.get("architectures")
    if isinstance(named, (list, tuple)) and named and isinstance(named[0], str):
        return named[0]
    model_type = nested.get("model_type")
    return BY_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
