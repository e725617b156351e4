"""Gated delta net and linear attention: recurrent layers between full (or latent) attention layers.

Qwen3-Next, Qwen3.5 and OLMo Hybrid use gated delta nets, Kimi Linear uses KDA next to MLA, Ling 2.5 and MiniMax-Text-01
use linear attention.
Source: vLLM 0.32.0, vllm/model_executor/models/{qwen3_next,qwen3_5,olmo_hybrid,bailing_moe_linear}.py and
vllm/models/kimi_k3/nvidia/kda.py.
"""

from kvwatch.errors import ModelError
from kvwatch.model.dims import dims, head_count, layer_count
from kvwatch.model.fields import Fields, shown
from kvwatch.model.mla import expanded_head_elements, latent_cache
from kvwatch.model.spec import LayerCache, Layout, Recurrence, full

ARCHITECTURES = (
    "BailingMoeV2_5ForCausalLM",
    "KimiLinearForCausalLM",
    "MiniMaxForCausalLM",
    "MiniMaxM1ForCausalLM",
    "MiniMaxText01ForCausalLM",
    "OlmoHybridForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)


def layout(fields: Fields, architecture: str) -> Layout:
    if architecture == "KimiLinearForCausalLM":
        return _kimi_linear(fields)
    if architecture == "BailingMoeV2_5ForCausalLM":
        return _bailing(fields)
    if architecture.startswith("MiniMax"):
        return _minimax(fields)
    model = dims(fields)
    attention = full(kv_heads=model.kv_heads, head_dim=model.head_dim)
    state = _gated_delta_net(fields)
    types = fields.per_layer("layer_types", layers=model.layers)
    if types is None:
        every = fields.count("full_attention_interval", default=4)
        types = ["linear_attention" if (index + 1) % every else "full_attention" for index in range(model.layers)]
    layers = tuple(_by_type(fields, index, kind, attention, state) for index, kind in enumerate(types))
    modules = fields.count_or_zero("mtp_num_hidden_layers", "num_nextn_predict_layers", default=1)
    return Layout(layers=layers, draft_layers=((attention,),) * modules)


def _by_type(
    fields: Fields, index: int, kind: object, attention: LayerCache, state: LayerCache
) -> tuple[LayerCache, ...]:
    if kind == "full_attention":
        return (attention,)
    if kind == "linear_attention":
        return (state,)
    raise ModelError(
        f"{fields.where}: layer_types[{index}] is {shown(kind)}, but has to be linear_attention or full_attention"
    )


def _gated_delta_net(fields: Fields) -> LayerCache:
    key_heads, key_dim = fields.count("linear_num_key_heads"), fields.count("linear_key_head_dim")
    value_heads, value_dim = fields.count("linear_num_value_heads"), fields.count("linear_value_head_dim")
    return LayerCache(
        kind="state",
        recurrence=Recurrence(
            name="gated_delta_net",
            conv_channels=2 * key_heads * key_dim + value_heads * value_dim,
            conv_taps=fields.count("linear_conv_kernel_dim", default=4) - 1,
            state_heads=value_heads,
            state_head_elements=value_dim * key_dim,
            # vllm/model_executor/models/config.py, Qwen3_5ForConditionalGenerationConfig
            state_dtype=None if fields.raw("mamba_ssm_dtype") is None else fields.text("mamba_ssm_dtype"),
        ),
    )


def _kimi_linear(fields: Fields) -> Layout:
    layers = layer_count(fields)
    linear = fields.section("linear_attn_config")
    if linear is None:
        raise fields.lacks("linear_attn_config")
    heads, size = linear.count("num_heads"), linear.count("head_dim")
    state = LayerCache(
        kind="state",
        recurrence=Recurrence(
            name="kda",
            conv_channels=3 * heads * size,
            conv_taps=linear.count("short_conv_kernel_size", default=4) - 1,
            state_heads=heads,
            state_head_elements=size * size,
            state_dtype="float32",
        ),
    )
    latent = latent_cache(fields)
    recurrent = set(linear.items("kda_layers") or [])
    found = tuple((state,) if index + 1 in recurrent else (latent,) for index in range(layers))
    return Layout(layers=found, expanded_head_elements=expanded_head_elements(fields))


def _linear_attention(*, heads: int, head_dim: int) -> LayerCache:
    return LayerCache(
        kind="state",
        recurrence=Recurrence(
            name="linear_attention", state_heads=heads, state_head_elements=head_dim * head_dim, conv_grows=False
        ),
    )


def _bailing(fields: Fields) -> Layout:
    layers, heads = layer_count(fields), head_count(fields)
    size = fields.count("head_dim", default=fields.count("hidden_size") // heads)
    state, latent = _linear_attention(heads=heads, head_dim=size), latent_cache(fields)
    group = fields.count("layer_group_size", default=1)
    found = tuple((state,) if (index + 1) % group else (latent,) for index in range(layers))
    return Layout(layers=found, expanded_head_elements=expanded_head_elements(fields))


def _minimax(fields: Fields) -> Layout:
    model = dims(fields)
    state = _linear_attention(heads=model.heads, head_dim=model.head_dim)
    attention = full(kv_heads=model.kv_heads, head_dim=model.head_dim)
    marks = fields.per_layer("attn_type_list", "layer_types", layers=model.layers)
    if marks is None:
        raise fields.lacks("attn_type_list", "layer_types")
    return Layout(layers=tuple((attention,) if mark in {1, "full_attention"} else (state,) for mark in marks))
