"""Would it start, what is the least that makes it start, and which single change would.

Everything is answered by predicting: a `Predict` takes the flags and returns the budget, or raises CapacityError where
vLLM would refuse. So the answers agree with `kvwatch budget` by construction.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvwatch.budget import Budget, DoesNotFit, predict
from kvwatch.engine import Device, EngineConfig, resolve
from kvwatch.errors import CapacityError, KvwatchError
from kvwatch.gpu import GPUS, Gpu
from kvwatch.memory import plan_memory
from kvwatch.model.spec import ModelSpec

Predict = Callable[[EngineConfig], Budget]
Setting = Literal["max_model_len", "gpu_memory_utilization", "kv_cache_dtype", "tensor_parallel_size", "gpu"]

_TENSOR_PARALLEL_SIZES = (2, 4, 8, 16)
_HIGHEST_UTILIZATION = 98  # per cent; above it little is left for what vLLM does not count
_LARGEST_POOL_BYTES = 1 << 44
_NOT_PROPOSED = frozenset({"NVIDIA GB10"})  # a desktop computer, whose memory is the CPU's too


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One change with which the engine starts, all else as given: a setting, its value, and the budget it gives."""

    setting: Setting
    value: int | float | str
    budget: Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatFits:
    """`budget` is that of the flags as given, None where vLLM would refuse them, for the reason in `refusal`.

    `minimum_kv_cache_bytes` is the least --kv-cache-memory-bytes (per GPU) with which one request of max_model_len
    fits, None where no size would do; `shortfall_bytes` is what is missing on the first pipeline stage that is short, 0
    where it fits and None where the refusal is another. `fits` holds for each setting the nearest value that fits, in
    the order in which one would try them.
    """

    budget: Budget | None
    refusal: str | None
    minimum_kv_cache_bytes: int | None
    shortfall_bytes: int | None
    fits: tuple[Fit, ...]


def predictor(config: Mapping[str, Any], model: ModelSpec, *, checkpoint_bytes: int | None = None) -> Predict:
    """A `Predict` for one model: its memory from the flags or the GPU, its budget from both.

    `config` is the parsed config.json that `model` was read from.
    """

    def predict_engine(engine: EngineConfig) -> Budget:
        resolved = resolve(engine, model)
        if resolved.num_gpu_blocks_override is not None and resolved.device is None:
            return predict(model, engine)
        memory = plan_memory(config, engine, resolved, name=model.name, checkpoint_bytes=checkpoint_bytes)
        return predict(model, engine, memory.available_kv_cache_bytes_per_rank)

    return predict_engine


def what_fits(engine: EngineConfig, predict_engine: Predict, *, gpus: Iterable[Gpu] = GPUS) -> WhatFits:
    """The budget of these flags, and what would make them fit where they do not.

    Errors other than CapacityError (settings vLLM refuses, an unknown model) are raised as they come.
    """
    budget, refusal, shortfall = _tried(engine, predict_engine)
    minimum = minimum_kv_cache_bytes(engine, predict_engine)
    fits = (
        _longest_context(engine, predict_engine),
        _utilization(engine, predict_engine) if budget is None else None,
        _dtype(engine, predict_engine) if budget is None else None,
        _tensor_parallel(engine, predict_engine) if budget is None else None,
        _gpu(engine, predict_engine, gpus) if budget is None else None,
    )
    return WhatFits(
        budget=budget,
        refusal=refusal,
        minimum_kv_cache_bytes=minimum,
        shortfall_bytes=shortfall,
        fits=tuple(fit for fit in fits if fit is not None),
    )


def minimum_kv_cache_bytes(engine: EngineConfig, predict_engine: Predict) -> int | None:
    """The least --kv-cache-memory-bytes with which vLLM starts, to the byte; None where none up to 16 TiB does."""

    def starts(size: int) -> bool:
        return (
            _budget(replace(engine, kv_cache_memory_bytes=size, num_gpu_blocks_override=None), predict_engine)
            is not None
        )

    return _least(starts, 1, _LARGEST_POOL_BYTES)


