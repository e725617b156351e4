"""Models that interleave sliding-window and full-attention layers, some of them reading another layer's cache.

The window layers cost a constant per request, the full ones grow with it. Source: vLLM 0.32.0,
vllm/model_executor/models/{gemma2,gemma3,gemma3n,gemma4,gpt_oss,commandr,exaone4,mimo_v2,step3p5}.py, and the
defaults of `layer_types` in transformers 5.19.0 (models/*/configuration_*.py).
"""

from collections.abc import Callable

from kvwatch.errors import ModelError
from kvwatch.model.dims import dims, head_count, layer_count
from kvwatch.model.fields import Fields, shown
from kvwatch.model.spec import LayerCache, Layout, full, sliding

ARCHITECTURES = (
    "AfmoeForCausalLM",
    "ApertusForCausalLM",
    "Cohere2ForCausalLM",
    "Cohere2MoeForCausalLM",
    "Exaone4ForCausalLM",
    "ExaoneMoEForCausalLM",
    "ExaoneMoeForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3nForCausalLM",
    "Gemma4ForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeSWAForCausalLM",
    "GraniteSWAForCausalLM",
    "LagunaForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiMoV2ForCausalLM",
    "Olmo3ForCausalLM",
    "Rnj1ForCausalLM",
    "SmolLM3ForCausalLM",
    "Step3p5ForCausalLM",
    "VaultGemmaForCausalLM",
)

_SLIDING, _FULL = "sliding_attention", "full_attention"

# How often a full layer comes where the config does not list `layer_types`: every n-th, counted from 1.
_FULL_EVERY = {
    "Cohere2ForCausalLM": 4,
    "Exaone4ForCausalLM": 4,
    "Gemma2ForCausalLM": 2,
    "Gemma3ForCausalLM": 6,
    "Gemma3nForCausalLM": 5,
    "Gemma4ForCausalLM": 6,
    "GptOssForCausalLM": 2,
    "Olmo3ForCausalLM": 4,
    "VaultGemmaForCausalLM": 2,
}


def layout(fields: Fields, architecture: str) -> Layout:
    if architecture.startswith("MiMoV2"):
        return _mimo_v2(fields)
    if architecture == "Gemma4ForCausalLM":
        return _gemma4(fields)
    model = dims(fields)
    types = layer_types(fields, architecture, model.layers)
    # Cohere's window does not count the token itself (commandr.py).
    extra = 1 if architecture.startswith("Cohere2") else 0

    def cache(kind: str) -> LayerCache:
        if kind == _FULL:
            return full(kv_heads=model.kv_heads, head_dim=model.head_dim)
        return sliding(
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            window_tokens=fields.count("sliding_window") + extra,
        )

    return _with_shared(fields, types, cache)


def layer_types(fields: Fields, architecture: str, layers: int) -> list[str]:
    """One entry per layer, `sliding_attention` or `full_attention`: listed, from a pattern, or the family's default."""
    listed = fields.per_layer("layer_types", layers=layers)
    if architecture == "GptOssForCausalLM":
        # vLLM does not read the list: even layers slide (gpt_oss.py).
        return [_FULL if index % 2 else _SLIDING for index in range(layers)]
    if listed is not None:
        return [_type(fields, index, kind) for index, kind in enumerate(listed)]
    if fields.raw("sliding_window") is None or fields.raw("use_sliding_window") is False:
        return [_FULL] * layers
    every = _full_every(fields, architecture)
    return [_SLIDING if (index + 1) % every else _FULL for index in range(layers)]


def _type(fields: Fields, index: int, kind: object) -> str:
    if kind in {_SLIDING, "chunked_attention"}:
        return _SLIDING
    if kind in {_FULL, "attention"}:
        return _FULL
    raise ModelError(f"{fields.where}: layer_types[{index}] is {shown(kind)}, but has to be {_SLIDING} or {_FULL}")


def _full_every(fields: Fields, architecture: str) -> int:
    pattern = fields.raw("sliding_window_pattern", "_sliding_window_pattern")
    if isinstance(pattern, str) and pattern:  # EXAONE 4: "LLLG"
        return len(pattern)
    if pattern is not None:
        return fields.count("sliding_window_pattern", "_sliding_window_pattern")
    if architecture not in _FULL_EVERY:
        raise fields.lacks("layer_types")
    return _FULL_EVERY[architecture]


def _with_shared(fields: Fields, types: list[str], cache: Callable[[str], LayerCache]) -> Layout:
    """The last `num_kv_shared_layers` layers read the cache of an earlier layer of their type (Gemma 3n, Gemma 4)."""
    shared = fields.count_or_zero("num_kv_shared_layers", default=0)
    if shared >= len(types):
        raise ModelError(
            f"{fields.where}: num_kv_shared_layers is {shared} of {len(types)} layers; one at least has its own cache"
        )
    caches = {kind: cache(kind) for kind in dict.fromkeys(types)}
    own = len(types) - shared
    layers = tuple((caches[kind],) if index < own else () for index, kind in enumerate(types))
    return Layout(layers=layers, cacheless=(("shared", shared),) if shared else ())


def _gemma4(fields: Fields) -> Layout:
    """Full layers have their own head size and, where keys serve as values, their own head count."""
    model = dims(fields)
    types = layer_types(fields, "Gemma4ForCausalLM", model.layers)
    types[-1] = _FULL
    wide_dim = fields.count("global_head_dim", default=512)
    wide_heads = model.kv_heads
    if fields.flag("attention_k_eq_v"):
        wide_heads = fields.count("num_global_key_value_heads", default=model.kv_heads)

    def cache(kind: str) -> LayerCache:
        if kind == _FULL:
            return full(kv_heads=wide_heads, head_dim=wide_dim)
        return sliding(kv_heads=model.kv_heads, head_dim=model.head_dim, window_tokens=fields.count("sliding_window"))

    return _with_shared(fields, types, cache)


def _mimo_v2(fields: Fields) -> Layout:
    """`hybrid_layer_pattern` 1 marks a window layer, which has its own heads; values are narrower than keys."""
    layers = layer_count(fields)
    heads = head_count(fields)
    pattern = fields.per_layer("hybrid_layer_pattern", layers=layers)
    if pattern is None:
        raise fields.lacks("hybrid_layer_pattern")
    key_dim = fields.count("head_dim")
    value_dim = fields.count("v_head_dim", default=key_dim)
    wide = full(kv_heads=fields.count("num_key_value_heads", default=heads), head_dim=key_dim, value_head_dim=value_dim)
    swa_key_dim = fields.count("swa_head_dim", default=key_dim)
    narrow = sliding(
        kv_heads=fields.count("swa_num_key_value_heads", "num_key_value_heads", default=heads),
        head_dim=swa_key_dim,
        value_head_dim=fields.count("swa_v_head_dim", "v_head_dim", default=swa_key_dim),
        window_tokens=fields.count("sliding_window_size", "sliding_window"),
    )
    return Layout(layers=tuple((narrow,) if mark else (wide,) for mark in pattern))
