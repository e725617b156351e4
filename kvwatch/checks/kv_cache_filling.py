"""The KV pool fills up with the requests it already has.

## Meaning

The share of blocks held rises towards full although no more requests run than before: the running ones grow, and none
ends. The line through the usage reaches 1 within minutes.

## Impact

None yet. When the pool is full, vLLM preempts the request admitted last and computes it again later.

## Diagnosis

- `predict_linear(vllm:kv_cache_usage_perc[5m], 300)` is above 1 while `vllm:num_requests_running` stands still.
- Long answers: `vllm:request_generation_tokens` against what clients ask for in `max_tokens`.
- A pool that fills because more requests are admitted is a load that comes up, and not this condition.

## Mitigation

- Now: let the gateway hold new requests back until usage falls.
- Ask clients for a `max_tokens`; a request without one may grow to `max_model_len`.
- At the next rollout: `--watermark` (vLLM 0.24 and later) keeps blocks in reserve for requests that grow.
"""

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView
from kvwatch.errors import NoData
from kvwatch.finding import Status, Verdict
from kvwatch.recording import duration, signals
from kvwatch.thresholds import Thresholds
from kvwatch.trend import trend
from kvwatch.vllm_metrics import KV_CACHE_USAGE, REQUESTS_RUNNING


def evaluate(view: EngineView, limits: Thresholds) -> Verdict:
    window = view.window.since_restart
    usage = window.value(KV_CACHE_USAGE)
    evidence = {"kv_cache_usage_ratio": usage}
    if not limits.filling_from_ratio <= usage < limits.kv_cache_saturated_ratio:
        return Verdict(status=Status.OK, summary=f"{usage:.0%} of the pool held", evidence=evidence)
    if window.duration_seconds < limits.hold_seconds:
        raise NoData(f"{usage:.0%} of the pool held; a trend needs {limits.hold_seconds:.0f} s: give --window 60s")
    line, running = trend(window, KV_CACHE_USAGE), trend(window, REQUESTS_RUNNING)
    evidence |= {
        "kv_cache_usage_ratio_per_minute": line.per_second * 60,
        "running_requests_per_minute": running.per_second * 60,
    }
    if line.per_second <= 0 or not line.after(limits.filling_horizon_seconds) >= 1:
        return Verdict(status=Status.OK, summary=f"{usage:.0%} of the pool held, and not filling up", evidence=evidence)
    if running.per_second * limits.alert_range_seconds >= 1:
        return Verdict(status=Status.OK, summary="the pool fills because more requests run", evidence=evidence)
    seconds = max(0.0, 1 - line.now) / line.per_second
    evidence["full_in_seconds"] = seconds
    return Verdict(
        status=Status.WARNING,
        summary=f"{usage:.0%} of the pool held and full in {seconds:.0f} s: running requests grow and none ends",
        evidence=evidence,
    )


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    seen = signals(limits)
    return (
        AlertRule(
            severity=Status.WARNING,
            expr=f"({seen.usage} >= {limits.filling_from_ratio}) < {limits.kv_cache_saturated_ratio}\n"
            f"and {seen.usage_forecast} >= 1\n"
            f"and {seen.running_trend} * {limits.alert_range_seconds:g} < 1",
            for_seconds=limits.alert_critical_for_seconds,  # a forecast is of use before it has come true
            keep_firing_for_seconds=limits.alert_critical_keep_firing_seconds,
            summary=f"the KV pool of {ENGINE} is {{{{ $value | humanizePercentage }}}} full and will be full "
            f"within {duration(limits.filling_horizon_seconds)}",
        ),
    )


CHECK = Check(id="kv_cache_filling", docs=__doc__, evaluate=evaluate, alert=alert)