def _tried(engine: EngineConfig, predict_engine: Predict) -> tuple[Budget | None, str | None, int | None]:
    """The budget, or the refusal; and the bytes per rank that are missing on the first stage that is short."""
    try:
        return predict_engine(engine), None, 0
    except DoesNotFit as error:
        return None, str(error), error.needed_bytes - error.available_bytes
    except CapacityError as error:
        return None, str(error), None


def _budget(engine: EngineConfig, predict_engine: Predict) -> Budget | None:
    try:
        return predict_engine(engine)
    except CapacityError:
        return None


def _allowed(engine: EngineConfig, predict_engine: Predict) -> Budget | None:
    """As `_budget`, for a change that vLLM may refuse for other reasons: heads that do not divide, an unknown dtype."""
    try:
        return predict_engine(engine)
    except KvwatchError:
        return None


def _least(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """The least whole number in low..high at which `holds`, given that it then holds for all above."""
    if low > high or not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return high


def _longest_context(engine: EngineConfig, predict_engine: Predict) -> Fit | None:
    """The largest --max-model-len that starts, up to the one asked for (or the model's own)."""
    auto = _budget(replace(engine, max_model_len=-1), predict_engine)
    if auto is None:
        return None
    wanted = engine.max_model_len
    best = auto.max_model_len if wanted is None or wanted == -1 else min(auto.max_model_len, wanted)
    budget = _budget(replace(engine, max_model_len=best), predict_engine)
    return None if budget is None else Fit(setting="max_model_len", value=best, budget=budget)


def _utilization(engine: EngineConfig, predict_engine: Predict) -> Fit | None:
    """The least --gpu-memory-utilization in whole per cent, up to 0.98."""
    if engine.device is None or engine.kv_cache_memory_bytes is not None or engine.num_gpu_blocks_override is not None:
        return None
    now = engine.gpu_memory_utilization

    def at(percent: int) -> EngineConfig:
        return replace(engine, gpu_memory_utilization=percent / 100)

    lowest = int((now if now is not None else 0.9) * 100)
    percent = _least(lambda value: _budget(at(value), predict_engine) is not None, lowest, _HIGHEST_UTILIZATION)
    budget = None if percent is None else _budget(at(percent), predict_engine)
    if percent is None or budget is None:
        return None
    return Fit(setting="gpu_memory_utilization", value=percent / 100, budget=budget)


def _dtype(engine: EngineConfig, predict_engine: Predict) -> Fit | None:
    if engine.kv_cache_dtype not in {"auto", "bfloat16", "float16"}:
        return None
    budget = _allowed(replace(engine, kv_cache_dtype="fp8"), predict_engine)
    return None if budget is None else Fit(setting="kv_cache_dtype", value="fp8", budget=budget)


def _tensor_parallel(engine: EngineConfig, predict_engine: Predict) -> Fit | None:
    for ranks in _TENSOR_PARALLEL_SIZES:
        if ranks <= engine.tensor_parallel_size:
            continue
        budget = _allowed(replace(engine, tensor_parallel_size=ranks), predict_engine)
        if budget is not None:
            return Fit(setting="tensor_parallel_size", value=ranks, budget=budget)
    return None


def _gpu(engine: EngineConfig, predict_engine: Predict, gpus: Iterable[Gpu]) -> Fit | None:
    """The GPU with the least memory that fits."""
    if engine.device is None or engine.kv_cache_memory_bytes is not None or engine.num_gpu_blocks_override is not None:
        return None
    now = engine.device.memory_bytes
    larger = [gpu for gpu in gpus if gpu.memory_bytes > now and gpu.name not in _NOT_PROPOSED]
    for gpu in sorted(larger, key=lambda gpu: gpu.memory_bytes):
        device = Device(name=gpu.name, memory_bytes=gpu.memory_bytes, capability=gpu.capability)
        budget = _allowed(replace(engine, device=device), predict_engine)
        if budget is not None:
            return Fit(setting="gpu", value=gpu.name, budget=budget)
    return None
