"""Every vLLM metric that kvwatch reads, spelt here and nowhere else.

Names, former names and versions: vllm/v1/metrics/loggers.py and vllm/engine/metrics.py of vLLM 0.6.6 to 0.33.0.
A name is written without prefix and, for counters, with `_total`, as it stands in the text exposition. Prefixes in use:

    vllm:       vLLM itself, text/plain
    vllm_       what an OpenMetrics scrape or a name-sanitising proxy makes of it
    ray_vllm:   Ray Serve LLM
    ray_vllm_   Ray Serve LLM, sanitised
    (none)      NVIDIA NIM
"""

import math
from dataclasses import dataclass
from typing import Literal

PREFIXES = ("vllm:", "vllm_", "ray_vllm:", "ray_vllm_", "")

Kind = Literal["gauge", "counter", "histogram", "info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One fact that vLLM exposes.

    `former` lists names under which older versions exposed the same fact; where both are on a page, today's name wins.
    `combine` says how series that differ only in labels kvwatch does not key on become one value.
    `split` names a label whose values are kept apart as well.
    """

    name: str
    kind: Kind
    help: str
    former: tuple[str, ...] = ()
    combine: Literal["sum", "max"] = "sum"
    split: str | None = None
    since: str | None = None  # first release with the current name, where that tells versions apart
    floor: float = 0.0  # a value below it is a sentinel (vLLM 0.6 writes -1 for "off") and counts as missing
    ceiling: float = math.inf  # a value above it cannot be the fact, as a ratio that a proxy summed over engines

    @property
    def exposed(self) -> str:
        """The name as vLLM itself spells it today."""
        return PREFIXES[0] + self.name


REQUESTS_RUNNING = Metric(name="num_requests_running", kind="gauge", help="requests in the running batch")
REQUESTS_WAITING = Metric(name="num_requests_waiting", kind="gauge", help="requests waiting to be scheduled")
REQUESTS_WAITING_BY_REASON = Metric(
    name="num_requests_waiting_by_reason",
    since="0.20.2",
    kind="gauge",
    help="waiting requests by reason (0.20+)",
    split="reason",
)
REQUESTS_SWAPPED = Metric(name="num_requests_swapped", kind="gauge", help="requests swapped to the CPU (V0)")
KV_CACHE_USAGE = Metric(
    name="kv_cache_usage_perc",
    since="0.9.2",
    kind="gauge",
    help="share of the KV blocks that requests hold, 0 to 1; cached blocks nobody holds count as free",
    former=("gpu_cache_usage_perc",),
    combine="max",
    ceiling=1.0,
)
MAX_NUM_SEQS = Metric(name="num_request_max", kind="gauge", help="max_num_seqs, exposed by NIM only", combine="max")
ENGINE_SLEEP_STATE = Metric(
    name="engine_sleep_state",
    since="0.11.2",
    kind="gauge",
    help="1 for the state the engine is in (0.11+)",
    split="sleep_state",
    combine="max",
)
PREEMPTIONS = Metric(name="num_preemptions_total", kind="counter", help="requests preempted")
PROMPT_TOKENS = Metric(name="prompt_tokens_total", kind="counter", help="prompt tokens processed")
GENERATION_TOKENS = Metric(name="generation_tokens_total", kind="counter", help="tokens generated")
REQUEST_SUCCESS = Metric(
    name="request_success_total", kind="counter", help="requests finished, by reason", split="finished_reason"
)
PREFIX_CACHE_QUERIES = Metric(
    name="prefix_cache_queries_total",
    kind="counter",
    help="prompt tokens looked up in the prefix cache",
    former=("gpu_prefix_cache_queries_total",),
)
PREFIX_CACHE_HITS = Metric(
    name="prefix_cache_hits_total",
    kind="counter",
    help="prompt tokens found in the prefix cache",
    former=("gpu_prefix_cache_hits_total",),
)
PREFIX_CACHE_HIT_RATE = Metric(
    name="gpu_prefix_cache_hit_rate", kind="gauge", help="hit rate, V0 only; -1 where the cache is off", combine="max"
)
ADMISSION_REJECTIONS = Metric(
    name="admission_rejections_total",
    since="0.32.0",
    kind="counter",
    help="requests refused by a queue limit (0.32+)",
    split="reason",
)
TIME_TO_FIRST_TOKEN = Metric(name="time_to_first_token_seconds", kind="histogram", help="time to first token")
INTER_TOKEN_LATENCY = Metric(
    name="inter_token_latency_seconds",
    since="0.10.2",
    kind="histogram",
    help="time between tokens",
    former=("time_per_output_token_seconds",),
)
E2E_LATENCY = Metric(name="e2e_request_latency_seconds", kind="histogram", help="arrival to last token")
QUEUE_TIME = Metric(
    name="request_queue_time_seconds",
    kind="histogram",
    help="time between arrival and first scheduling",
    former=("time_in_queue_requests",),
)
REQUEST_PROMPT_TOKENS = Metric(
    name="request_prompt_tokens", kind="histogram", help="prompt length of finished requests"
)
REQUEST_GENERATION_TOKENS = Metric(
    name="request_generation_tokens", kind="histogram", help="output length of finished requests"
)
REQUEST_PREFILL_KV_COMPUTED_TOKENS = Metric(
    name="request_prefill_kv_computed_tokens",
    since="0.13.0",
    kind="histogram",
    help="prompt tokens not served from the cache (0.13+)",
)
REQUEST_NUM_PREEMPTIONS = Metric(
    name="request_num_preemptions", since="0.30.0", kind="histogram", help="preemptions per finished request (0.30+)"
)
ITERATION_TOKENS = Metric(name="iteration_tokens_total", kind="histogram", help="tokens per engine step")
CACHE_CONFIG_INFO = Metric(name="cache_config_info", kind="info", help="the engine's CacheConfig as labels")

# Drawn by the dashboards, read by no check: exposed with --kv-cache-metrics only, for a sample of the blocks.
KV_BLOCK_LIFETIME = Metric(
    name="kv_block_lifetime_seconds",
    since="0.12.0",
    kind="histogram",
    help="time from a block's allocation to its eviction",
)
KV_BLOCK_IDLE_BEFORE_EVICT = Metric(
    name="kv_block_idle_before_evict_seconds",
    since="0.12.0",
    kind="histogram",
    help="time from a block's last use to its eviction",
)
KV_BLOCK_REUSE_GAP = Metric(
    name="kv_block_reuse_gap_seconds", since="0.12.0", kind="histogram", help="time between two uses of a block"
)

ALL: tuple[Metric, ...] = (
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    REQUESTS_WAITING_BY_REASON,
    REQUESTS_SWAPPED,
    KV_CACHE_USAGE,
    MAX_NUM_SEQS,
    ENGINE_SLEEP_STATE,
    PREEMPTIONS,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    REQUEST_SUCCESS,
    PREFIX_CACHE_QUERIES,
    PREFIX_CACHE_HITS,
    PREFIX_CACHE_HIT_RATE,
    ADMISSION_REJECTIONS,
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN_LATENCY,
    E2E_LATENCY,
    QUEUE_TIME,
    REQUEST_PROMPT_TOKENS,
    REQUEST_GENERATION_TOKENS,
    REQUEST_PREFILL_KV_COMPUTED_TOKENS,
    REQUEST_NUM_PREEMPTIONS,
    ITERATION_TOKENS,
    CACHE_CONFIG_INFO,
)

# What each label of cache_config_info proves. kv_cache_max_concurrency came with release 0.24.0, but a public page of a
# 0.23.1rc1 development build has it, and such a build may lack what else came with 0.24.
CACHE_CONFIG_LABEL_SINCE = (("kv_cache_max_concurrency", "0.23.1"), ("kv_cache_memory_bytes", "0.10.2"))

# process_start_time_seconds has no vLLM prefix; prometheus_client exports it for the whole process.
PROCESS_START_TIME = "process_start_time_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What a sample name means: the metric, its place in a histogram, and how far the name is from today's."""

    metric: Metric
    part: Literal["value", "bucket", "sum", "count"]
    age: int  # 0 the current name, 1.. former names
    prefix: str
    rank: tuple[int, int]  # order of preference among names of one fact: the current name, then vLLM's own prefix


def _series_names() -> dict[str, Series]:
    names: dict[str, Series] = {}
    for metric in ALL:
        for age, name in enumerate((metric.name, *metric.former)):
            parts = ("bucket", "sum", "count") if metric.kind == "histogram" else ("value",)
            for part in parts:
                suffix = "" if part == "value" else f"_{part}"
                for place, prefix in enumerate(PREFIXES):
                    names[prefix + name + suffix] = Series(
                        metric=metric,
                        part=part,  # type: ignore[arg-type] # one of the literals above
                        age=age,
                        prefix=prefix,
                        rank=(age, place),
                    )
    return names


SERIES: dict[str, Series] = _series_names()
"""Sample name -> Series, for every prefix and every generation of names. Names are matched whole, so neither
`_created` nor a longer name (`num_requests_waiting_by_reason`) is ever taken for another."""

ENGINE_ONLY = (REQUESTS_RUNNING, REQUESTS_WAITING, KV_CACHE_USAGE)
"""Facts that no other kind of server exposes. Without a prefix, only these tell an engine from any web server, which
may well have a `request_success_total`."""
