"""How a budget came about, step by step: the formula with this model's numbers, its source, and where the rule is.

Sources of figures: given (a flag or a file), derived (a formula), assumed (a default).
"""

from dataclasses import dataclass

from kvwatch.budget_report import BudgetReport
from kvwatch.engine import Source
from kvwatch.model.spec import LayerCache
from kvwatch.pages import head_token_bytes, heads_per_rank, state_bytes
from kvwatch.planning import Group, Plan

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the calculation. `rule` names vLLM's file, or the formula's origin."""

    what: str
    formula: str
    source: Source
    rule: str


def steps(report: BudgetReport) -> tuple[Step, ...]:
    """Every step from the config to the concurrency, in the order vLLM takes them."""
    planned = report.plan
    found = [_settings(planned), *(_layer(planned, cache, count) for cache, count in report.model.kind_counts)]
    found += [_block_size(planned), *(_group(planned, number, group) for number, group in enumerate(planned.groups, 1))]
    if report.memory.available_kv_cache_bytes_per_rank is not None:
        found += [_memory(report), *_pool(report)]
    return tuple(found)


def _settings(planned: Plan) -> Step:
    engine = planned.engine
    origin = dict(engine.sources)
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_concurrent_batches", "kv_cache_dtype")
    listed = ", ".join(f"{name} {getattr(engine, name)} ({origin.get(name, 'derived')})" for name in names)
    return Step(
        what=f"Settings of vLLM {engine.vllm_version}",
        formula=listed,
        source="derived",
        rule="vllm/engine/arg_utils.py, get_batch_defaults; vllm/config/vllm.py, max_concurrent_batches",
    )


def _layer(planned: Plan, cache: LayerCache, count: int) -> Step:
    engine = planned.engine
    if cache.recurrence is not None:
        size = state_bytes(cache.recurrence, engine)
        return Step(
            what=f"{count} {cache.label} layers",
            formula=f"one state of {size:,} bytes per request and layer on each rank, whatever the context",
            source="derived",
            rule="vllm/model_executor/layers/mamba/mamba_utils.py, MambaStateShapeCalculator",
        )
    token = head_token_bytes(cache, engine.kv_cache_dtype, engine)
    heads = heads_per_rank(cache, engine)
    what = f"{count} {cache.label} layers"
    if cache.kind in {"mla", "mla_indexer"}:
        formula = f"one vector of {token:,} bytes per token and layer, whole on every rank"
        return Step(what=what, formula=formula, source="derived", rule=_RULES[cache.kind])
    split = f"max(1, {cache.kv_heads} // {engine.tensor_parallel_size}) = {heads} KV heads on a rank"
    formula = f"{split}; {heads} × {token:,} bytes per token and layer"
    if cache.window_tokens is not None:
        formula += f", for {cache.window_tokens:,} tokens and those in flight"
    return Step(what=what, formula=formula, source="derived", rule=_RULES[cache.kind])


_SPECS = "vllm/v1/kv_cache_interface.py, "
_RULES = {
    "full": _SPECS + "FullAttentionSpec",
    "sliding_window": _SPECS + "SlidingWindowSpec",
    "chunked_local": _SPECS + "ChunkedLocalAttentionSpec",
    "mla": _SPECS + "MLAAttentionSpec",
    "mla_indexer": "vllm/model_executor/models/deepseek_v2.py, Indexer",
    "cross": _SPECS + "CrossAttentionSpec",
}


def _block_size(planned: Plan) -> Step:
    engine, kernels = planned.engine, planned.kernels
    given = engine.block_size is not None
    formula = f"{engine.block_size} (--block-size)" if given else f"{kernels.default}, what {kernels.name} kernels take"
    if planned.block_size_tokens != (engine.block_size or kernels.default) and planned.groups:
        formula += f"; raised to {planned.block_size_tokens} so that pages of all kinds get one size"
    source: Source = "given" if given else "derived" if engine.device else "assumed"
    return Step(
        what="Block size in tokens",
        formula=formula,
        source=source,
        rule="vllm/platforms/interface.py, update_block_size_for_backend",
    )


def _group(planned: Plan, number: int, group: Group) -> Step:
    engine = planned.engine
    blocks = planned.group_blocks(group, engine.max_model_len)
    formula = (
        f"{group.num_layers} {group.kind} layers, blocks of {group.block_size_tokens} tokens, "
        f"{max(group.stage_bytes):,} bytes per block and rank; {blocks:,} blocks for {engine.max_model_len:,} tokens"
    )
    return Step(
        what=f"KV cache group {number} of {len(planned.groups)}",
        formula=formula,
        source="derived",
        rule="vllm/v1/core/kv_cache_utils.py, get_kv_cache_groups",
    )


def _memory(report: BudgetReport) -> Step:
    memory = report.memory
    available = memory.available_kv_cache_bytes_per_rank or (0,)
    parts = [f"{term.name} {term.bytes_per_rank / _GIB:.2f}" for term in memory.terms]
    formula = f"{min(available) / _GIB:.2f} GiB per GPU: {memory.origin}"
    if memory.requested_bytes is not None and parts:
        formula += f"; {memory.requested_bytes / _GIB:.2f} GiB claimed − " + " − ".join(parts)
    return Step(
        what="Memory for the KV cache",
        formula=formula,
        source=memory.source,
        rule="vllm/v1/worker/gpu_worker.py, determine_available_memory",
    )


def _pool(report: BudgetReport) -> list[Step]:
    budget = report.budget
    if budget is None:
        return []
    engine, rules = budget.engine, budget.engine.rules
    available = budget.available_bytes_per_rank
    if engine.num_gpu_blocks_override is not None:
        blocks = f"{budget.num_gpu_blocks:,} (--num-gpu-blocks-override)"
    else:
        blocks = f"{available:,} // {budget.block_bytes_per_rank:,} = {budget.num_gpu_blocks:,}"
    check = "without one block" if rules.null_block_in_fit_check else "with every block"
    return [
        Step(
            what="Blocks",
            formula=f"{blocks}, of which vLLM holds one back (the null block)",
            source="derived",
            rule=f"vllm/v1/core/kv_cache_utils.py, get_kv_cache_config_from_groups; the fit check counts {check}",
        ),
        Step(
            what="Maximum concurrency",
            formula=f"{budget.num_gpu_blocks:,} / {budget.blocks_per_max_len_request:,} = {budget.max_concurrency:.2f}",
            source="derived",
            rule=_CONCURRENCY[rules.concurrency],
        ),
        Step(
            what="KV cache size in tokens, as vLLM logs it",
            formula=f"{budget.capacity_tokens:,}",
            source="derived",
            rule=_TOKENS[rules.tokens_line],
        ),
    ]


_CONCURRENCY = {
    "groups": "blocks over the sum of each group's blocks (since 0.28)",
    "bytes": "blocks over ceil(bytes of a request / bytes of a block) (0.9 to 0.27)",
    "tokens": "tokens over max_model_len (up to 0.8)",
}
_TOKENS = {
    "concurrency": "int(maximum concurrency × max_model_len) (since 0.20)",
    "groups": "blocks // groups × block size (0.11 to 0.19)",
    "blocks": "blocks × block size (up to 0.10)",
}
