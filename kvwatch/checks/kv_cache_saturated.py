"""The KV pool is full and requests are waiting for it.

## Meaning

All through the window the running requests held nearly all KV blocks while others waited. A full pool alone is what
vLLM aims for; a full pool with a queue means that the pool, not the GPU's compute, decides how many requests run.
`vllm:kv_cache_usage_perc` counts blocks that requests hold. Cached prefixes nobody uses count as free.

## Impact

Waiting requests add their queue time to their time to first token. The next step is preemption: on a recorded engine
the pool was full for 24 seconds before the first one.

## Diagnosis

- `avg_over_time(vllm:kv_cache_usage_perc[5m])`, with `vllm:num_requests_waiting` above 0.
- `vllm:request_queue_time_seconds` says what waiting costs; `vllm:num_preemptions_total` whether it has tipped over.
- `kvwatch budget` says how many requests of which length the pool holds.

## Mitigation

- Now: cap requests in flight at the gateway, shed or reroute long requests, add replicas.
- At the next rollout: a larger pool (`--gpu-memory-utilization`, `--kv-cache-dtype fp8`, more GPUs) or shorter answers.
- Lowering `--max-num-seqs` does not enlarge the pool; it only moves the queue, which helps when requests are preempted.
"""

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView, on_one_page, warning
from kvwatch.finding import Status, Verdict
from kvwatch.recording import signals
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import KV_CACHE_USAGE, REQUESTS_WAITING


def evaluate(view: EngineView, limits: Thresholds) -> Verdict:
    window = view.window.held(limits.hold_seconds)
    usage, waiting = window.mean(KV_CACHE_USAGE), window.minimum(REQUESTS_WAITING)
    evidence = {
        "kv_cache_usage_ratio_mean": usage,
        "kv_cache_usage_ratio": window.value(KV_CACHE_USAGE),
        "waiting_requests_minimum": waiting,
        "waiting_requests": window.value(REQUESTS_WAITING),
    }
    if len(window.snapshots) < 2:
        if window.value(KV_CACHE_USAGE) < limits.kv_cache_saturated_ratio or waiting <= 0:
            return Verdict(status=Status.OK, summary=_now(window.value(KV_CACHE_USAGE), waiting), evidence=evidence)
        return Verdict(
            status=Status.UNKNOWN,
            summary=f"{_now(usage, waiting)} {on_one_page(view)}",
            evidence=evidence,
        )
    if usage >= limits.kv_cache_saturated_ratio and waiting > 0:
        return Verdict(
            status=Status.WARNING,
            summary=f"the pool was {usage:.0%} full on average, with at least {waiting:.0f} requests waiting",
            evidence=evidence,
        )
    return Verdict(
        status=Status.OK,
        summary=_now(window.value(KV_CACHE_USAGE), window.value(REQUESTS_WAITING)),
        evidence=evidence,
    )


def _now(usage: float, waiting: float) -> str:
    return f"{usage:.0%} of the pool held, {waiting:.0f} requests waiting"


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    seen = signals(limits)
    return (
        warning(
            limits,
            expr=f"{seen.usage_mean} >= {limits.kv_cache_saturated_ratio}\nand {seen.waiting_minimum} > 0",
            summary=f"the KV pool of {ENGINE} is {{{{ $value | humanizePercentage }}}} full and requests wait for it",
        ),
    )


CHECK = Check(id="kv_cache_saturated", docs=__doc__, evaluate=evaluate, alert=alert)
