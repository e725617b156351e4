"""Head counts and sizes under the many names that config.json files use.

Source: vLLM 0.32.0, vllm/transformers_utils/model_arch_config_convertor.py (get_head_size, get_total_num_kv_heads).
`head_dim` is read from the config; hidden_size // num_attention_heads is only the fallback, wrong for Gemma, Qwen3,
Mistral Nemo and others.
"""

from dataclasses import dataclass

from kvwatch.errors import ModelError
from kvwatch.model.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


def layer_count(fields: Fields) -> int:
    count = fields.count("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
    if count > 4096:
        raise ModelError(f"{fields.where}: num_hidden_layers is {count}; no model has more than 4096 layers")
    return count


def head_count(fields: Fields) -> int:
    return fields.count("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")


def head_dim(fields: Fields, heads: int) -> int:
    given = fields.optional_count("head_dim", "hidden_size_per_head", "attention_head_dim", "kv_channels")
    if given is not None:
        return given
    hidden = fields.count("hidden_size", "n_embd", "d_model")
    if hidden < heads:
        raise ModelError(f"{fields.where}: hidden_size {hidden} is smaller than num_attention_heads {heads}")
    return hidden // heads


def kv_head_count(fields: Fields, heads: int) -> int:
    count = fields.count(
        "n_head_kv",
        "num_kv_heads",
        "num_key_value_heads",
        "multi_query_group_num",
        "num_attention_groups",
        default=heads,
    )
    if count > heads:
        raise ModelError(f"{fields.where}: {count} KV heads for {heads} attention heads; there cannot be more")
    return count


def dims(fields: Fields) -> Dims:
    layers, heads = layer_count(fields), head_count(fields)
    return Dims(
        layers=layers,
        heads=heads,
        kv_heads=kv_head_count(fields, heads),
        head_dim=head_dim(fields, heads),
    )
