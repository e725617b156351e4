"""Prefixes are evicted before they are used again.

## Meaning

The prefix cache finds far less than it does on the long run, while running requests hold nearly the whole pool. Cached
blocks that nobody holds are the first to go when a request needs a block, so a full pool leaves no room for them.

## Impact

Shared prompts are computed again: time to first token rises, and prefill takes steps away from decoding.

## Diagnosis

- The share of hits of the last minutes against that since the start; the evidence has both.
- `vllm:kv_cache_usage_perc` counts blocks that requests hold: near 1 means that next to nothing is left for the cache.
- With `--kv-cache-metrics`, `vllm:kv_block_reuse_gap_seconds` above `vllm:kv_block_lifetime_seconds` shows blocks that
  go too early. Turnover alone is no harm.
- A change of traffic lowers the share of hits as well: look at what clients send.

## Mitigation

- Now: cap requests in flight at the gateway; fewer running requests leave blocks to the cache.
- Route requests that share a prefix to the same engine.
- At the next rollout: a larger pool, or KV offloading to the CPU's memory.
"""

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView, warning
from kvwatch.finding import Status, Verdict
from kvwatch.recording import signals
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import KV_CACHE_USAGE, PREFIX_CACHE_HITS, PREFIX_CACHE_QUERIES


def evaluate(view: EngineView, limits: Thresholds) -> Verdict:
    window = view.window
    if window.latest.cache_config.enable_prefix_caching is False:
        return Verdict(status=Status.OK, summary="prefix caching is off")
    queries, hits = window.increase(PREFIX_CACHE_QUERIES), window.increase(PREFIX_CACHE_HITS)
    looked_up, usage = window.value(PREFIX_CACHE_QUERIES), window.mean(KV_CACHE_USAGE)
    evidence = {"looked_up_tokens": queries, "kv_cache_usage_ratio_mean": usage}
    if queries < limits.prefix_lookups_minimum_tokens:
        return Verdict(status=Status.OK, summary="too few prompts to tell", evidence=evidence)
    now, usual = hits / queries, window.value(PREFIX_CACHE_HITS) / looked_up
    evidence |= {"prefix_cache_hit_ratio": now, "lifetime_prefix_cache_hit_ratio": usual}
    lost = usual >= limits.prefix_hit_usual_ratio and now < limits.prefix_hit_lost_ratio * usual
    if lost and usage >= limits.kv_cache_has_room_ratio:
        return Verdict(
            status=Status.WARNING,
            summary=f"{now:.0%} of the prompt tokens hit instead of {usual:.0%}; requests hold {usage:.0%} of the pool",
            evidence=evidence,
        )
    return Verdict(status=Status.OK, summary=f"{now:.0%} of the prompt tokens hit", evidence=evidence)


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    seen = signals(limits)
    return (
        warning(
            limits,
            expr=f"{seen.prefix_hit_ratio} < {limits.prefix_hit_lost_ratio} * "
            f"({seen.prefix_hit_usual} >= {limits.prefix_hit_usual_ratio})\n"
            f"and {seen.prefix_lookups_rate} * {limits.alert_range_seconds:g} >= "
            f"{limits.prefix_lookups_minimum_tokens}\n"
            f"and {seen.usage_mean} >= {limits.kv_cache_has_room_ratio}",
            summary=f"the prefix cache of {ENGINE} hits {{{{ $value | humanizePercentage }}}}, "
            "far less than usual, and its pool is full",
        ),
    )


CHECK = Check(id="prefix_cache_evicting", docs=__doc__, evaluate=evaluate, alert=alert)
