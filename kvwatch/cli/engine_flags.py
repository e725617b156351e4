"""Flags that say what kvwatch cannot read from an engine's page, and the facts and the budget made from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from kvwatch.capacity import EngineFacts, live_capacity
from kvwatch.cli.vllm_flags import engine_request, vllm_flags
from kvwatch.errors import CapacityError
from kvwatch.flag_releases import check_supported
from kvwatch.snapshot import CacheConfig
from kvwatch.versions import engine_version, version_text
from kvwatch.vllm_args import left_out
from kvwatch.window import Window

if TYPE_CHECKING:  # the budget side is loaded only where a model is given
    from kvwatch.budget import Budget
    from kvwatch.engine import EngineConfig
    from kvwatch.model import ModelSpec
    from kvwatch.sources.model_files import ModelFiles

_GIVEN = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "watermark")
# What the page says of the engine's own settings fills in what no flag gives.
_FROM_PAGE = ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "enable_prefix_caching")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the command line says of the engines: their flags, and their model if one was given."""

    engine: EngineConfig | None = None
    version_given: bool = False
    files: ModelFiles | None = None
    model: ModelSpec | None = None


NOTHING_GIVEN = Given()


def engine_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """The vLLM flags of the running engine, spelt as vLLM spells them, with --model and --gpu for its budget."""
    return vllm_flags(command)


def given(ctx: click.Context, options: Mapping[str, Any]) -> Given:
    """The options -> what they say. Reads the model's files. Raises SettingError, ModelError or SourceError."""
    if all(value is None for value in options.values()):
        return NOTHING_GIVEN
    request = engine_request(ctx, options)
    if request.ignored:
        click.echo(left_out(request.ignored), err=True)
    version_given = options.get("vllm_version") is not None
    from kvwatch.engine import check_flags

    check_flags(request.engine)
    if version_given and request.engine.watermark:
        # What is simulated is the engine as it runs: not with a flag that its release lacks.
        check_supported(
            "watermark",
            request.engine.vllm_version,
            said=f"--watermark is {request.engine.watermark:g}",
            remedy="Leave one of --watermark and --vllm-version out.",
        )
    if request.model is None:
        return Given(engine=request.engine, version_given=version_given)
    from kvwatch.model import read_model
    from kvwatch.sources.model_files import load_model

    files = load_model(request.model)
    model = read_model(files.config, name=files.name)
    return Given(engine=request.engine, version_given=version_given, files=files, model=model)


def engine_facts(made: Iterable[Window], observed: Mapping[str, EngineFacts], told: Given) -> dict[str, EngineFacts]:
    """Facts per target: what a flag gives wins over what the server tells."""
    windows = {window.key.target: window for window in made}
    return {
        target: _facts(observed.get(target, EngineFacts()), windows.get(target), told)
        for target in set(windows) | set(observed)
    }


def _facts(seen: EngineFacts, window: Window | None, told: Given) -> EngineFacts:
    if told.engine is None:
        return seen
    values = {name: value for name in _GIVEN if (value := getattr(told.engine, name)) is not None and value != -1}
    if told.version_given:
        values["vllm_version"] = version_text(told.engine.vllm_version)
    sources = [(name, origin) for name, origin in seen.sources if name not in values]
    facts = replace(seen, **values, sources=(*sources, *((name, "given") for name in values)))
    if told.model is None or told.files is None or window is None:
        return facts
    engine = _as_running(told.engine, facts, window, version_given=told.version_given)
    return _with_budget(facts, engine, told.model, told.files)


def _with_budget(facts: EngineFacts, engine: EngineConfig, model: ModelSpec, files: ModelFiles) -> EngineFacts:
    from kvwatch.cli.kv_memory import kv_memory

    memory = kv_memory(engine, files, model)
    if memory.available_kv_cache_bytes_per_rank is None:
        return replace(
            facts, budget_problem="give --gpu or --gpu-memory-gib: without memory there is no pool to predict"
        )
    try:
        budget = _predict(model, engine, memory.available_kv_cache_bytes_per_rank)
    except CapacityError as error:
        return replace(facts, budget_problem=f"by the budget vLLM would not have started: {error}")
    low = memory.low_bytes_per_rank

    def budget_under(changes: Mapping[str, Any]) -> Budget:
        changed = replace(engine, **changes)
        available = kv_memory(changed, files, model).available_kv_cache_bytes_per_rank
        return _predict(model, changed, available or ())

    return replace(
        facts,
        budget=budget,
        budget_under=budget_under,
        budget_low_num_gpu_blocks=_predict(model, engine, low, check_fit=False).num_gpu_blocks if low else None,
    )


def _predict(model: ModelSpec, engine: EngineConfig, available: tuple[int, ...], *, check_fit: bool = True) -> Budget:
    from kvwatch.budget import plan_for, predict_from

    return predict_from(plan_for(model, engine), available or None, check_fit=check_fit)


def _as_running(engine: EngineConfig, facts: EngineFacts, window: Window, *, version_given: bool) -> EngineConfig:
    """Flags as given, else what the page says, under the engine's own version."""
    config: CacheConfig = window.latest.cache_config
    unset = [name for name in _FROM_PAGE if getattr(engine, name) is None]
    seen: dict[str, Any] = {name: value for name in unset if (value := getattr(config, name)) is not None}
    longest = live_capacity(config, facts).max_model_len
    if engine.max_model_len in {None, -1} and longest is not None:
        seen["max_model_len"] = longest
    if engine.block_size is None and engine.device is None:
        seen["block_size"] = config.block_size  # which GPU would settle it is not told
    version = engine_version(facts.vllm_version, window.latest.vllm_version_at_least)
    if version is not None and not version_given:
        seen["vllm_version"] = version
    return replace(engine, **seen)
