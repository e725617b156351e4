"""Llama 4: layers that attend within chunks of `attention_chunk_size` tokens, and every n-th layer with full attention.

Source: vLLM 0.32.0, vllm/model_executor/models/llama4.py (a layer without rotary embedding has full attention) and
vllm/model_executor/layers/attention/chunked_local_attention.py.
"""

from kvwatch.model.dims import dims
from kvwatch.model.fields import Fields
from kvwatch.model.spec import LayerCache, Layout, full

ARCHITECTURES = ("Llama4ForCausalLM",)


def layout(fields: Fields, architecture: str) -> Layout:
    del architecture
    model = dims(fields)
    wide = full(kv_heads=model.kv_heads, head_dim=model.head_dim)
    chunk = fields.optional_count("attention_chunk_size")
    if chunk is None:
        return Layout(layers=((wide,),) * model.layers)
    local = LayerCache(
        kind="chunked_local",
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        value_head_dim=model.head_dim,
        window_tokens=chunk,
    )
    # An empty list in the config means the default: every 4th layer has no rotary embedding.
    rotary = fields.per_layer("no_rope_layers", layers=model.layers) if fields.items("no_rope_layers") else None
    if rotary is None:
        every = fields.count("no_rope_layer_interval", default=4)
        rotary = [int((index + 1) % every != 0) for index in range(model.layers)]
    return Layout(layers=tuple((local,) if mark else (wide,) for mark in rotary))
