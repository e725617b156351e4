"""What an offered load needs of the pool: contexts × users, mixed requests, and Little's law.

    in flight = arrival rate × response time            (Little 1961)
    arrival rate with retries = rate ÷ (1 − retry ratio)     each attempt is retried with that probability

A load fits if its blocks are no more than the pool's, counted as vLLM counts concurrency: with the null block. Where
that leaves one block too few (`free_blocks` −1), the last request waits for its last block.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvwatch.budget import Budget, payload_bytes
from kvwatch.errors import SettingError
from kvwatch.pages import ceil_div
from kvwatch.planning import Plan

_MOST_IN_FLIGHT = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """So many requests of one length at once, over all data-parallel engines. Bytes are payload of the whole model.

    `blocks` and `free_blocks` are those of the engine that gets the most requests; `fits` is None where the pool is
    not known.
    """

    context_tokens: int
    concurrency: int
    kv_cache_bytes: int
    allocated_bytes: int
    blocks: int
    fits: bool | None
    free_blocks: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Requests of different lengths at once: (tokens, how many)."""

    requests: tuple[tuple[int, int], ...]
    kv_cache_bytes: int
    blocks: int
    fits: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Little's law. `retries_in_flight` is what retrying adds to `in_flight`."""

    arrival_rate_per_second: float
    response_time_seconds: float
    retry_ratio: float
    effective_rate_per_second: float
    in_flight: float
    retries_in_flight: float


def row(planned: Plan, budget: Budget | None, *, context_tokens: int, concurrency: int) -> Row:
    """Raises SettingError for a context beyond max_model_len, which vLLM would reject."""
    limit = planned.engine.max_model_len
    if context_tokens > limit:
        raise SettingError(
            f"--context {context_tokens} is more than max_model_len {limit}: vLLM rejects such a request. Give "
            f"--max-model-len {context_tokens} or a smaller --context."
        )
    if context_tokens < 1 or concurrency < 1:
        raise SettingError(f"--context {context_tokens} and --concurrency {concurrency} have to be at least 1")
    here = ceil_div(concurrency, planned.engine.data_parallel_size)
    blocks = here * planned.blocks_for_request(context_tokens)
    each_rank = sum(planned.block_bytes) * planned.engine.tensor_parallel_size
    return Row(
        context_tokens=context_tokens,
        concurrency=concurrency,
        kv_cache_bytes=concurrency * payload_bytes(planned, context_tokens),
        allocated_bytes=concurrency * planned.blocks_for_request(context_tokens) * each_rank,
        blocks=blocks,
        fits=None if budget is None else blocks <= budget.num_gpu_blocks,
        free_blocks=None if budget is None else budget.usable_blocks - blocks,
    )


def mix(planned: Plan, budget: Budget | None, requests: Iterable[tuple[int, int]]) -> Mix:
    """Unequal requests on one engine, their blocks summed."""
    rows = [row(planned, budget, context_tokens=tokens, concurrency=count) for tokens, count in requests]
    blocks = sum(found.blocks for found in rows)
    return Mix(
        requests=tuple((found.context_tokens, found.concurrency) for found in rows),
        kv_cache_bytes=sum(found.kv_cache_bytes for found in rows),
        blocks=blocks,
        fits=None if budget is None else blocks <= budget.num_gpu_blocks,
    )


def arrivals(*, arrival_rate: float, response_time: float, retry_ratio: float = 0.0) -> Arrivals:
    """Requests in flight at a rate per second and a response time in seconds. Raises SettingError."""
    if not 0 <= arrival_rate < float("inf") or not 0 <= response_time < float("inf"):
        raise SettingError(
            f"--arrival-rate {arrival_rate} and --response-time {response_time} have to be finite and not negative"
        )
    if not 0 <= retry_ratio < 1:
        raise SettingError(
            f"--retry-ratio {retry_ratio} has to be from 0 up to, not including, 1: at 1 every attempt is retried and "
            "the load grows without end"
        )
    effective = arrival_rate / (1 - retry_ratio)
    if effective * response_time >= _MOST_IN_FLIGHT:
        raise SettingError(
            f"--arrival-rate {arrival_rate:g} per second for --response-time {response_time:g} seconds are "
            f"{effective * response_time:g} requests in flight; no fleet has {_MOST_IN_FLIGHT:g}"
        )
    return Arrivals(
        arrival_rate_per_second=arrival_rate,
        response_time_seconds=response_time,
        retry_ratio=retry_ratio,
        effective_rate_per_second=effective,
        in_flight=effective * response_time,
        retries_in_flight=(effective - arrival_rate) * response_time,
    )


def largest_context(planned: Plan, budget: Budget, *, concurrency: int) -> int:
    """The longest context that so many requests can all have, 0 if none; by binary search, tokens."""
    low, high, best = 1, planned.engine.max_model_len, 0
    while low <= high:
        middle = (low + high) // 2
        if row(planned, budget, context_tokens=middle, concurrency=concurrency).fits:
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


def most_requests(planned: Plan, budget: Budget, *, context_tokens: int) -> int:
    """How many requests of that length fit at once, over all data-parallel engines."""
    blocks = planned.blocks_for_request(context_tokens)
    return budget.num_gpu_blocks // blocks * planned.engine.data_parallel_size if blocks else budget.max_num_seqs
