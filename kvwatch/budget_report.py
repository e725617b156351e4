"""BudgetReport: everything `kvwatch budget` says about one model on one engine, before it is rendered.

`kind: "budget"` of the JSON contract. Every figure has its source: given (a flag or file), derived (a formula), assumed
(a default).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvwatch.budget import Budget, Costs, DoesNotFit, costs_of, plan_for, predict_from
from kvwatch.demand import Arrivals, Mix, Row, mix, row
from kvwatch.engine import EngineConfig, Source
from kvwatch.errors import KvwatchError
from kvwatch.flag_releases import FIRST_RELEASE
from kvwatch.kv_dtypes import element_bytes
from kvwatch.model.spec import LayerCache, ModelSpec
from kvwatch.planning import Plan
from kvwatch.versions import EARLIEST_KNOWN, Version, version_text

_GIB = 1 << 30
_UNSET = EngineConfig()
DEFAULT_CONCURRENCY = (1, 8, 32, 128)
_STATE_BLOCKS_CHECKED_SINCE: Version = (0, 20, 0)
_CONTEXT_STEPS = (2048, 8192, 32768, 131072, 524288)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigure:
    """One part of a GPU's memory, bytes per rank, between two bounds."""

    name: str
    bytes_per_rank: int
    low_bytes: int
    high_bytes: int
    source: Source
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory for the KV cache on each pipeline stage's rank, and how it came about; None where not known."""

    available_kv_cache_bytes_per_rank: tuple[int, ...] | None
    source: Source
    origin: str  # the flag or the calculation, in words
    low_bytes_per_rank: tuple[int, ...] | None = None
    high_bytes_per_rank: tuple[int, ...] | None = None
    device_memory_bytes: int | None = None
    requested_bytes: int | None = None
    terms: tuple[MemoryFigure, ...] = ()
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """vLLM would refuse to start. Bytes per rank."""

    needed_bytes: int
    available_bytes: int
    max_model_len: int
    estimated_max_model_len: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The same layers under another attention or KV dtype: bytes per token and how many times this model's."""

    name: str
    bytes_per_token: int
    ratio: float
    max_concurrency: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetReport:
    model: ModelSpec
    plan: Plan
    costs: Costs
    memory: Memory
    budget: Budget | None
    refusal: Refusal | None
    table: tuple[Row, ...]
    mix: Mix | None
    arrivals: Arrivals | None
    layouts: tuple[Layout, ...]
    remedies: tuple[str, ...]
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        """Whether vLLM would start; None where the memory is not known."""
        return None if self.budget is None else self.refusal is None


def budget_report(
    model: ModelSpec,
    engine: EngineConfig,
    memory: Memory,
    *,
    contexts: Sequence[int] = (),
    concurrencies: Sequence[int] = (),
    mixed: Sequence[tuple[int, int]] = (),
    load: Arrivals | None = None,
    memory_for: Callable[[EngineConfig], Memory] | None = None,
) -> BudgetReport:
    """Raises SettingError or UnsupportedModel; a pool that is too small is a report with a refusal.

    `memory_for` works out the memory under other flags; with it a refusal names the fewest GPUs that would do.
    """
    planned = plan_for(model, engine)
    budget, refusal = None, None
    if memory.available_kv_cache_bytes_per_rank is not None:
        budget, refusal = _judge(planned, memory.available_kv_cache_bytes_per_rank)
    if budget is not None:
        planned = budget.plan
    users = tuple(concurrencies) or _users(load)
    rows = tuple(
        row(planned, budget, context_tokens=tokens, concurrency=count)
        for tokens in tuple(contexts) or default_contexts(planned.engine.max_model_len)
        for count in users
    )
    return BudgetReport(
        model=planned.model,
        plan=planned,
        costs=costs_of(planned),
        memory=memory,
        budget=budget,
        refusal=refusal,
        table=rows,
        mix=mix(planned, budget, mixed) if mixed else None,
        arrivals=load,
        layouts=tuple(_layouts(planned, engine, memory)),
        remedies=_remedies(planned, engine, memory_for) if refusal is not None and memory_for is not None else (),
        warnings=_warnings(planned, engine, budget),
        assumptions=_assumptions(planned, memory),
    )


