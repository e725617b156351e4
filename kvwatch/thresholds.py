"""Every tunable number of the checks, with its unit in its name and its source beside it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    # A state that lasts: gauges must show it over this span. Two scrapes at the usual 15 s.
    hold_seconds: float = 30.0
    # Throughput collapses were reported between 92 % and 99 % of the blocks held (vLLM issues 23444, 18115);
    # vLLM's own dashboards colour usage from 0.98 and say that running close to 100 % is expected under load.
    kv_cache_saturated_ratio: float = 0.95
    # One preempted request is an accident; three inside a window are a pattern.
    preemptions_minimum: int = 3
    # A busy healthy server showed 5.8 preemptions per 1,000 requests over 15 hours (Qwen3-Coder-30B, usage 6 %).
    preemptions_per_request_warning: float = 0.02
    # vLLM pull request 44594 measured 1065 preemptions for 450 requests while thrashing and 168 when tuned.
    preemptions_per_request_critical: float = 0.10
    # A prefill of 100,000 tokens takes tens of seconds without a token coming out; a deadlock never ends.
    stall_seconds: float = 60.0
    # vllm-doctor and llm-d call a queue time of a second at the 95th percentile the limit of interactive use.
    queue_time_warning_seconds: float = 1.0
    # Below this usage the pool has room, so whatever holds requests back is not the KV cache.
    kv_cache_has_room_ratio: float = 0.90
    # A pool smaller than predicted by more than this is not explained by rounding or by the estimate of activations.
    capacity_deviation_ratio: float = 0.05
    # The probability with which the pool must hold what a recommended number of requests in flight needs.
    pool_fits_probability: float = 0.95
    # vLLM does not export max_num_seqs; a number of running requests that stands still this long is taken for it.
    # Four scrapes at the usual 15 s.
    pinned_seconds: float = 60.0
    # A pool below this has room for minutes of growth, however fast it fills.
    filling_from_ratio: float = 0.80
    # Time in which somebody can still act; over longer ones the swings of a busy pool look like a trend. On one engine
    # usage rose from 91 % to 96 % in two minutes before its speed broke down (vLLM pull request 21809).
    filling_horizon_seconds: float = 300.0
    # Requests of a quarter of the pool: four of them fill it, so the pool carries no mix of lengths.
    monopoly_share_ratio: float = 0.25
    # Long requests that hold less than half of the pool do not keep others out.
    monopoly_pool_ratio: float = 0.50
    # A pool that a third of its size would replace.
    underused_ratio: float = 0.30
    # A day, so that the span holds the busiest hour.
    underused_seconds: float = 86400.0
    # A share of hits below this is no cache to lose; chat and agents with a common prompt show 0.5 to 0.95.
    prefix_hit_usual_ratio: float = 0.30
    # Hits lost to eviction: less than half of the usual share.
    prefix_hit_lost_ratio: float = 0.50
    # A share of hits over fewer tokens than some ten prompts says nothing.
    prefix_lookups_minimum_tokens: int = 10_000
    # One refused request in a hundred is what vLLM's dashboards colour as a bad share of errors.
    rejected_ratio_warning: float = 0.01
    # One refused request is an accident; three inside a window are a pattern.
    rejections_minimum: int = 3
    # vllm-doctor takes a gap of 0.30 in KV-cache usage between replicas for an imbalance.
    imbalance_ratio: float = 0.30
    # Range of the rates and averages in the alert rules: a rate needs two scrapes, and five a minute apart survive a
    # lost one.
    alert_range_seconds: float = 300.0
    # A condition must hold this long before its alert fires: capacity is not added in less.
    alert_for_seconds: float = 300.0
    # The same for critical alerts, which wake somebody: long enough for a server that restarts.
    alert_critical_for_seconds: float = 120.0
    # An alert stays for this long after its condition ended, so that a value around its threshold is one alert.
    alert_keep_firing_seconds: float = 900.0
    # The same for critical alerts: whoever mended it wants to see that it is over.
    alert_critical_keep_firing_seconds: float = 300.0
    # How far back the alert on missing metrics remembers that a target had them.
    alert_remembers_seconds: float = 3600.0


DEFAULTS = Thresholds()
