"""What a checkpoint's quantization_config says: its method, and the KV cache's dtype when --kv-cache-dtype is `auto`.

Source: vLLM 0.32.0, vllm/transformers_utils/model_arch_config_convertor.py (_normalize_quantization_config),
vllm/utils/torch_utils.py (get_kv_cache_quant_algo_string, for ModelOpt checkpoints) and
vllm/model_executor/layers/attention/attention.py (a compressed-tensors `kv_cache_scheme` means fp8).
"""

from kvwatch.model.fields import Fields, words

_MODELOPT = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}


def quantization_section(fields: Fields) -> Fields | None:
    return fields.section("quantization_config", "compression_config")


def quantization_method(quantization: Fields) -> str:
    """The quant_method, as vLLM spells it."""
    default = "modelopt" if _is_modelopt(quantization) else "compressed-tensors"
    return quantization.text("quant_method", default=default).lower().replace("compressed_", "compressed-")


def kv_cache_dtype(quantization: Fields) -> str | None:
    """A --kv-cache-dtype value, or None when the checkpoint asks for nothing (or for a format vLLM ignores)."""
    if words(quantization.raw("quant_method")).lower().startswith("modelopt") or _is_modelopt(quantization):
        inner = quantization.section("quantization") or quantization
        asked = inner.raw("kv_cache_scheme") or quantization.raw("kv_cache_scheme")
        asked = asked or inner.raw("kv_cache_quant_algo") or quantization.raw("kv_cache_quant_algo")
        if isinstance(asked, dict):
            return _scheme(asked)
        return _MODELOPT.get(asked.lower()) if isinstance(asked, str) else None
    return "fp8" if quantization.raw("kv_cache_scheme") is not None else None


def _is_modelopt(quantization: Fields) -> bool:
    producer = quantization.section("producer")
    return producer is not None and producer.raw("name") == "modelopt"


def _scheme(asked: dict[str, object]) -> str | None:
    if asked.get("type") != "float":
        return None
    if asked.get("num_bits") == 8 and asked.get("dynamic") is False:
        return _MODELOPT["fp8"]
    return _MODELOPT["nvfp4"] if asked.get("num_bits") == 4 else None
