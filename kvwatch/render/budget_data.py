"""BudgetReport -> the `kind: budget` document: plain mappings and lists, ready for JSON or YAML."""

from dataclasses import asdict, fields
from typing import Any

from kvwatch.budget import Budget, Costs, costs_of
from kvwatch.budget_report import BudgetReport
from kvwatch.model.spec import ModelSpec
from kvwatch.planning import Plan

SCHEMA_VERSION = 1
# Of the resolved engine, what is no flag.
_NO_FLAGS = frozenset({"rules", "device", "sources", "assumptions", "auto_fit", "has_draft_layers", "in_flight_tokens"})


def budget_document(report: BudgetReport, *, explain: bool = False) -> dict[str, Any]:
    """The whole report. `fits` is null where the memory is not known."""
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "budget",
        "fits": report.fits,
        "refusal": None if report.refusal is None else asdict(report.refusal),
        "remedies": list(report.remedies),
        "warnings": list(report.warnings),
        "model": model_data(report.model),
        "engine": engine_data(report.plan),
        "memory": memory_data(report),
        "budget": budget_data(report.costs, report.budget),
        "table": [asdict(row) for row in report.table],
        "mix": None if report.mix is None else asdict(report.mix),
        "arrivals": None if report.arrivals is None else asdict(report.arrivals),
        "layouts": [asdict(layout) for layout in report.layouts],
        "assumptions": list(report.assumptions),
    }
    if explain:
        from kvwatch.budget_explain import steps  # noqa: PLC0415 -- only --explain needs it

        document["explanation"] = [asdict(step) for step in steps(report)]
    return document


def model_data(model: ModelSpec) -> dict[str, Any]:
    layers = [
        {
            "kind": cache.label,
            "count": count,
            "kv_heads": cache.kv_heads or None,
            "head_dim": cache.head_dim or None,
            "window_tokens": cache.window_tokens,
        }
        for cache, count in model.kind_counts
    ]
    layers += [
        {"kind": kind, "count": count, "kv_heads": None, "head_dim": None, "window_tokens": None}
        for kind, count in model.cacheless
    ]
    return {
        "name": model.name,
        "architecture": model.architecture,
        "family": model.family,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "layers": layers,
    }


def engine_data(planned: Plan) -> dict[str, Any]:
    """The flags of vLLM, resolved, and where each that is not a fixed default came from."""
    engine = planned.engine
    named = {field.name: getattr(engine, field.name) for field in fields(engine) if field.name not in _NO_FLAGS}
    named["kv_cache_dtype_skip_layers"] = list(engine.kv_cache_dtype_skip_layers)
    named["block_size"] = planned.block_size_tokens
    device = engine.device
    named["gpu"] = None if device is None else {"name": device.name or None, "memory_bytes": device.memory_bytes}
    named["sources"] = dict(engine.sources)
    return named


def memory_data(report: BudgetReport) -> dict[str, Any]:
    """Bytes on one rank; where pipeline stages differ, the least of them, with all of them beside it."""
    memory = report.memory
    available = memory.available_kv_cache_bytes_per_rank
    if available == () and report.budget is not None:
        available = (report.budget.available_bytes_per_rank,)
    return {
        "available_kv_cache_bytes_per_rank": None if not available else min(available),
        "available_kv_cache_bytes_per_stage": None if not available else list(available),
        "low_bytes_per_rank": None if not memory.low_bytes_per_rank else min(memory.low_bytes_per_rank),
        "high_bytes_per_rank": None if not memory.high_bytes_per_rank else min(memory.high_bytes_per_rank),
        "source": memory.source,
        "origin": memory.origin,
        "device_memory_bytes": memory.device_memory_bytes,
        "requested_bytes": memory.requested_bytes,
        "terms": [asdict(term) for term in memory.terms],
    }


def budget_data(costs: Costs, budget: Budget | None) -> dict[str, Any]:
    """The figures of the pool; those that need the memory are null where it is not known."""
    return {
        "bytes_per_token": costs.bytes_per_token,
        "bytes_per_token_per_rank": costs.bytes_per_token_per_rank,
        "fixed_bytes_per_request": costs.fixed_bytes_per_request,
        "block_size_tokens": costs.block_size_tokens,
        "block_bytes_per_rank": costs.block_bytes_per_rank,
        "num_gpu_blocks": None if budget is None else budget.num_gpu_blocks,
        "usable_blocks": None if budget is None else budget.usable_blocks,
        "blocks_per_max_len_request": costs.blocks_per_max_len_request,
        "max_model_len": costs.max_model_len,
        "max_concurrency": None if budget is None else budget.max_concurrency,
        "capacity_tokens": None if budget is None else budget.capacity_tokens,
        "groups": [asdict(group) for group in costs.groups],
    }


def budget_of(budget: Budget) -> dict[str, Any]:
    """A budget on its own, for reports that hold one: the same figures as in the budget document."""
    return budget_data(costs_of(budget.plan), budget)
