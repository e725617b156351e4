"""Requests are preempted again and again: the KV pool is thrashing.

## Meaning

The pool ran out of blocks while requests were growing, so vLLM threw the last admitted one out, freed its blocks and
will compute its prompt and answer so far again (vllm/v1/core/sched/scheduler.py, _preempt_request). A few preemptions
per thousand requests are normal. A rate that lasts means that more requests are admitted than the pool can carry to
their end.

## Impact

Recomputation takes the place of new work: tokens per second fall, gaps of seconds open between tokens of one answer,
queue time and time to first token grow for everybody. The last admitted requests are hit, often several times.

## Diagnosis

- `rate(vllm:num_preemptions_total[5m])` against `rate(vllm:request_success_total[5m])`. The lifetime counter says
  nothing about now.
- `vllm:kv_cache_usage_perc` near 1 together with waiting requests. Usage near 1 alone is what a full, healthy batch
  looks like.
- `kvwatch recommend URL` shows how many requests of today's length the pool carries.

## Mitigation

- Now, without a restart: cap requests in flight at the gateway at the number `kvwatch recommend` gives and answer 429
  beyond it; send the long requests to another pool; add replicas.
- At the next rollout: `--watermark` (vLLM 0.24 and later) keeps free blocks in reserve for running requests;
  `--max-num-seqs` caps the batch in every version. Both cost something; `kvwatch recommend` says what.
- More pool: a larger `--gpu-memory-utilization` if memory is free, `--kv-cache-dtype fp8`, more GPUs per engine.
"""

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView, critical, warning
from kvwatch.finding import Status, Verdict
from kvwatch.recording import signals
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import PREEMPTIONS, REQUEST_SUCCESS


def evaluate(view: EngineView, limits: Thresholds) -> Verdict:
    window = view.window
    preemptions = window.increase(PREEMPTIONS)
    per_second = window.rate(PREEMPTIONS)
    finished = window.increase(REQUEST_SUCCESS)
    evidence: dict[str, float | int | str] = {
        "preemptions": preemptions,
        "preemptions_per_second": per_second,
        "finished_requests": finished,
        "lifetime_preemptions": window.value(PREEMPTIONS),
    }
    if preemptions < limits.preemptions_minimum:
        return Verdict(status=Status.OK, summary=_quiet(preemptions, window.value(PREEMPTIONS)), evidence=evidence)
    if finished > 0:
        per_request = preemptions / finished
        evidence["preemptions_per_request"] = per_request
        share = f"{per_request:.2f} per finished request"
    else:
        per_request = float("inf")
        share = "while none finished"
    summary = f"{per_second:.2f} preemptions per second, {share}"
    return Verdict(status=_judge(per_request, limits), summary=summary, evidence=evidence)


def _judge(per_request: float, limits: Thresholds) -> Status:
    if per_request >= limits.preemptions_per_request_critical:
        return Status.CRITICAL
    if per_request >= limits.preemptions_per_request_warning:
        return Status.WARNING
    return Status.OK


def _quiet(recent: float, lifetime: float) -> str:
    now = "no preemption in the window" if recent == 0 else f"{recent:.0f} preemptions in the window"
    return f"{now} ({lifetime:,.0f} since the engine started are history)" if lifetime > recent else now


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    seen = signals(limits)
    summary = f'{ENGINE} preempts {{{{ $value | printf "%.2f" }}}} times per finished request'
    enough = f"and {seen.preemptions} >= {limits.preemptions_minimum}"
    per_request = seen.preemptions_per_request
    return (
        warning(limits, expr=f"{per_request} >= {limits.preemptions_per_request_warning}\n{enough}", summary=summary),
        critical(limits, expr=f"{per_request} >= {limits.preemptions_per_request_critical}\n{enough}", summary=summary),
    )


CHECK = Check(id="preemptions_sustained", docs=__doc__, evaluate=evaluate, alert=alert)
