"""What goes into a simulation and what comes out: settings, costs, requests, results.

All times are seconds, all lengths tokens, all ratios 0..1. The scheduler settings keep vLLM's spelling and meaning
(vllm/config/scheduler.py, 0.32.0).
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvwatch.errors import SettingError

DEFAULT_BLOCK_SIZE = 16
"""vllm/config/cache.py, CacheConfig.DEFAULT_BLOCK_SIZE (0.32.0)."""
_MOST_BLOCK_TOKENS = 10**7  # a block of a state space is as long as the longest context
_MOST_ATTEMPTS = 1000
_MOST_TOKENS = 10**8  # ten times the longest context there is; a request's blocks are held in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """One KV cache group of a hybrid model: how many blocks a request holds in it.

    Full attention (neither field given) keeps a block for every `block_size` tokens. A sliding window frees the blocks
    that have left its `window_tokens`, at the start of the next step. A state-space layer keeps `max_blocks`, 1 or 2.

    SOURCE: vllm/v1/core/single_type_kv_cache_manager.py (0.32.0), remove_skipped_blocks, get_num_skipped_tokens and
    get_num_blocks_to_allocate; vllm/v1/kv_cache_interface.py, SlidingWindowSpec.max_admission_blocks_per_request. Once
    a request decodes, a window's count is held at its maximum, where vLLM's goes up and down by one block.
    """

    block_size: int
    window_tokens: int | None = None
    max_blocks: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "window_tokens", "max_blocks"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1, _MOST_BLOCK_TOKENS if name == "block_size" else _MOST)
        if self.window_tokens is not None and self.max_blocks is not None:
            raise SettingError(
                f"a group has both window_tokens ({self.window_tokens}) and max_blocks ({self.max_blocks}); give "
                "window_tokens for a sliding window, max_blocks for a state of fixed size."
            )

    @property
    def is_full(self) -> bool:
        """Whether a request's blocks grow with all its tokens."""
        return self.window_tokens is None and self.max_blocks is None

    @property
    def decoding_cap_blocks(self) -> int | None:
        """The most blocks that a decoding request holds; None where there is no limit."""
        if self.window_tokens is None:
            return self.max_blocks
        return -(-(self.window_tokens - 1) // self.block_size) + 1

    def blocks(self, tokens: int) -> int:
        """Blocks of a decoding request that holds `tokens` computed tokens."""
        return self._capped(tokens, self.decoding_cap_blocks)

    def chunk_blocks(self, before: int, after: int) -> int:
        """Blocks while a prefill chunk takes a request from `before` to `after` computed tokens."""
        if self.window_tokens is None:
            return self._capped(after, self.max_blocks)
        return -(-after // self.block_size) - max(0, before - self.window_tokens + 1) // self.block_size

    def admission_blocks(self, tokens: int, batch_tokens: int) -> int:
        """Blocks that must be free for a request of `tokens` to be admitted, with chunks of up to `batch_tokens`."""
        if self.window_tokens is None:
            return self._capped(tokens, self.max_blocks)
        return self._capped(tokens, -(-(self.window_tokens - 1 + batch_tokens) // self.block_size) + 1)

    def _capped(self, tokens: int, cap: int | None) -> int:
        wanted = -(-tokens // self.block_size)
        return wanted if cap is None else min(wanted, cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """The vLLM flags that decide what is scheduled. Defaults are vLLM 0.32.0's.

    `num_gpu_blocks` includes the null block, as vLLM's own figure does: one block fewer can be used.
    `evict_unhashed_first` is how vLLM 0.23 and later order the free queue (block_pool.py, free_blocks): blocks that no
    prefix can hit are reused first. Before, all blocks queued up in the order in which they were freed.
    `groups` describes a hybrid model; empty means one group of full attention with `block_size`.

    Raises SettingError for values with which vLLM does not start.
    """

    num_gpu_blocks: int
    block_size: int = DEFAULT_BLOCK_SIZE
    max_model_len: int = 4096
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    max_num_active_seqs: int | None = None
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    evict_unhashed_first: bool = True
    groups: tuple[KvGroup, ...] = ()

    def __post_init__(self) -> None:
        _at_least("block_size", self.block_size, 1, _MOST_BLOCK_TOKENS)
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs"):
            _at_least(name, getattr(self, name), 1)
        _at_least("num_gpu_blocks", self.num_gpu_blocks, 2)  # one block is the null block
        _at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        if not 0.0 <= self.watermark < 1.0:
            raise SettingError(
                f"watermark is {self.watermark}; vLLM wants 0 <= watermark < 1, the share of the KV cache blocks that "
                "new requests must leave free. Try --watermark 0.05."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is smaller than max_num_seqs "
                f"({self.max_num_seqs}), and vLLM does not start so. Raise --max-num-batched-tokens or lower "
                "--max-num-seqs."
            )
        if self.max_num_active_seqs is not None:
            _at_least("max_num_active_seqs", self.max_num_active_seqs, 1)
            if self.max_num_active_seqs > self.max_num_seqs:
                raise SettingError(
                    f"max_num_active_seqs ({self.max_num_active_seqs}) is greater than max_num_seqs "
                    f"({self.max_num_seqs}), and vLLM does not start so. Lower --max-num-active-seqs."
                )
        if self.long_prefill_token_threshold > self.max_model_len:
            raise SettingError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) is greater than max_model_len "
                f"({self.max_model_len}), and vLLM does not start so. Lower --long-prefill-token-threshold."
            )
        if any(group.is_full and group.block_size != self.block_size for group in self.groups):
            raise SettingError(
                f"a full-attention group must have the block_size of the engine, {self.block_size}: "
                "prefixes are cached in blocks of that size."
            )

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block (block_pool.py, BlockPool.__init__)."""
        return self.num_gpu_blocks - 1

    @property
    def pool_tokens(self) -> int:
        """Tokens that the usable blocks hold, all block tables of a hybrid model drawing on them alike."""
        return self.usable_blocks * self.block_size // len(self.kv_groups)

    @property
    def active_seqs_limit(self) -> int:
        """How many requests may run at once."""
        return self.max_num_seqs if self.max_num_active_seqs is None else self.max_num_active_seqs

    @property
    def kv_groups(self) -> tuple[KvGroup, ...]:
        return self.groups or (KvGroup(block_size=self.block_size),)

    def blocks(self, tokens: int) -> int:
        """Blocks that a decoding request with `tokens` computed tokens holds, all groups together."""
        return sum(group.blocks(tokens) for group in self.kv_groups)

    def chunk_blocks(self, before: int, after: int) -> int:
        """Blocks while a prefill chunk takes a request from `before` to `after` computed tokens."""
        return sum(group.chunk_blocks(before, after) for group in self.kv_groups)

    def admission_blocks(self, tokens: int) -> int:
        """Blocks that must be free for a request of `tokens` to be admitted when its whole prompt is reserved."""
        return sum(group.admission_blocks(tokens, self.max_num_batched_tokens) for group in self.kv_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What a step costs: `step + n * per_token + k * per_kv_token` seconds.

    n is the number of tokens that the step computes, k the number of tokens which the requests it computes for held
    before the step.
    """

    step_seconds: float
    per_token_seconds: float = 0.0
    per_kv_token_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("step_seconds", "per_token_seconds", "per_kv_token_seconds"):
            _at_least(name, getattr(self, name), 0)
        if not self.step_seconds + self.per_token_seconds > 0:
            raise SettingError("step_seconds and per_token_seconds are both 0; a step takes time. Give one of them.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. Those that name the same `prefix` share its first `prefix_tokens` tokens, and nothing else."""

    prompt_tokens: int
    output_tokens: int
    at_seconds: float = 0.0
    prefix: str | None = None
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        _at_least("prompt_tokens", self.prompt_tokens, 1, _MOST_TOKENS)
        _at_least("output_tokens", self.output_tokens, 1, _MOST_TOKENS)
        _at_least("at_seconds", self.at_seconds, 0)
        _at_least("prefix_tokens", self.prefix_tokens, 0)
        if self.prefix_tokens > self.prompt_tokens:
            raise SettingError(
                f"prefix_tokens ({self.prefix_tokens}) is greater than prompt_tokens ({self.prompt_tokens}); "
                "the prefix is the first part of the prompt."
            )
        if self.prefix_tokens and self.prefix is None:
            raise SettingError(
                f"prefix_tokens is {self.prefix_tokens} but no prefix is named; requests share tokens only with those "
                "that name the same prefix. Add `prefix: NAME`."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """What clients do when no first token comes: give up after a time, and send the same request again.

    The engine drops a request at the start of the first step at or after its deadline. A client sends at most
    `max_attempts` times, the first attempt included.
    """

    first_token_timeout_seconds: float
    max_attempts: int = 2
    backoff_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.first_token_timeout_seconds > 0:
            raise SettingError(
                f"first_token_timeout_seconds is {self.first_token_timeout_seconds}; it must be greater than 0, else "
                "every request times out before it can run."
            )
        _at_least("first_token_timeout_seconds", self.first_token_timeout_seconds, 0)
        _at_least("max_attempts", self.max_attempts, 1, _MOST_ATTEMPTS)
        _at_least("backoff_seconds", self.backoff_seconds, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """An engine and the load offered to it.

    With `clients` the loop is closed: so many clients each send the next request of the list when their last one
    finished, and `at_seconds` is not looked at. Without, requests come at their `at_seconds`.
    """

    engine: SchedulerSettings
    cost: CostModel
    requests: tuple[Request, ...]
    clients: int | None = None
    retry: Retry | None = None
    vllm_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One decision of the scheduler, in the terms in which vLLM's own SchedulerOutput gives it.

    Requests are named by their place in the list of requests. `scheduled` is in the order of the running queue;
    `free_blocks` is the count after scheduling and before the step's finished requests free theirs.
    """

    step: int
    start_seconds: float
    scheduled: tuple[tuple[int, int], ...]
    preempted: tuple[int, ...]
    free_blocks: int


Trace = Callable[[StepTrace], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What the requests and the engine went through.

    A percentile is the nearest-rank one: the smallest sample such that at least that share of the samples is not
    greater. TTFT runs from arrival (with retries: of the first attempt) to the end of the step that made the first
    token; an ITL sample is the time between two consecutive tokens of one request, every gap of every request
    counting once; queue time runs from arrival to the start of the first step that computed anything for the request.
    A percentile without samples is None.

    `recomputed_tokens` are tokens computed again after a preemption or a retry. `prefix_hit_tokens` are those found in
    the prefix cache when a request was first admitted; so
    `scheduled_tokens == sum(prompt + output - 1) - prefix_hit_tokens + recomputed_tokens` when nothing is abandoned.
    `peak_usage_ratio` is the largest share of usable blocks held after scheduling a step. `usage_timeline` has the
    largest share held in each span of `usage_timeline_step_seconds`, from time 0 on.
    """

    requests: int
    steps: int
    preemptions: int
    scheduled_tokens: int
    output_tokens: int
    makespan_seconds: float
    output_tokens_per_second: float
    ttft_p50_seconds: float | None
    ttft_p99_seconds: float | None
    itl_p50_seconds: float | None
    itl_p99_seconds: float | None
    queue_p50_seconds: float | None
    queue_p99_seconds: float | None
    peak_usage_ratio: float
    recomputed_tokens: int
    prefix_hit_tokens: int
    preemptions_per_request: float
    timeouts: int
    abandoned_requests: int
    usage_timeline: tuple[float, ...]
    usage_timeline_step_seconds: float


_MOST = 10**15  # whole numbers up to here are exact as floats, and no setting of vLLM comes near


def _at_least(name: str, value: float, least: int, most: int = _MOST) -> None:
    # `not >=` rather than `<`, so that NaN is refused too
    if not value >= least or value == float("inf"):
        raise SettingError(f"{name} is {value}; it must be a finite number of at least {least}.")
    if value > most:
        raise SettingError(f"{name} is above {most:,}; it must be a finite number from {least} to there.")
