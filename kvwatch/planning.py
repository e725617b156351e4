"""Planning the KV cache as vLLM plans it: pages, groups, bytes per block, and what a request takes.

    page    the memory of one block in one layer
    group   layers that share a block table; a block id belongs to one group at a time
    block   one page in every layer of its group; all groups draw from one pool, so a request costs the sum over groups

Steps, as in vLLM 0.32.0, vllm/v1/core/kv_cache_utils.py (get_kv_cache_groups) and vllm/platforms/interface.py:
choose the block size, align it where recurrent states are larger than an attention page, size each layer's page, bring
all pages to one size, group the layers, and split them over pipeline stages.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

from kvwatch.backends import Kernels, kernels_for
from kvwatch.engine import ResolvedEngine
from kvwatch.errors import UnsupportedModel
from kvwatch.model.spec import LayerCache, ModelSpec
from kvwatch.pages import Page, PageSizes, ceil_div

# Kinds that keep every token, and may therefore share one block table.
_ALL_TOKENS = frozenset({"full", "mla", "mla_indexer"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers with one block table. `stage_bytes` is the memory of one block on each pipeline stage's rank."""

    kind: str
    num_layers: int
    block_size_tokens: int
    page_bytes: int
    pages: tuple[Page, ...]
    stage_layers: tuple[tuple[int, ...], ...]  # for each page, the layers that have it on each pipeline stage
    stage_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that does not depend on how much memory there is."""

    model: ModelSpec
    engine: ResolvedEngine
    kernels: Kernels
    block_size_tokens: int
    groups: tuple[Group, ...]
    block_bytes: tuple[int, ...]  # of one block on each pipeline stage's rank
    layers_per_stage: tuple[int, ...]

    @property
    def block_bytes_per_rank(self) -> int:
        """Bytes of one block on the rank that holds the most layers."""
        return max(self.block_bytes, default=0)

    def blocks_at(self, max_model_len: int) -> int:
        """Blocks vLLM counts for one request of that length: what its concurrency and fit check use."""
        return sum(self.group_blocks(group, max_model_len) for group in self.groups)

    def group_blocks(self, group: Group, max_model_len: int) -> int:
        return max(_blocks(page, self.engine, max_model_len) for page in group.pages)

    def blocks_for_request(self, tokens: int) -> int:
        """Blocks that a request of `tokens` tokens (prompt and answer) holds at its peak.

        A window layer of a short request holds the request's own blocks, not the cap that `blocks_at` counts.
        """
        if tokens <= 0:
            return 0
        return sum(max(_held(page, self.engine, tokens) for page in group.pages) for group in self.groups)


def _blocks(page: Page, engine: ResolvedEngine, tokens: int) -> int:
    """max_memory_usage_bytes / page_size_bytes of vLLM's spec (vllm/v1/kv_cache_interface.py)."""
    size, window = page.block_size, page.cache.window_tokens
    if page.kind in _ALL_TOKENS:
        return ceil_div(ceil_div(tokens, engine.decode_context_parallel_size), size)
    if page.kind == "sliding_window" and window is not None:
        return ceil_div(min(window - 1 + engine.in_flight_tokens, tokens), size) + 1
    if page.kind == "chunked_local" and window is not None:
        return ceil_div(min(window + engine.in_flight_tokens, tokens), size)
    if page.kind == "cross":
        return ceil_div(engine.max_num_batched_tokens, size)
    return _state_blocks(page, engine, tokens)


def _state_blocks(page: Page, engine: ResolvedEngine, tokens: int) -> int:
    spare = engine.num_speculative_tokens
    if engine.mamba_cache_mode == "all":
        return ceil_div(tokens, page.block_size) + spare
    if engine.mamba_cache_mode != "align":
        return 1 + spare
    recurrence = page.cache.recurrence
    is_mamba2 = recurrence is not None and recurrence.name == "mamba2"
    return 2 + spare + int(is_mamba2 and engine.rules.mamba2_checkpoint_block)