def _judge(planned: Plan, available: tuple[int, ...]) -> tuple[Budget, Refusal | None]:
    override = planned.engine.num_gpu_blocks_override
    given = None if override is not None and not available else available
    try:
        return predict_from(planned, given), None
    except DoesNotFit as error:
        refusal = Refusal(
            needed_bytes=error.needed_bytes,
            available_bytes=error.available_bytes,
            max_model_len=error.max_model_len,
            estimated_max_model_len=error.estimated_max_model_len,
            text=str(error),
        )
    fixed = replace(planned, engine=replace(planned.engine, auto_fit=False))
    return predict_from(fixed, given, check_fit=False), refusal


def _remedies(planned: Plan, engine: EngineConfig, memory_for: Callable[[EngineConfig], Memory]) -> tuple[str, ...]:
    """The smallest tensor-parallel size, doubling up to 64, with which the same flags fit."""
    ranks = engine.tensor_parallel_size * 2
    while ranks <= 64:
        wider = replace(engine, tensor_parallel_size=ranks)
        try:
            predict_from(plan_for(planned.model, wider), memory_for(wider).available_kv_cache_bytes_per_rank)
        except KvwatchError:  # these flags do not fit or do not divide the model; the next size may
            ranks *= 2
            continue
        return (f"With --tensor-parallel-size {ranks} it fits.",)
    return ()


def _warnings(planned: Plan, engine: EngineConfig, budget: Budget | None) -> tuple[str, ...]:
    """What vLLM refuses before or after it has planned the cache."""
    found = [*_beyond_the_gpu(planned, budget), *_not_in_this_release(engine)]
    asked, most = planned.engine.max_model_len, planned.model.max_model_len
    if asked > most:
        found.append(
            f"--max-model-len {asked} is more than the model's own {most}: vLLM refuses it unless "
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is set or --hf-overrides changes the rope scaling."
        )
    if budget is not None and _lacks_state_blocks(planned, engine, budget):
        found.append(
            f"vLLM refuses to capture CUDA graphs: max_num_seqs {budget.max_num_seqs} exceeds the "
            f"{budget.num_gpu_blocks} blocks, and each running sequence needs one for its state. Give --max-num-seqs "
            f"{budget.num_gpu_blocks} or less."
        )
    return tuple(found)


def _beyond_the_gpu(planned: Plan, budget: Budget | None) -> Iterator[str]:
    device = planned.engine.device
    if budget is None or device is None or not device.memory_bytes:
        return
    pool = budget.num_gpu_blocks * planned.block_bytes_per_rank
    if pool > device.memory_bytes:
        yield (
            f"{pool / _GIB:,.2f} GiB of KV cache per GPU are more than the {device.memory_bytes / _GIB:,.2f} GiB of "
            f"{device.name or 'the GPU'}: vLLM takes the figure as given and then runs out of memory."
        )


def _not_in_this_release(engine: EngineConfig) -> Iterator[str]:
    for name, first in FIRST_RELEASE.items():
        is_given = getattr(engine, name, None) != getattr(_UNSET, name, None)
        if is_given and first > max(engine.vllm_version, EARLIEST_KNOWN):
            yield (
                f"vLLM {version_text(engine.vllm_version)} may not know --{name.replace('_', '-')}: "
                f"{version_text(first)} is the first release read that has it."
            )


def _lacks_state_blocks(planned: Plan, engine: EngineConfig, budget: Budget) -> bool:
    """vllm/config/compilation.py: "max_num_seqs exceeds available Mamba cache blocks"."""
    if "state" not in planned.model.kinds or engine.enforce_eager:
        return False
    return engine.vllm_version >= _STATE_BLOCKS_CHECKED_SINCE and budget.max_num_seqs > budget.num_gpu_blocks


def default_contexts(max_model_len: int) -> tuple[int, ...]:
    """A few lengths up to max_model_len."""
    return (*(step for step in _CONTEXT_STEPS if step < max_model_len), max_model_len)


