"""The pool an engine really has, as far as its page, its API and the flags given tell, each figure with its origin."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvwatch.snapshot import CacheConfig

if TYPE_CHECKING:  # a check of a page without a model does not load the budget side
    from kvwatch.budget import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What is known about an engine besides its metrics. None where unknown.

    `sources` pairs a field with "given" (flag or file) or "observed" (the engine's own API). `budget_under` gives the
    budget with some vLLM flags changed, spelt as fields of EngineConfig; it raises KvwatchError where there is none.
    """

    vllm_version: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    watermark: float | None = None
    max_num_batched_tokens: int | None = None
    budget: Budget | None = None
    budget_low_num_gpu_blocks: int | None = None  # where the budget's memory is an estimate, its lower bound in blocks
    budget_problem: str | None = None  # why there is no budget although a model was given
    budget_under: Callable[[Mapping[str, Any]], Budget] | None = field(default=None, compare=False, repr=False)
    sources: tuple[tuple[str, str], ...] = ()

    def source_of(self, field: str) -> str:
        return dict(self.sources).get(field, "given")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The live pool of one engine. Blocks and tokens are per engine; None where unknown.

    usable_blocks is num_gpu_blocks without the null block that vLLM keeps (v1/core/block_pool.py, BlockPool).
    """

    num_gpu_blocks: int | None
    usable_blocks: int | None
    block_size_tokens: int | None
    capacity_tokens: int | None
    max_concurrency: float | None
    max_model_len: int | None
    blocks_per_max_len_request: int | None
    tokens_per_block: int | None
    source: tuple[tuple[str, str], ...]

    def blocks_for(self, tokens: float) -> int | None:
        """Blocks that a request of so many tokens holds, for a model whose cost is proportional; None if it is not."""
        if self.tokens_per_block is None:
            return None
        return math.ceil(tokens / self.tokens_per_block)


def live_capacity(config: CacheConfig, facts: EngineFacts) -> Capacity:
    """cache_config_info and what else is known -> Capacity."""
    blocks = config.num_gpu_blocks or None
    tokens, shown = config.kv_cache_size_tokens, _concurrency(config)
    concurrency = shown
    max_model_len, length_source = _max_model_len(config, facts)
    per_request = max(1, round(blocks / concurrency)) if blocks and concurrency else None
    per_block, block_source = _tokens_per_block(config, max_model_len, per_request, facts.budget)
    if blocks and per_request is None and per_block and max_model_len:
        per_request = math.ceil(max_model_len / per_block)
        concurrency = blocks / per_request
    if tokens is None and blocks and per_block:
        tokens = blocks * per_block
    source = {
        "num_gpu_blocks": "observed" if blocks else "",
        "max_concurrency": "observed" if shown else "derived" if concurrency else "",
        "capacity_tokens": "observed" if config.kv_cache_size_tokens else "derived" if tokens else "",
        "max_model_len": length_source,
        "tokens_per_block": block_source,
    }
    return Capacity(
        num_gpu_blocks=blocks,
        usable_blocks=blocks - 1 if blocks else None,
        block_size_tokens=config.block_size or None,
        capacity_tokens=tokens or None,
        max_concurrency=concurrency,
        max_model_len=max_model_len,
        blocks_per_max_len_request=per_request,
        tokens_per_block=per_block,
        source=tuple((name, origin) for name, origin in source.items() if origin),
    )


def contradicted_max_model_len(config: CacheConfig, facts: EngineFacts) -> int | None:
    """The max_model_len of the page, where another one is given; None where they agree or one of them is missing."""
    shown = _shown_max_model_len(config)
    if shown is None or facts.max_model_len is None:
        return None
    return shown if abs(shown - facts.max_model_len) > 1 else None


def _concurrency(config: CacheConfig) -> float | None:
    """kv_cache_max_concurrency, unless it is one that no pool can have."""
    concurrency, blocks = config.kv_cache_max_concurrency, config.num_gpu_blocks
    if not concurrency or not blocks:
        return concurrency or None
    return concurrency if concurrency <= blocks and blocks / concurrency < math.inf else None


def _max_model_len(config: CacheConfig, facts: EngineFacts) -> tuple[int | None, str]:
    """What is given, unless the page contradicts it: the page is of the engine that runs."""
    if facts.max_model_len and contradicted_max_model_len(config, facts) is None:
        return facts.max_model_len, facts.source_of("max_model_len")
    shown = _shown_max_model_len(config)
    return shown, "derived" if shown else ""


def _shown_max_model_len(config: CacheConfig) -> int | None:
    """From kv_cache_size_tokens = int(kv_cache_max_concurrency x max_model_len), so the quotient is short by a little.

    Where less than one request fits, several lengths give the same product, and none is derived.
    """
    tokens, concurrency = config.kv_cache_size_tokens, _concurrency(config)
    if not tokens or not concurrency or not 1 <= concurrency <= tokens:
        return None
    return math.ceil(tokens / concurrency - 1e-6)


def _tokens_per_block(
    config: CacheConfig, max_model_len: int | None, per_request: int | None, budget: Budget | None
) -> tuple[int | None, str]:
    """How many tokens one block id holds, if that is one number for this model.

    With decode context parallelism a block spans block_size x dcp tokens; a model with several KV-cache groups has no
    single number, which shows in blocks per request that no whole multiple of block_size explains.
    """
    size = config.block_size
    if budget is not None and len(budget.groups) > 1:
        return None, ""
    if not size:
        return None, ""
    if per_request and max_model_len:
        for factor in (1, 2, 4, 8, 16, 32):
            if abs(math.ceil(max_model_len / (size * factor)) - per_request) <= 1e-9:
                return size * factor, "derived"
        return None, ""
    return size, "assumed"