def _held(page: Page, engine: ResolvedEngine, tokens: int) -> int:
    """Blocks a running request holds: never more than its own tokens need."""
    cap = _blocks(page, engine, tokens)
    if page.kind in {"sliding_window", "chunked_local"}:
        return min(cap, ceil_div(tokens, page.block_size))
    return cap


def plan(model: ModelSpec, engine: ResolvedEngine) -> Plan:
    """The plan of a model on an engine.

    Raises SettingError where vLLM would refuse the settings, UnsupportedModel where its planning is not known.
    """
    kernels = kernels_for(model, engine)
    sizes = PageSizes(model, engine, kernels)
    stages = _stages(model, engine, sizes)
    groups = _groups(stages, engine)
    block_bytes = tuple(max((group.stage_bytes[stage] for group in groups), default=0) for stage in range(len(stages)))
    attention = [group.block_size_tokens for group in groups if group.kind not in _STATE_NAMES]
    # vllm/v1/engine/core.py: the smallest attention block, and where there is none the smallest of all
    block_size = min(attention or [group.block_size_tokens for group in groups], default=sizes.block_size)
    return Plan(
        model=model,
        engine=engine,
        kernels=kernels,
        block_size_tokens=block_size,
        groups=groups,
        block_bytes=block_bytes,
        layers_per_stage=tuple(len(stage) for stage in stages),
    )


_STATE_NAMES = frozenset({"mamba1", "mamba2", "gated_delta_net", "kda", "linear_attention", "short_conv"})


# --- layers and stages ---


def _stages(model: ModelSpec, engine: ResolvedEngine, sizes: PageSizes) -> list[list[Page]]:
    """The pages of each pipeline stage, in layer order; draft layers lie on the last stage."""
    pages: dict[tuple[LayerCache, str], Page] = {}

    def page_of(cache: LayerCache, layer: int) -> Page:
        skip = sizes.skipped and (
            str(layer) in sizes.skipped or (cache.kind == "sliding_window" and "sliding_window" in sizes.skipped)
        )
        key = (cache, "auto" if skip else engine.kv_cache_dtype)
        if key not in pages:
            pages[key] = sizes.page(*key)
        return pages[key]

    stages: list[list[Page]] = []
    layer = 0
    for count in stage_sizes(len(model.layers), engine.pipeline_parallel_size):
        stages.append([page_of(cache, n) for n in range(layer, layer + count) for cache in model.layers[n]])
        layer += count
    if engine.has_draft_layers:
        stages[-1] += [page_of(cache, layer) for draft in model.draft_layers for cache in draft]
    return stages


