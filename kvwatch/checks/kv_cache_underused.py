"""The KV pool is far larger than the load ever needs.

## Meaning

Over a whole day that served requests, at no time more than a part of the pool was held. Cached prefixes that nobody
holds count as free, so a pool can be of use as a cache beyond what this shows.

## Impact

None on latency. GPU memory is reserved that a smaller GPU, a longer context or another model could use.

## Diagnosis

- `max_over_time(vllm:kv_cache_usage_perc[1d])`, over a span that includes the busiest hour.
- `vllm:prefix_cache_hits_total` against `vllm:prefix_cache_queries_total`: a high share of hits is what the rest of the
  pool is for.
- `sequence_cap_reached`: if requests wait, the cap keeps the pool empty, not the load.

## Mitigation

- Fewer replicas of the same load each use more of their pool: see `kvwatch recommend` before taking one away.
- A longer `--max-model-len`, a larger `--max-num-seqs`, or KV cache in full precision cost nothing here.
- A lower `--gpu-memory-utilization` frees memory for another process on the GPU.
"""

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView, warning
from kvwatch.errors import NoData
from kvwatch.finding import Status, Verdict
from kvwatch.recording import duration, signals
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import KV_CACHE_USAGE, REQUEST_SUCCESS


def evaluate(view: EngineView, limits: Thresholds) -> Verdict:
    window = view.window
    usage = window.maximum(KV_CACHE_USAGE)
    evidence = {"kv_cache_usage_ratio_maximum": usage, "window_seconds": window.duration_seconds}
    if usage >= limits.underused_ratio:
        return Verdict(status=Status.OK, summary=f"up to {usage:.0%} of the pool was held", evidence=evidence)
    if window.duration_seconds < limits.underused_seconds:
        raise NoData(
            f"whether the pool is too large shows over {limits.underused_seconds / 3600:.0f} hours: "
            "give a Prometheus as source, with --window"
        )
    finished = window.increase(REQUEST_SUCCESS)
    evidence["finished_requests"] = finished
    if finished <= 0:
        return Verdict(status=Status.OK, summary="no request was served", evidence=evidence)
    return Verdict(
        status=Status.WARNING,
        summary=f"never more than {usage:.0%} of the pool held in {window.duration_seconds / 3600:.0f} hours",
        evidence=evidence,
    )


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    seen, over = signals(limits), duration(limits.underused_seconds)
    return (
        warning(
            limits,
            expr=f"max_over_time({seen.usage_maximum}[{over}]) < {limits.underused_ratio}\n"
            f"and {seen.usage_maximum} offset {over}\n"
            f"and max_over_time({seen.finished_rate}[{over}]) > 0",
            summary=f"the KV pool of {ENGINE} was never more than {{{{ $value | humanizePercentage }}}} full in {over}",
        ),
    )


CHECK = Check(id="kv_cache_underused", docs=__doc__, evaluate=evaluate, alert=alert)
