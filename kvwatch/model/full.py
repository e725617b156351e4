"""Models whose layers all cache alike: multi-head, grouped-query and multi-query attention.

One request costs 2 × layers × KV heads × head size × tokens × bytes per element. Where the config sets one sliding
window for every layer (Mistral 7B v0.1, Phi-3 mini), each layer keeps only the window.
Source: vLLM 0.32.0, vllm/engine/arg_utils.py (CacheConfig.sliding_window is set when `layer_types` is absent or all
sliding) and vllm/model_executor/layers/attention/attention.py, Attention.get_kv_cache_spec.
"""

from kvwatch.errors import ModelError
from kvwatch.model.dims import Dims, dims, head_count, layer_count
from kvwatch.model.fields import Fields, shown
from kvwatch.model.spec import LayerCache, Layout, full, sliding

ARCHITECTURES = (
    "AquilaForCausalLM",
    "AquilaModel",
    "ArceeForCausalLM",
    "ArcticForCausalLM",
    "BaiChuanForCausalLM",
    "BaichuanForCausalLM",
    "BailingMoeForCausalLM",
    "BailingMoeV2ForCausalLM",
    "BloomForCausalLM",
    "ChatGLMForConditionalGeneration",
    "ChatGLMModel",
    "CohereForCausalLM",
    "CwmForCausalLM",
    "DbrxForCausalLM",
    "DeciLMForCausalLM",
    "DeepseekForCausalLM",
    "Dots1ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "ExaoneForCausalLM",
    "FalconForCausalLM",
    "FlexOlmoForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GlmForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "Grok1ForCausalLM",
    "Grok1ModelForCausalLM",
    "HYV3ForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "HyperCLOVAXForCausalLM",
    "IQuestCoderForCausalLM",
    "InternLM2ForCausalLM",
    "InternLM3ForCausalLM",
    "InternLMForCausalLM",
    "JAISLMHeadModel",
    "Jais2ForCausalLM",
    "LLaMAForCausalLM",
    "LlamaForCausalLM",
    "MPTForCausalLM",
    "MiMoForCausalLM",
    "MiniCPM3ForCausalLM",
    "MiniCPMForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "MptForCausalLM",
    "NemotronForCausalLM",
    "OPTForCausalLM",
    "Olmo2ForCausalLM",
    "OlmoForCausalLM",
    "OlmoeForCausalLM",
    "OrionForCausalLM",
    "PanguEmbeddedForCausalLM",
    "Param2MoEForCausalLM",
    "PersimmonForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "PhiMoEForCausalLM",
    "QWenLMHeadModel",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SarvamMoEForCausalLM",
    "SeedOssForCausalLM",
    "SolarForCausalLM",
    "StableLMEpochForCausalLM",
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "Step1ForCausalLM",
    "Step3TextForCausalLM",
    "TeleChat2ForCausalLM",
    "TeleChat3ForCausalLM",
    "TeleChatForCausalLM",
    "TeleFLMForCausalLM",
    "XverseForCausalLM",
)

# The Qwen2 family keeps its window in the config even where it does not use it.
_WINDOW_FROM_LAYER = frozenset({"Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"})


def layout(fields: Fields, architecture: str) -> Layout:
    if architecture == "DeciLMForCausalLM" and fields.objects("block_configs") is not None:
        return _block_configs(fields)
    model = _dims(fields, architecture)
    cache = _cache(model, _window(fields, architecture, model.layers))
    modules = fields.count_or_zero("num_nextn_predict_layers", default=0)
    return Layout(layers=((cache,),) * model.layers, draft_layers=((cache,),) * modules)


def _cache(model: Dims, window_tokens: int | None) -> LayerCache:
    if window_tokens is None:
        return full(kv_heads=model.kv_heads, head_dim=model.head_dim)
    return sliding(kv_heads=model.kv_heads, head_dim=model.head_dim, window_tokens=window_tokens)


