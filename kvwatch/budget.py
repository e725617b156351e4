"""Budget: how many blocks a pool has, how many requests it holds, and whether vLLM would start.

`predict` is exact where the memory for the KV cache is known: --kv-cache-memory-bytes, --num-gpu-blocks-override, or
what vLLM logged. From a GPU's total it is as good as the estimate of weights and activations that it is given.
Source: vLLM 0.32.0, vllm/v1/core/kv_cache_utils.py (get_kv_cache_configs, check_enough_kv_cache_memory,
get_max_concurrency_for_kv_cache_config, get_kv_cache_capacity).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvwatch.engine import EngineConfig, ResolvedEngine, resolve
from kvwatch.errors import CapacityError
from kvwatch.model.spec import LayerCache, ModelSpec
from kvwatch.pages import ceil_div, head_token_bytes, heads_per_rank, state_bytes
from kvwatch.planning import Group, Plan, plan

_GIB = 1 << 30


class DoesNotFit(CapacityError):  # noqa: N818 -- reads as the condition it names
    """vLLM would refuse to start: one request of max_model_len does not fit. Bytes are per rank."""

    def __init__(
        self, message: str, *, needed_bytes: int, available_bytes: int, max_model_len: int, estimated_max_model_len: int
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.max_model_len = max_model_len
        self.estimated_max_model_len = estimated_max_model_len


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBudget:
    """One KV-cache group, as reports show it. Bytes are those of the rank with the most layers."""

    kind: str
    num_layers: int
    block_size_tokens: int
    page_bytes_per_layer: int
    block_bytes_per_rank: int
    blocks_per_max_len_request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What tokens and requests cost, whatever the memory. Payload: without padding, block rounding or replication."""

    bytes_per_token: int  # the whole model's payload per cached token at long context
    bytes_per_token_per_rank: int  # on the rank with the most layers
    fixed_bytes_per_request: (
        int  # the whole model's payload that does not grow: windows, chunks, states, encoder output
    )
    block_size_tokens: int
    block_bytes_per_rank: int
    blocks_per_max_len_request: int
    max_model_len: int
    groups: tuple[GroupBudget, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The KV cache of one engine (one data-parallel replica)."""

    num_gpu_blocks: int
    usable_blocks: int  # without the null block that vLLM holds back
    block_size_tokens: int
    blocks_per_max_len_request: int
    max_concurrency: float
    capacity_tokens: int
    bytes_per_token: int
    bytes_per_token_per_rank: int
    fixed_bytes_per_request: int
    block_bytes_per_rank: int
    groups: tuple[GroupBudget, ...]
    max_model_len: int
    max_num_seqs: int
    available_bytes_per_rank: int
    plan: Plan

    @property
    def engine(self) -> ResolvedEngine:
        return self.plan.engine

    def blocks_for_request(self, tokens: int) -> int:
        """Blocks a request of `tokens` tokens (prompt and answer) holds at its peak, over all groups."""
        return self.plan.blocks_for_request(tokens)

    def payload_bytes(self, tokens: int) -> int:
        """Bytes of keys, values and states of such a request over the whole model, without padding or replication."""
        return payload_bytes(self.plan, tokens)


def costs(model: ModelSpec, engine: EngineConfig) -> tuple[Plan, Costs]:
    """The plan and the costs of a model on an engine, memory left open. Raises SettingError, UnsupportedModel."""
    planned = plan_for(model, engine)
    return planned, costs_of(planned)


def plan_for(model: ModelSpec, engine: EngineConfig) -> Plan:
    """The plan of a model on an engine. With --disable-sliding-window the context ends where the window would."""
    windows = [c.window_tokens for c, _ in model.kind_counts if c.kind == "sliding_window" and c.window_tokens]
    if engine.disable_sliding_window and windows:
        model = model.without_windows(min(windows))
    return plan(model, resolve(engine, model))


def predict(model: ModelSpec, engine: EngineConfig, available_bytes: int | Sequence[int] | None = None) -> Budget:
    """The budget of a model on an engine with `available_bytes` for the KV cache on each rank.

    `available_bytes` may differ by pipeline stage; None takes --kv-cache-memory-bytes. --num-gpu-blocks-override needs
    neither. Raises DoesNotFit (with the bytes needed and the length that would fit) where vLLM would refuse to start,
    SettingError or UnsupportedModel where it would refuse the settings or its plan is not known.
    """
    return predict_from(plan_for(model, engine), available_bytes)


def predict_from(
    planned: Plan, available_bytes: int | Sequence[int] | None = None, *, check_fit: bool = True
) -> Budget:
    """`predict` for a plan that is made. Without `check_fit` the pool is worked out even if vLLM would refuse."""
    available = _available(planned, available_bytes)
    engine = planned.engine
    checked = _checkable(planned, available)
    if engine.auto_fit and planned.groups:
        planned = _auto_fitted(planned, checked)
        engine = planned.engine
    if check_fit:
        _check_fit(planned, checked)
    cost = costs_of(planned)
    blocks = _num_blocks(planned, available)
    concurrency = _max_concurrency(planned, cost, blocks)
    return Budget(
        num_gpu_blocks=blocks,
        usable_blocks=max(0, blocks - 1),
        block_size_tokens=cost.block_size_tokens,
        blocks_per_max_len_request=cost.blocks_per_max_len_request,
        max_concurrency=concurrency,
        capacity_tokens=_capacity_tokens(planned, blocks, concurrency),
        bytes_per_token=cost.bytes_per_token,
        bytes_per_token_per_rank=cost.bytes_per_token_per_rank,
        fixed_bytes_per_request=cost.fixed_bytes_per_request,
        block_bytes_per_rank=cost.block_bytes_per_rank,
        groups=cost.groups,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        available_bytes_per_rank=min(available),
        plan=planned,
    )


def _available(planned: Plan, given: int | Sequence[int] | None) -> tuple[int, ...]:
    """KV-cache bytes of each pipeline stage's rank."""
    override = planned.engine.num_gpu_blocks_override
    stages = len(planned.block_bytes)
    if override is not None and (given is None or planned.engine.rules.override_in_fit_check):
        return tuple(override * size for size in planned.block_bytes)
    if given is None:
        given = planned.engine.kv_cache_memory_bytes
    if given is None:
        raise CapacityError(
            "the memory for the KV cache is not known. Give --kv-cache-memory-bytes, --num-gpu-blocks-override, "
            "--gpu NAME or --gpu-memory-gib X."
        )
    if isinstance(given, int):
        return (given,) * stages
    if len(given) != stages:
        raise CapacityError(
            f"{len(given)} memory figures for {stages} pipeline stages; give one for each, or one for all"
        )
    return tuple(given)


def _checkable(planned: Plan, available: tuple[int, ...]) -> tuple[int, ...]:
    """The memory that the start-up check compares: without the null block since 0.29."""
    if not planned.engine.rules.null_block_in_fit_check:
        return available
    return tuple(memory - size for memory, size in zip(available, planned.block_bytes, strict=True))


def _needed(planned: Plan, stage: int, max_model_len: int) -> int:
    return planned.block_bytes[stage] * planned.blocks_at(max_model_len)


def _longest(planned: Plan, stage: int, memory: int) -> int:
    """The longest max_model_len that fits, 0 if none; found by vLLM's binary search."""
    low, high, best = 1, planned.engine.max_model_len, 0
    while low <= high:
        middle = (low + high) // 2
        if _needed(planned, stage, middle) <= memory:
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


def _auto_fitted(planned: Plan, checked: tuple[int, ...]) -> Plan:
    """--max-model-len -1: the longest context that fits every stage."""
    best = min(_longest(planned, stage, memory) for stage, memory in enumerate(checked))
    if best <= 0:
        raise DoesNotFit(
            "--max-model-len -1 finds no length that fits: the KV cache memory does not hold a single token. Raise "
            "--gpu-memory-utilization or use more GPUs.",
            needed_bytes=_needed(planned, 0, 1),
            available_bytes=min(checked),
            max_model_len=planned.engine.max_model_len,
            estimated_max_model_len=0,
        )
    if best >= planned.engine.max_model_len:
        return planned
    return replace(planned, engine=replace(planned.engine, max_model_len=best))


def _check_fit(planned: Plan, checked: tuple[int, ...]) -> None:
    """check_enough_kv_cache_memory, stage by stage."""
    if not planned.groups:
        return
    engine = planned.engine
    for stage, memory in enumerate(checked):
        needed = _needed(planned, stage, engine.max_model_len)
        if needed <= memory:
            continue
        longest = _longest(planned, stage, memory) if memory > 0 else 0
        raise DoesNotFit(
            f"vLLM would refuse to start: one request of max_model_len {engine.max_model_len} needs "
            f"{needed / _GIB:.2f} GiB of KV cache per GPU, {_what_is_there(memory, needed, longest)}",
            needed_bytes=needed,
            available_bytes=memory,
            max_model_len=engine.max_model_len,
            estimated_max_model_len=longest,
        )


def _what_is_there(memory: int, needed: int, longest: int) -> str:
    if memory <= 0:
        return "and weights and activations leave nothing. Use more or larger GPUs, or smaller weights."
    hint = f"the longest --max-model-len that fits is {longest}" if longest else "not even one token fits"
    advice = "Lower --max-model-len, use --kv-cache-dtype fp8, or give the engine more memory or more GPUs."
    short = needed - memory
    close = f" ({short:,} bytes too few, one block being held back)" if short < _GIB // 100 else ""
    return f"and {memory / _GIB:.2f} GiB are there{close}; {hint}. {advice}"


def _num_blocks(planned: Plan, available: tuple[int, ...]) -> int:
    """The smallest stage decides. A model without a cache gets one block, the null block."""
    if not planned.groups:
        return 1
    override = planned.engine.num_gpu_blocks_override
    if override is not None:
        return override
    return max(0, min(memory // size for memory, size in zip(available, planned.block_bytes, strict=True) if size))


def _max_concurrency(planned: Plan, cost: Costs, blocks: int) -> float:
    """Requests of max_model_len that fit at once, as vLLM logs it; the null block counts, as it does there."""
    engine = planned.engine
    if not planned.groups:
        return float(engine.max_num_seqs)
    if engine.rules.concurrency == "tokens":
        return blocks * cost.block_size_tokens / engine.max_model_len
    if engine.rules.concurrency == "bytes":
        layers = max(group.num_layers for group in planned.groups)
        per_request = sum(
            planned.group_blocks(group, engine.max_model_len) * group.page_bytes for group in planned.groups
        )
        return blocks / max(1, ceil_div(layers * per_request, layers * planned.groups[0].page_bytes))
    return blocks / cost.blocks_per_max_len_request


def _capacity_tokens(planned: Plan, blocks: int, concurrency: float) -> int:
    """The figure of vLLM's "KV cache size: N tokens" line; its meaning changed with the version (Rules.tokens_line)."""
    engine = planned.engine
    rule = engine.rules.tokens_line
    if rule == "concurrency" or not planned.groups:
        return int(concurrency * engine.max_model_len)
    block_size = min(group.block_size_tokens for group in planned.groups)
    if rule == "blocks":
        return blocks * block_size
    return blocks // len(planned.groups) * block_size * engine.decode_context_parallel_size


# --- costs ---


def costs_of(planned: Plan) -> Costs:
    model, engine = planned.model, planned.engine
    caches = caches_of(model, engine)
    return Costs(
        bytes_per_token=sum(count * _token_payload(cache, engine) for cache, count in caches if grows(cache, engine)),
        bytes_per_token_per_rank=_token_bytes_per_rank(planned),
        fixed_bytes_per_request=sum(count * _fixed_payload(cache, engine) for cache, count in caches),
        block_size_tokens=planned.block_size_tokens,
        block_bytes_per_rank=planned.block_bytes_per_rank,
        blocks_per_max_len_request=planned.blocks_at(engine.max_model_len),
        max_model_len=engine.max_model_len,
        groups=tuple(_group_budget(planned, group) for group in planned.groups),
    )


def payload_bytes(planned: Plan, tokens: int) -> int:
    """Bytes of keys, values and states of one request of `tokens` tokens, over the whole model."""
    if tokens <= 0:
        return 0
    return sum(
        count * _payload(cache, planned.engine, tokens) for cache, count in caches_of(planned.model, planned.engine)
    )


def caches_of(model: ModelSpec, engine: ResolvedEngine) -> list[tuple[LayerCache, int]]:
    """Each distinct cache and how many layers hold it, draft layers included where the engine loads them."""
    if not engine.has_draft_layers:
        return list(model.kind_counts)
    counts = Counter(dict(model.kind_counts))
    counts.update(cache for layer in model.draft_layers for cache in layer)
    return list(counts.items())


def grows(cache: LayerCache, engine: ResolvedEngine) -> bool:
    """Whether each further token costs memory; a window as wide as max_model_len is none."""
    if cache.window_tokens is not None:
        return cache.window_tokens >= engine.max_model_len
    return cache.kind in {"full", "mla", "mla_indexer"}


def _token_payload(cache: LayerCache, engine: ResolvedEngine) -> int:
    return max(1, cache.kv_heads) * head_token_bytes(cache, engine.kv_cache_dtype, engine)


def _payload(cache: LayerCache, engine: ResolvedEngine, tokens: int) -> int:
    if cache.recurrence is not None:
        return state_bytes(cache.recurrence, _on_one_rank(engine))
    token = _token_payload(cache, engine)
    if cache.kind == "cross":
        return token * engine.max_num_batched_tokens
    return token * (tokens if cache.window_tokens is None else min(tokens, cache.window_tokens))


def _fixed_payload(cache: LayerCache, engine: ResolvedEngine) -> int:
    return 0 if grows(cache, engine) else _payload(cache, engine, engine.max_model_len)


def _on_one_rank(engine: ResolvedEngine) -> ResolvedEngine:
    """The same engine on one tensor-parallel rank: what a state is as a whole."""
    return engine if engine.tensor_parallel_size == 1 else replace(engine, tensor_parallel_size=1)


def _token_bytes_per_rank(planned: Plan) -> int:
    """Bytes per token that one rank holds, on the stage where that is most; context parallelism shares them out."""
    per_stage = [0] * len(planned.block_bytes)
    engine = planned.engine
    for group in planned.groups:
        for page, layers in zip(group.pages, group.stage_layers, strict=True):
            if page.kind != "state" and (page.kind == "full" or grows(page.cache, engine)):
                token = heads_per_rank(page.cache, engine) * head_token_bytes(page.cache, page.dtype, engine)
                per_stage = [total + count * token for total, count in zip(per_stage, layers, strict=True)]
    return ceil_div(max(per_stage, default=0), engine.decode_context_parallel_size)


def _group_budget(planned: Plan, group: Group) -> GroupBudget:
    return GroupBudget(
        kind=group.kind,
        num_layers=group.num_layers,
        block_size_tokens=group.block_size_tokens,
        page_bytes_per_layer=group.page_bytes,
        block_bytes_per_rank=max(group.stage_bytes),
        blocks_per_max_len_request=planned.group_blocks(group, planned.engine.max_model_len),
    )
