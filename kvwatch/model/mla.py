"""Multi-head latent attention: one latent vector per token and layer, whatever the number of heads.

The vector has kv_lora_rank + qk_rope_head_dim elements and lies whole on every tensor-parallel rank. Sparse MLA
(DeepSeek V3.2, GLM with DSA) adds index keys, 132 bytes per token, on the layers that select tokens.
Source: vLLM 0.32.0, vllm/model_executor/layers/attention/mla_attention.py (get_kv_cache_spec),
vllm/model_executor/models/deepseek_v2.py (Indexer), vllm/models/deepseek_v32/attention.py (which layers have one).
"""

from kvwatch.errors import ModelError
from kvwatch.model.dims import dims, layer_count
from kvwatch.model.fields import Fields, shown
from kvwatch.model.spec import LayerCache, Layout, full

ARCHITECTURES = (
    "AXK1ForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "LongcatFlashForCausalLM",
    "MistralLarge3ForCausalLM",
    "PanguUltraMoEForCausalLM",
    "SarvamMLAForCausalLM",
)

_SPARSE = frozenset({"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"})
_INDEX_QUANT_BLOCK = 128  # elements per fp32 scale of an fp8 index key


def layout(fields: Fields, architecture: str) -> Layout:
    if architecture == "DeepseekV2ForCausalLM" and fields.raw("kv_lora_rank") is None:
        # DeepSeek-V2 variants without a latent (DeepSeek-OCR's decoder) have plain attention.
        model = dims(fields)
        return Layout(layers=((full(kv_heads=model.kv_heads, head_dim=model.head_dim),),) * model.layers)
    latent = latent_cache(fields)
    # LongCat counts pairs: each of its `num_layers` runs attention twice.
    layers = fields.count("num_layers") if architecture == "LongcatFlashForCausalLM" else layer_count(fields)
    per_layer = (latent, latent) if architecture == "LongcatFlashForCausalLM" else (latent,)
    index = _index_cache(fields) if _is_sparse(fields, architecture) else None
    skips = _without_indexer(fields, layers) if index is not None else frozenset()
    found = tuple(
        (index, *per_layer) if index is not None and number not in skips else per_layer for number in range(layers)
    )
    draft = (index, *per_layer) if index is not None else per_layer
    modules = fields.count_or_zero("num_nextn_predict_layers", default=0)
    return Layout(layers=found, draft_layers=(draft,) * modules, expanded_head_elements=expanded_head_elements(fields))


def latent_cache(fields: Fields) -> LayerCache:
    size = fields.count("kv_lora_rank") + fields.count("qk_rope_head_dim")
    return LayerCache(kind="mla", kv_heads=1, head_dim=size)


def expanded_head_elements(fields: Fields) -> int:
    """Key and value elements of one head that the latent stands for; 0 where the config does not tell."""
    sizes = [fields.optional_count(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    return 0 if None in sizes else sum(size for size in sizes if size is not None)


def _is_sparse(fields: Fields, architecture: str) -> bool:
    return architecture in _SPARSE or fields.raw("index_topk") is not None


def _index_cache(fields: Fields) -> LayerCache:
    size = fields.count("index_head_dim")
    return LayerCache(kind="mla_indexer", kv_heads=1, head_dim=size + size // _INDEX_QUANT_BLOCK * 4)


def _without_indexer(fields: Fields, layers: int) -> frozenset[int]:
    """Layers that reuse the selection of an earlier layer and therefore hold no index keys."""
    pattern = fields.raw("index_topk_pattern")
    if pattern is not None:
        if not isinstance(pattern, (str, list)):
            raise ModelError(f"{fields.where}: index_topk_pattern is {shown(pattern)}, but has to be text or a list")
        return frozenset(number for number, mark in enumerate(pattern[:layers]) if mark == "S")
    every = fields.count("index_topk_freq", default=1)
    offset = fields.count_or_zero("index_skip_topk_offset", default=2)
    return frozenset(number for number in range(layers) if max(number - offset + 1, 0) % every)
