"""Models that mix attention with Mamba or short-convolution layers.

The state layers cost a constant per request; vLLM raises the attention block size until one attention page is as large
as one state, so the block size of these models is hundreds of tokens.
Source: vLLM 0.32.0, vllm/model_executor/models/{jamba,nemotron_h,zamba2,falcon_h1,granitemoehybrid,lfm2}.py.
"""

from kvwatch.errors import ModelError
from kvwatch.model.dims import dims, head_count, layer_count
from kvwatch.model.fields import Fields
from kvwatch.model.mamba import mamba1, mamba2
from kvwatch.model.spec import LayerCache, Layout, Recurrence, full

ARCHITECTURES = (
    "BambaForCausalLM",
    "FalconH1ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JambaForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "NemotronHForCausalLM",
    "NemotronHPuzzleForCausalLM",
    "Zamba2ForCausalLM",
)


def layout(fields: Fields, architecture: str) -> Layout:
    if architecture.startswith("NemotronH"):
        return _nemotron_h(fields)
    if architecture == "Zamba2ForCausalLM":
        return _zamba2(fields)
    if architecture.startswith("Lfm2"):
        return _lfm2(fields, architecture)
    model = dims(fields)
    attention = full(kv_heads=model.kv_heads, head_dim=model.head_dim)
    if architecture == "JambaForCausalLM":
        state = mamba1(
            channels=fields.count("mamba_expand", default=2) * fields.count("hidden_size"),
            state_size=fields.count("mamba_d_state", default=16),
            conv_kernel=fields.count("mamba_d_conv", default=4),
        )
        period, offset = (
            fields.count("attn_layer_period", default=8),
            fields.count_or_zero("attn_layer_offset", default=4),
        )
        is_attention = [index % period == offset for index in range(model.layers)]
    else:
        state = _mamba2_of(fields)
        is_attention = _attention_layers(fields, architecture, model.layers)
    if architecture == "FalconH1ForCausalLM":  # every layer runs both side by side
        return Layout(layers=((attention, state),) * model.layers)
    return Layout(layers=tuple((attention,) if attends else (state,) for attends in is_attention))


def _mamba2_of(fields: Fields) -> LayerCache:
    """Bamba, Falcon-H1 and Granite hybrids name the state alike."""
    hidden = fields.count("hidden_size")
    channels = fields.optional_count("mamba_d_ssm") or int(fields.number("mamba_expand", default=2) * hidden)
    heads = fields.count("mamba_n_heads")
    given = fields.raw("mamba_d_head")
    return mamba2(
        channels=channels,
        groups=fields.count("mamba_n_groups", default=1),
        heads=heads,
        head_dim=channels // heads if given is None or given == "auto" else fields.count("mamba_d_head"),
        state_size=fields.count("mamba_d_state"),
        conv_kernel=fields.count("mamba_d_conv", default=4),
    )


def _attention_layers(fields: Fields, architecture: str, layers: int) -> list[bool]:
    if architecture == "BambaForCausalLM":
        indices = set(fields.items("attn_layer_indices") or [])
        return [index in indices for index in range(layers)]
    if architecture == "FalconH1ForCausalLM":
        return [True] * layers
    types = fields.per_layer("layer_types", "layers_block_type", layers=layers)
    if types is None:
        raise fields.lacks("layer_types")
    return [kind in {"attention", "full_attention"} for kind in types]


def _nemotron_h(fields: Fields) -> Layout:
    """`hybrid_override_pattern`: M Mamba-2, * attention, - and E layers without a cache."""
    heads = head_count(fields)
    attention = full(
        kv_heads=fields.count("num_key_value_heads", default=heads),
        head_dim=fields.count("head_dim", "attention_head_dim", default=fields.count("hidden_size") // heads),
    )
    mamba_heads, mamba_dim = fields.count("mamba_num_heads"), fields.count("mamba_head_dim")
    state = mamba2(
        channels=mamba_heads * mamba_dim,
        groups=fields.count("n_groups"),
        heads=mamba_heads,
        head_dim=mamba_dim,
        state_size=fields.count("ssm_state_size"),
        conv_kernel=fields.count("conv_kernel", default=4),
        # vllm/model_executor/models/config.py, NemotronHForCausalLMConfig: float32 unless the config says otherwise.
        state_dtype=fields.text("mamba_ssm_cache_dtype", default="float32"),
    )
    kinds = {"M": (state,), "*": (attention,), "-": (), "E": ()}
    names = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
    pattern = fields.raw("hybrid_override_pattern")
    if not isinstance(pattern, str):
        listed = fields.items("hybrid_override_pattern", "layers_block_type", "layer_types")
        pattern = [names.get(kind, kind) for kind in listed or []]
    if not pattern:
        raise fields.lacks("hybrid_override_pattern", "layers_block_type")
    unknown = [mark for mark in pattern if not isinstance(mark, str) or mark not in kinds]
    if unknown:
        raise ModelError(f"{fields.where}: hybrid_override_pattern holds {unknown[0]!r}; known are M, *, - and E")
    layers = tuple(kinds[mark] for mark in pattern)
    return Layout(layers=layers, cacheless=(("none", sum(1 for layer in layers if not layer)),))


def _zamba2(fields: Fields) -> Layout:
    """A hybrid layer runs one of few shared attention blocks, with a cache of its own, next to its Mamba-2."""
    layers = layer_count(fields)
    heads = head_count(fields)
    attention = full(
        kv_heads=heads,
        head_dim=fields.count("attention_head_dim", default=2 * fields.count("hidden_size") // heads),
    )
    channels = int(fields.number("mamba_expand", default=2) * fields.count("hidden_size"))
    mamba_heads = fields.count("n_mamba_heads", default=8)
    state = mamba2(
        channels=channels,
        groups=fields.count("mamba_ngroups", default=1),
        heads=mamba_heads,
        head_dim=fields.count("mamba_headdim", default=channels // mamba_heads),
        state_size=fields.count("mamba_d_state", default=64),
        conv_kernel=fields.count("mamba_d_conv", default=4),
    )
    types = fields.per_layer("layers_block_type", layers=layers)
    if types is None:
        raise fields.lacks("layers_block_type")
    return Layout(layers=tuple((attention, state) if kind == "hybrid" else (state,) for kind in types))


def _lfm2(fields: Fields, architecture: str) -> Layout:
    model = dims(fields)
    attention = full(kv_heads=model.kv_heads, head_dim=fields.count("hidden_size") // model.heads)
    hidden = fields.count("hidden_size")
    channels = fields.count("conv_dim", default=hidden) if architecture == "Lfm2ForCausalLM" else hidden
    state = LayerCache(
        kind="state",
        recurrence=Recurrence(
            name="short_conv",
            conv_channels=channels,
            conv_taps=fields.count("conv_L_cache", default=3) - 1,
            conv_grows=False,
        ),
    )
    types = fields.per_layer("layer_types", layers=model.layers)
    if types is None:
        full_indices = fields.items("full_attn_idxs")
        if full_indices is None:
            raise fields.lacks("layer_types", "full_attn_idxs")
        types = ["full_attention" if index in full_indices else "conv" for index in range(model.layers)]
    return Layout(layers=tuple((attention,) if kind == "full_attention" else (state,) for kind in types))