def stage_sizes(layers: int, stages: int) -> list[int]:
    """Layers per pipeline stage; a remainder goes to the stages before the last (vllm/distributed/utils.py)."""
    sizes = [layers // stages] * stages
    for back in range(2, layers % stages + 2):
        sizes[-back] += 1
    return sizes


# --- grouping ---


def _groups(stages: list[list[Page]], engine: ResolvedEngine) -> tuple[Group, ...]:
    """get_kv_cache_groups: one group if the layers agree, else pages of one size in groups of equal length."""
    layers = [(stage, page) for stage, pages in enumerate(stages) for page in pages]
    if not layers:
        return ()
    if engine.disable_hybrid_kv_cache_manager:
        layers = _promoted(layers)
    if _share_table({page for _, page in layers}):
        return (_group(layers, len(stages)),)
    layers = _unified(layers)
    buckets: dict[Page, list[tuple[int, Page]]] = defaultdict(list)
    for stage, page in layers:
        buckets[page].append((stage, page))
    size = _group_size([len(bucket) for bucket in buckets.values()], engine.rules.padding_ratio)
    groups = []
    for bucket in buckets.values():
        count = ceil_div(len(bucket), size)
        groups += [_group(bucket[number::count], len(stages)) for number in range(count)]
    return tuple(groups)


def _group_size(lengths: list[int], padding_ratio: float | None) -> int:
    smallest, largest = min(lengths), max(lengths)
    return largest if padding_ratio is not None and largest < smallest * padding_ratio else smallest


def _group(layers: list[tuple[int, Page]], stages: int) -> Group:
    counts: dict[Page, list[int]] = {}
    for stage, page in layers:
        counts.setdefault(page, [0] * stages)[stage] += 1
    pages = tuple(counts)
    first = pages[0]
    return Group(
        kind=" + ".join(dict.fromkeys(page.cache.label if page.kind == "state" else page.kind for page in pages)),
        num_layers=len(layers),
        block_size_tokens=first.block_size,
        page_bytes=first.page_bytes,
        pages=pages,
        stage_layers=tuple(tuple(layers_of) for layers_of in counts.values()),
        stage_bytes=tuple(
            sum(layers_of[stage] * page.page_bytes for page, layers_of in counts.items()) for stage in range(stages)
        ),
    )


def _share_table(pages: set[Page]) -> bool:
    """Whether one block table serves all: equal pages, or pages of the same need (UniformTypeKVCacheSpecs)."""
    if len(pages) == 1:
        return True
    first = next(iter(pages))
    if any(page.block_size != first.block_size for page in pages):
        return False
    if first.kind in _ALL_TOKENS:
        return all(page.kind in _ALL_TOKENS for page in pages)
    if first.kind in {"sliding_window", "chunked_local"}:
        return all(page.kind == first.kind and page.cache.window_tokens == first.cache.window_tokens for page in pages)
    return all(page.kind == first.kind and page.page_bytes == first.page_bytes for page in pages)


def _promoted(layers: list[tuple[int, Page]]) -> list[tuple[int, Page]]:
    """unify_hybrid_kv_cache_specs: next to full layers, windows and chunks are planned as full attention."""
    kinds = {page.kind for _, page in layers}
    if not kinds & _ALL_TOKENS or not kinds & {"sliding_window", "chunked_local"}:
        return layers
    full_sizes = {page.block_size for _, page in layers if page.kind in _ALL_TOKENS}
    size = next(iter(full_sizes)) if len(full_sizes) == 1 else None
    done = {page: _as_full(page, size or page.block_size) for page in {page for _, page in layers}}
    return [(stage, done[page]) for stage, page in layers]


def _as_full(page: Page, block_size: int) -> Page:
    if page.kind not in {"sliding_window", "chunked_local"}:
        return page
    payload = page.payload_bytes * block_size // page.block_size
    padded = page.page_bytes if page.page_bytes > page.payload_bytes else 0
    plain = replace(page.cache, kind="full", window_tokens=None)
    return Page("full", block_size, max(payload, padded), payload, plain, page.dtype)


def _unified(layers: list[tuple[int, Page]]) -> list[tuple[int, Page]]:
    """unify_kv_cache_spec_page_size: a smaller page gets more tokens, or padding where that does not divide."""
    pages = {page for _, page in layers}
    largest = max(page.page_bytes for page in pages)
    done = {page: _grown(page, largest) for page in pages}
    return [(stage, done[page]) for stage, page in layers]


def _grown(page: Page, largest: int) -> Page:
    if page.page_bytes == largest:
        return page
    if page.kind == "state":
        return replace(page, page_bytes=largest)
    if largest % page.page_bytes == 0:
        ratio = largest // page.page_bytes
        return replace(
            page, block_size=page.block_size * ratio, page_bytes=largest, payload_bytes=page.payload_bytes * ratio
        )
    if page.kind in {"mla", "mla_indexer"}:
        raise UnsupportedModel(
            f"a latent-attention page of {page.page_bytes} bytes does not divide the largest page of {largest} bytes, "
            "and vLLM cannot pad it; how it then plans is not known to kvwatch. Try another --block-size."
        )
    return replace(page, page_bytes=largest)
