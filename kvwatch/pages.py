"""Page sizes: the memory of one block in one layer on one rank, and the block size that vLLM settles on.

Where recurrent layers lie next to attention, vLLM raises the block size until an attention page is as large as a state;
where some layers are left unquantised, until a quantised page covers an unquantised one.
Source: vLLM 0.32.0, vllm/v1/kv_cache_interface.py (AttentionSpec, MambaSpec), vllm/platforms/interface.py
(_align_hybrid_block_size, _align_heterogeneous_kv_block_size).
"""

from dataclasses import dataclass

from kvwatch.backends import Kernels
from kvwatch.engine import ResolvedEngine
from kvwatch.errors import SettingError
from kvwatch.kv_dtypes import ELEMENT_BYTES, element_bytes, is_packed, latent_token_bytes, token_bytes
from kvwatch.model.spec import Kind, LayerCache, ModelSpec, Recurrence


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)


@dataclass(frozen=True, slots=True)
class Page:
    """A layer's page: vLLM's KVCacheSpec. Two layers with equal pages are planned alike.

    `kind` is the planned kind: a window planned as full attention is `full`. `payload_bytes` is what of `page_bytes`
    is not padding.
    """

    kind: Kind
    block_size: int
    page_bytes: int
    payload_bytes: int
    cache: LayerCache
    dtype: str


def heads_per_rank(cache: LayerCache, engine: ResolvedEngine) -> int:
    """KV heads on one rank: split over tensor parallelism, at least one (then replicated); a latent is never split."""
    if cache.kind in {"mla", "mla_indexer"}:
        return 1
    return max(1, cache.kv_heads // engine.tensor_parallel_size)


def head_token_bytes(cache: LayerCache, dtype: str, engine: ResolvedEngine) -> int:
    """Bytes of one token in one head of one layer. Index keys are stored as fp8 with scales whatever the KV dtype."""
    if cache.kind == "mla_indexer":
        return cache.head_dim
    if cache.kind == "mla":
        return latent_token_bytes(dtype, cache.head_dim, engine.dtype)
    return token_bytes(dtype, cache.head_dim, cache.value_head_dim, engine.dtype)


def state_bytes(recurrence: Recurrence, engine: ResolvedEngine) -> int:
    """Bytes of one recurrent state on one rank (vllm/model_executor/layers/mamba/mamba_utils.py)."""
    ranks = engine.tensor_parallel_size
    conv_dtype = engine.dtype if engine.mamba_cache_dtype == "auto" else engine.mamba_cache_dtype
    state_dtype = engine.mamba_ssm_cache_dtype
    if state_dtype == "auto":
        state_dtype = recurrence.state_dtype or conv_dtype
    conv = recurrence.conv_elements(tensor_parallel_size=ranks, num_speculative_tokens=engine.num_speculative_tokens)
    return conv * _state_element(conv_dtype) + recurrence.state_elements(tensor_parallel_size=ranks) * _state_element(
        state_dtype
    )


def _state_element(dtype: str) -> int:
    if dtype not in ELEMENT_BYTES:
        raise SettingError(
            f"the state dtype {dtype!r} is unknown; --mamba-cache-dtype and --mamba-ssm-cache-dtype take float16, "
            "bfloat16 or float32"
        )
    return ELEMENT_BYTES[dtype]


class PageSizes:
    """Block size and page sizes of one model on one engine, worked out once."""

    def __init__(self, model: ModelSpec, engine: ResolvedEngine, kernels: Kernels) -> None:
        self.engine = engine
        self.kernels = kernels
        self.block_size = engine.block_size or kernels.default
        self.shared_page: int | None = None  # what pages of skipped window layers are padded to
        self.state_page: int | None = None  # what states are padded to
        self.state_block_size = engine.max_model_len if engine.mamba_cache_mode == "none" else self.block_size
        self.skipped = skipped_layers(model, engine)
        attention = next((cache for cache, _ in model.kind_counts if cache.kind not in {"state", "mla_indexer"}), None)
        if attention is not None:
            if model.is_hybrid:
                self._align_to_state(model, attention)
            if self.skipped and not model.is_hybrid:
                self._align_to_skipped(attention)

    def _align_to_state(self, model: ModelSpec, attention: LayerCache) -> None:
        """Platform._align_hybrid_block_size: an attention page at least as large as a state, states padded to it."""
        engine = self.engine
        states = [state_bytes(c.recurrence, engine) for c, _ in model.kind_counts if c.recurrence is not None]
        largest = max(states)
        token = heads_per_rank(attention, engine) * head_token_bytes(attention, engine.kv_cache_dtype, engine)
        align = max(self.kernels.smallest, self.block_size)
        if model.uses_mla:
            align = max(align, 128)
        needed = align * ceil_div(largest, align * token)
        self.block_size = max(self.block_size, self.kernels.smallest * ceil_div(needed, self.kernels.smallest))
        if engine.mamba_cache_mode == "align":
            self.state_block_size = self.block_size
        self.state_page = self.block_size * token

    def _align_to_skipped(self, attention: LayerCache) -> None:
        """Platform._align_heterogeneous_kv_block_size: quantised layers next to layers left in the model's dtype."""
        engine = self.engine
        heads = heads_per_rank(attention, engine)
        wide = heads * token_bytes("auto", attention.head_dim, attention.value_head_dim, engine.dtype)
        # vLLM asks the first layer's backend, which does not pack: one byte per element.
        dims = attention.head_dim + attention.value_head_dim
        packs = not is_packed(engine.kv_cache_dtype)
        narrow = heads * (
            head_token_bytes(attention, engine.kv_cache_dtype, engine)
            if packs
            else dims * element_bytes(engine.kv_cache_dtype, model_dtype=engine.dtype)
        )
        if wide <= narrow:
            return
        step = max(self.kernels.smallest, self.block_size)
        self.block_size = max(self.block_size, step * ceil_div(wide * self.kernels.smallest, step * narrow))
        self.shared_page = self.block_size * narrow

    def page(self, cache: LayerCache, dtype: str) -> Page:
        if cache.recurrence is not None:
            payload = state_bytes(cache.recurrence, self.engine)
            return Page("state", self.state_block_size, max(payload, self.state_page or 0), payload, cache, "auto")
        token = heads_per_rank(cache, self.engine) * head_token_bytes(cache, dtype, self.engine)
        size = self.block_size
        if cache.kind == "sliding_window":
            size = self.kernels.largest_within(self.shared_page // token if self.shared_page else size)
            return Page(cache.kind, size, max(size * token, self.shared_page or 0), size * token, cache, dtype)
        return Page(cache.kind, size, size * token, size * token, cache, dtype)


def skipped_layers(model: ModelSpec, engine: ResolvedEngine) -> frozenset[str]:
    """Layers left in the model's dtype: those of --kv-cache-dtype-skip-layers, and the first and last two of a model
    without recurrent layers for packed formats (TurboQuantConfig.get_boundary_skip_layers).
    """
    skipped = set(engine.kv_cache_dtype_skip_layers)
    if is_packed(engine.kv_cache_dtype) and not model.is_hybrid:
        count = len(model.layers)
        edge = min(2, count // 2)
        skipped |= {str(index) for index in (*range(edge), *range(count - edge, count))}
    return frozenset(skipped)
