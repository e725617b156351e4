"""ModelSpec: what a model keeps in the KV cache, layer by layer, before flags and GPU are known.

A layer's *kind* decides what one request costs there:

    full             every token, for as long as the request lives
    sliding_window   the last `window_tokens` tokens
    chunked_local    the tokens of the current chunk of `window_tokens`
    mla              one latent vector per token, the same on every tensor-parallel rank
    mla_indexer      the index keys of sparse MLA, in addition to mla
    state            a recurrent state of fixed size (Mamba, gated delta net, linear attention, short convolution)
    cross            the encoder's output, once per request
    shared, none     nothing: the layer reads another layer's cache, or has no attention

Source: vLLM 0.32.0, vllm/v1/kv_cache_interface.py.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

Kind = Literal["full", "sliding_window", "chunked_local", "mla", "mla_indexer", "state", "cross"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The state tensors of one recurrent layer, before tensor parallelism.

    `conv_channels` (and `conv_groups` × `conv_group_channels`, padded so that each rank holds whole groups) and
    `state_heads` are split over tensor-parallel ranks. The convolution keeps `conv_taps` columns; with speculative
    decoding one more per draft token where `conv_grows` is set.
    Source: vLLM 0.32.0, vllm/model_executor/layers/mamba/mamba_utils.py, MambaStateShapeCalculator.
    """

    name: Literal["mamba1", "mamba2", "gated_delta_net", "kda", "linear_attention", "short_conv"]
    conv_channels: int = 0
    conv_groups: int = 0
    conv_group_channels: int = 0
    conv_taps: int = 0
    conv_grows: bool = True
    state_heads: int = 0
    state_head_elements: int = 0
    state_dtype: str | None = None  # what the config asks for; None: the convolution's

    def conv_elements(self, *, tensor_parallel_size: int, num_speculative_tokens: int) -> int:
        groups = self.conv_groups
        if groups and groups % tensor_parallel_size:
            groups = tensor_parallel_size
        channels = (self.conv_channels + groups * self.conv_group_channels) // tensor_parallel_size
        return channels * (self.conv_taps + (num_speculative_tokens if self.conv_grows else 0))

    def state_elements(self, *, tensor_parallel_size: int) -> int:
        return self.state_heads // tensor_parallel_size * self.state_head_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """What one layer caches. `kv_heads` is the model's total; `value_head_dim` may differ from `head_dim`."""

    kind: Kind
    kv_heads: int = 0
    head_dim: int = 0
    value_head_dim: int = 0
    window_tokens: int | None = None
    recurrence: Recurrence | None = None

    @property
    def label(self) -> str:
        """The kind, or the name of the recurrence: what a reader calls it."""
        return self.recurrence.name if self.recurrence else self.kind


def full(*, kv_heads: int, head_dim: int, value_head_dim: int | None = None) -> LayerCache:
    value = head_dim if value_head_dim is None else value_head_dim
    return LayerCache(kind="full", kv_heads=kv_heads, head_dim=head_dim, value_head_dim=value)


def sliding(*, kv_heads: int, head_dim: int, window_tokens: int, value_head_dim: int | None = None) -> LayerCache:
    value = head_dim if value_head_dim is None else value_head_dim
    return LayerCache(
        kind="sliding_window", kv_heads=kv_heads, head_dim=head_dim, value_head_dim=value, window_tokens=window_tokens
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a family reads from a config: see ModelSpec for the fields."""

    layers: tuple[tuple[LayerCache, ...], ...]
    draft_layers: tuple[tuple[LayerCache, ...], ...] = ()
    cacheless: tuple[tuple[str, int], ...] = ()
    is_encoder_decoder: bool = False
    expanded_head_elements: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model's KV layout. `layers` has one entry per decoder layer, in order: the caches that layer holds.

    `draft_layers` are those that speculative decoding adds (multi-token-prediction modules), on the last stage.
    `cacheless` counts layers without a cache of their own, by reason. `quantization` is the quant_method of the
    checkpoint's quantization_config, `kv_cache_dtype` what that asks for, each None if there is nothing of the kind.
    `assumed` names fields filled from defaults.
    `expanded_head_elements` is how many elements of key and value one head would cache if there were no latent (MLA).
    """

    name: str
    architecture: str
    family: str
    dtype: str
    max_model_len: int
    layers: tuple[tuple[LayerCache, ...], ...]
    draft_layers: tuple[tuple[LayerCache, ...], ...] = ()
    cacheless: tuple[tuple[str, int], ...] = ()
    attention_heads: int = 0
    expanded_head_elements: int = 0
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    is_encoder_decoder: bool = False
    assumed: tuple[str, ...] = ()

    @cached_property
    def kind_counts(self) -> tuple[tuple[LayerCache, int], ...]:
        """Each distinct cache and how many layers hold it, in order of first appearance."""
        return tuple(Counter(cache for layer in self.layers for cache in layer).items())

    @cached_property
    def kinds(self) -> frozenset[str]:
        return frozenset(cache.kind for cache, _ in self.kind_counts)

    def without_windows(self, max_model_len: int) -> "ModelSpec":
        """The same model with full attention in place of windows, and a context no longer than one."""
        wide = {
            cache: replace(cache, kind="full", window_tokens=None)
            for cache, _ in self.kind_counts
            if cache.kind == "sliding_window"
        }
        return replace(
            self,
            layers=tuple(tuple(wide.get(cache, cache) for cache in layer) for layer in self.layers),
            max_model_len=min(self.max_model_len, max_model_len),
        )

    @property
    def is_attention_free(self) -> bool:
        """Only recurrent layers: vLLM treats these apart (no prefix caching by default)."""
        return bool(self.kinds) and self.kinds == {"state"}

    @property
    def is_hybrid(self) -> bool:
        """Recurrent layers next to attention: vLLM aligns the block size to the state."""
        return "state" in self.kinds and len(self.kinds) > 1

    @property
    def uses_mla(self) -> bool:
        return "mla" in self.kinds
