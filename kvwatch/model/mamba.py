"""Pure state-space models: a state of fixed size per layer and request, whatever the context.

Source: vLLM 0.32.0, vllm/model_executor/models/{mamba,mamba2}.py, get_mamba_state_shape_from_config.
"""

from kvwatch.model.dims import layer_count
from kvwatch.model.fields import Fields
from kvwatch.model.spec import LayerCache, Layout, Recurrence

ARCHITECTURES = ("FalconMambaForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM")


def layout(fields: Fields, architecture: str) -> Layout:
    if architecture == "Mamba2ForCausalLM":
        cache = mamba2(
            channels=int(fields.number("expand", default=2) * fields.count("hidden_size", "d_model")),
            groups=fields.count("n_groups", default=1),
            heads=fields.count("num_heads"),
            head_dim=fields.count("head_dim"),
            state_size=fields.count("state_size"),
            conv_kernel=fields.count("conv_kernel", default=4),
        )
    else:
        hidden = fields.count("hidden_size", "d_model")
        cache = mamba1(
            channels=fields.count("intermediate_size", default=int(fields.number("expand", default=2) * hidden)),
            state_size=fields.count("state_size", default=16),
            conv_kernel=fields.count("conv_kernel", default=4),
        )
    return Layout(layers=((cache,),) * layer_count(fields))


def mamba1(*, channels: int, state_size: int, conv_kernel: int) -> LayerCache:
    return LayerCache(
        kind="state",
        recurrence=Recurrence(
            name="mamba1",
            conv_channels=channels,
            conv_taps=conv_kernel - 1,
            conv_grows=False,
            state_heads=channels,
            state_head_elements=state_size,
        ),
    )


def mamba2(
    *,
    channels: int,
    groups: int,
    heads: int,
    head_dim: int,
    state_size: int,
    conv_kernel: int,
    state_dtype: str | None = None,
) -> LayerCache:
    return LayerCache(
        kind="state",
        recurrence=Recurrence(
            name="mamba2",
            conv_channels=channels,
            conv_groups=groups,
            conv_group_channels=2 * state_size,
            conv_taps=conv_kernel - 1,
            state_heads=heads,
            state_head_elements=head_dim * state_size,
            state_dtype=state_dtype,
        ),
    )
