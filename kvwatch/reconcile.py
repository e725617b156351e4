"""Where a live pool and its budget differ, term by term.

num_gpu_blocks = memory for the KV cache / bytes per block, and what a block holds follows from the settings. So two
pools of different size differ in a setting, in the layout (blocks per request), or in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvwatch.budget import Budget
    from kvwatch.capacity import Capacity
    from kvwatch.snapshot import CacheConfig

_SHARE_TOLERANCE = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One term on which the engine and its budget disagree. `live` and `predicted` are in the unit of `term`."""

    term: str
    live: float | int | str
    predicted: float | int | str

    def __str__(self) -> str:
        return f"{self.term} is {_shown(self.live)} on the engine and {_shown(self.predicted)} in the budget"


def differences(config: CacheConfig, capacity: Capacity, budget: Budget) -> tuple[Difference, ...]:
    """The terms that differ, settings first. Memory is named only where no setting explains the size of the pool."""
    engine = budget.engine
    settings = (
        ("block_size", _block_size(config), budget.block_size_tokens),
        ("gpu_memory_utilization", config.gpu_memory_utilization, _share(budget)),
        ("num_gpu_blocks_override", config.num_gpu_blocks_override, engine.num_gpu_blocks_override),
        ("max_model_len", capacity.max_model_len, budget.max_model_len),
        ("blocks_per_max_len_request", capacity.blocks_per_max_len_request, budget.blocks_per_max_len_request),
    )
    found = [
        Difference(term=term, live=live, predicted=predicted)
        for term, live, predicted in settings
        if live is not None and predicted is not None and not _same(live, predicted)
    ]
    blocks = capacity.num_gpu_blocks
    if blocks is not None and blocks != budget.num_gpu_blocks and not found:
        live_bytes, predicted_bytes = (count * budget.block_bytes_per_rank for count in (blocks, budget.num_gpu_blocks))
        found.append(Difference(term="kv_cache_bytes_per_rank", live=live_bytes, predicted=predicted_bytes))
    return tuple(found)


def _block_size(config: CacheConfig) -> int | None:
    """The label, from the release on in which it is the engine's own (before 0.23 it may be the default)."""
    return config.block_size if config.kv_cache_max_concurrency is not None else None


def _share(budget: Budget) -> float | None:
    """gpu_memory_utilization, where it decides the pool."""
    engine = budget.engine
    bypassed = engine.kv_cache_memory_bytes is not None or engine.num_gpu_blocks_override is not None
    return None if bypassed else engine.gpu_memory_utilization


def _same(live: float, predicted: float) -> bool:
    return abs(live - predicted) <= _SHARE_TOLERANCE * max(abs(live), abs(predicted))


def _shown(value: float | str) -> str:
    if isinstance(value, int) and value >= 1 << 30:
        return f"{value / (1 << 30):.2f} GiB"
    return f"{value:,}" if isinstance(value, (int, float)) else value