def _users(load: Arrivals | None) -> tuple[int, ...]:
    """The default columns, or the load's requests in flight, rounded up."""
    if load is None or load.in_flight <= 0:
        return DEFAULT_CONCURRENCY
    return (max(1, -int(-load.in_flight // 1)),)


def _layouts(planned: Plan, engine: EngineConfig, memory: Memory) -> list[Layout]:
    """What the attention's shape saves, and what fp8 would."""
    model, now = planned.model, costs_of(planned).bytes_per_token
    found = []
    attention = next((cache for cache, _ in model.kind_counts if cache.kind in {"full", "mla"}), None)
    if attention is not None and now:
        found += _shapes(planned, attention, now)
    fp8 = _with_fp8(planned, engine, memory)
    if fp8 is not None:
        found.append(fp8)
    return found


def _shapes(planned: Plan, attention: LayerCache, now: int) -> list[Layout]:
    model, engine = planned.model, planned.engine
    heads = model.attention_heads
    layers = sum(count for cache, count in model.kind_counts if cache.kind == attention.kind)
    element = element_bytes(engine.kv_cache_dtype, model_dtype=engine.dtype)
    if attention.kind == "mla":
        expanded = layers * heads * model.expanded_head_elements * element_bytes("auto", model_dtype=engine.dtype)
        found = [Layout(name="this model, latent attention (MLA)", bytes_per_token=now, ratio=1.0)]
        if expanded:
            name = f"as multi-head attention, {heads} heads, {engine.dtype}"
            found.append(Layout(name=name, bytes_per_token=expanded, ratio=expanded / now))
        return found
    pair = attention.head_dim + attention.value_head_dim
    shapes = [("multi-head attention (MHA)", heads), ("multi-query attention (MQA)", 1)]
    mine = "MHA" if attention.kv_heads == heads else "MQA" if attention.kv_heads == 1 else "GQA"
    found = [
        Layout(name=f"this model, {mine}: {attention.kv_heads} of {heads} heads cached", bytes_per_token=now, ratio=1.0)
    ]
    for name, kv_heads in shapes:
        if kv_heads != attention.kv_heads:
            total = layers * kv_heads * pair * element
            found.append(Layout(name=f"as {name}", bytes_per_token=total, ratio=total / now))
    latent = layers * (512 + 64) * element
    found.append(
        Layout(
            name="as latent attention (MLA) of DeepSeek's size",
            bytes_per_token=latent,
            ratio=latent / now,
            note="512 + 64 elements per token and layer, not split over GPUs",
        )
    )
    return found


def _with_fp8(planned: Plan, engine: EngineConfig, memory: Memory) -> Layout | None:
    """The same engine with --kv-cache-dtype fp8: the true factor, after padding, states and windows."""
    if not planned.groups or element_bytes(planned.engine.kv_cache_dtype, model_dtype=planned.engine.dtype) == 1:
        return None
    try:
        other = plan_for(
            planned.model, replace(engine, kv_cache_dtype="fp8", max_model_len=planned.engine.max_model_len)
        )
        cost = costs_of(other)
        concurrency = None
        if memory.available_kv_cache_bytes_per_rank and planned.engine.num_gpu_blocks_override is None:
            concurrency = predict_from(other, memory.available_kv_cache_bytes_per_rank, check_fit=False).max_concurrency
    except KvwatchError:  # a combination that vLLM refuses has no factor to show
        return None
    now = costs_of(planned)
    before = now.bytes_per_token or now.fixed_bytes_per_request
    after = cost.bytes_per_token if now.bytes_per_token else cost.fixed_bytes_per_request
    return Layout(
        name=f"with --kv-cache-dtype {other.engine.kv_cache_dtype}",
        bytes_per_token=cost.bytes_per_token,
        ratio=after / max(1, before),
        max_concurrency=concurrency,
    )


def _assumptions(planned: Plan, memory: Memory) -> tuple[str, ...]:
    engine, model = planned.engine, planned.model
    sources = dict(engine.sources)
    found = list(engine.assumptions)
    if sources.get("vllm_version") == "assumed":
        found.append(f"vLLM {engine.vllm_version}, the newest version read; --vllm-version changes the rules")
    if engine.block_size is None and planned.groups and engine.device is None:
        found.append(
            f"block size {planned.kernels.default} of {planned.kernels.name}; which kernel vLLM picks depends on the "
            "GPU (--gpu)"
        )
    if model.assumed:
        found.append(f"config.json leaves out {', '.join(model.assumed)}; the defaults of its model type hold")
    return (*found, *memory.assumptions)