def _dims(fields: Fields, architecture: str) -> Dims:
    """The dimensions, with the fields that few families spell differently."""
    if architecture == "FalconForCausalLM":
        heads = head_count(fields)
        multi_query = fields.flag("multi_query") and not fields.flag("new_decoder_architecture")
        return Dims(
            layers=layer_count(fields),
            heads=heads,
            kv_heads=1 if multi_query else fields.count("num_kv_heads", "n_head_kv", default=heads),
            head_dim=fields.count("hidden_size") // heads,
        )
    if architecture == "GPTBigCodeForCausalLM":
        heads = head_count(fields)
        kv_heads = 1 if fields.flag("multi_query", default=True) else heads
        return Dims(
            layers=layer_count(fields),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=fields.count("n_embd", "hidden_size") // heads,
        )
    if architecture == "DbrxForCausalLM":
        heads = head_count(fields)
        attention = fields.section("attn_config")
        return Dims(
            layers=layer_count(fields),
            heads=heads,
            kv_heads=heads if attention is None else attention.count("kv_n_heads", default=heads),
            head_dim=fields.count("d_model") // heads,
        )
    if architecture == "MiniCPM3ForCausalLM":
        # It caches the expanded heads, values padded to the key's size (vllm/model_executor/models/minicpm3.py).
        heads = head_count(fields)
        key_dim = fields.count("qk_nope_head_dim") + fields.count("qk_rope_head_dim")
        return Dims(layers=layer_count(fields), heads=heads, kv_heads=heads, head_dim=key_dim)
    if architecture in {"ChatGLMModel", "ChatGLMForConditionalGeneration"} and not fields.flag("multi_query_attention"):
        heads = head_count(fields)
        return Dims(
            layers=layer_count(fields),
            heads=heads,
            kv_heads=heads,
            head_dim=fields.count("kv_channels", default=fields.count("hidden_size") // heads),
        )
    return dims(fields)


def _window(fields: Fields, architecture: str, layers: int) -> int | None:
    """The window of every layer, or None for full attention.

    `use_sliding_window: false` (Qwen2) switches a window off that the config still names.
    """
    if fields.raw("use_sliding_window") is False:
        return None
    window = fields.optional_count("sliding_window")
    if window is None:
        return None
    types = fields.per_layer("layer_types", layers=layers)
    if types is None and architecture in _WINDOW_FROM_LAYER and fields.raw("max_window_layers") is not None:
        first = fields.count_or_zero("max_window_layers")
        types = ["sliding_attention" if index >= first else "full_attention" for index in range(layers)]
    if types is None:
        return window
    slides = {kind == "sliding_attention" for kind in types}
    if slides == {True, False}:
        raise ModelError(
            f"{fields.where}: layer_types mixes sliding and full attention, which vLLM refuses for {architecture}"
        )
    return window if slides == {True} else None


def _block_configs(fields: Fields) -> Layout:
    """Nemotron NAS: each block has its own group size, and some have no attention."""
    heads = head_count(fields)
    size = fields.optional_count("head_dim") or fields.count("hidden_size") // heads
    layers: list[tuple[LayerCache, ...]] = []
    for index, block in enumerate(fields.objects("block_configs") or []):
        where = f"{fields.where}: block_configs[{index}]"
        if not isinstance(block, dict) or not isinstance(block.get("attention"), dict):
            raise ModelError(f"{where} is {shown(block)}, but has to be an object with an object named attention")
        attention = Fields(block["attention"], architecture=fields.architecture, where=where)
        if attention.flag("no_op") or attention.flag("replace_with_linear"):
            layers.append(())
            continue
        group = attention.count("n_heads_in_group")
        layers.append((full(kv_heads=max(1, heads // group), head_dim=size),))
    empty = sum(1 for layer in layers if not layer)
    return Layout(layers=tuple(layers), cacheless=(("none", empty),) if empty else ())
