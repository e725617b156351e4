"""vLLM refuses requests because its queue is at its limit.

## Meaning

A limit on queued requests or tokens (`--max-num-queued-reqs` and its kin, vLLM 0.32 and later) is reached, and requests
beyond it are answered with an error at once. vLLM counts them for the whole server, not for each of its engines.

## Impact

Clients see errors. That is what the limit is for: better a fast error than a wait beyond their time-out. Lasting
refusals mean that the load is more than the engines carry.

## Diagnosis

- `rate(vllm:admission_rejections_total[5m])` by `reason`, against `rate(vllm:request_success_total[5m])`.
- `kv_cache_saturated`, `sequence_cap_reached` and `requests_queueing` say what holds the queue back.

## Mitigation

- Add replicas, or shed load at the gateway, where clients can be told when to retry.
- Clients must retry with growing pauses: retries at once keep the queue full.
- Raise the limit only if the queue time it allows is still within what clients bear.
"""

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView, warning
from kvwatch.finding import Status, Verdict
from kvwatch.recording import signals
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import ADMISSION_REJECTIONS, REQUEST_SUCCESS


def evaluate(view: EngineView, limits: Thresholds) -> Verdict:
    window = view.window
    refused, finished = window.increase(ADMISSION_REJECTIONS), window.increase(REQUEST_SUCCESS)
    evidence = {"rejected_requests": refused, "finished_requests": finished}
    if refused < limits.rejections_minimum:
        return Verdict(status=Status.OK, summary=f"{refused:.0f} requests refused", evidence=evidence)
    share = refused / (refused + finished)
    evidence["rejected_ratio"] = share
    status = Status.WARNING if share >= limits.rejected_ratio_warning else Status.OK
    summary = f"{refused:.0f} requests refused at the limit of the queue, {share:.1%} of all"
    return Verdict(status=status, summary=summary, evidence=evidence)


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    seen = signals(limits)
    refused, over = seen.rejections_rate, f"{limits.alert_range_seconds:g}"
    return (
        warning(
            limits,
            expr=f"{refused}\n/ (\n  {refused}\n  + ignoring (engine) group_left ()\n"
            f"  sum without (engine) ({seen.finished_rate})\n)\n"
            f">= {limits.rejected_ratio_warning}\n"
            f"and {refused} * {over} >= {limits.rejections_minimum}",
            summary=f"{{{{ $value | humanizePercentage }}}} of the requests are refused by the server of {ENGINE}",
        ),
    )


CHECK = Check(id="admission_rejected", docs=__doc__, evaluate=evaluate, alert=alert)
