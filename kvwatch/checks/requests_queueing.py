"""Requests wait longer than interactive use bears.

## Meaning

Requests waited all through the window, and those that finished had waited for a second or more on average. The
cause is named as far as the metrics show it: the KV pool, the cap of sequences, deferred requests, or the token budget
of a step and the GPU itself.

## Impact

Queue time is part of the time to first token of every request.

## Diagnosis

- `vllm:request_queue_time_seconds` over the window, not over the server's life.
- `kv_cache_saturated` and `sequence_cap_reached` say which limit binds.
- A queue with a half-empty pool and moving batches is compute: prompts arrive faster than they can be prefilled.

## Mitigation

- KV pool: see `kv_cache_saturated`. Cap of sequences: see `sequence_cap_reached`.
- Compute: add replicas, or raise `--max-num-batched-tokens` where inter-token latency has slack.
- Deferred: raise `--max-loras`, or look at the KV connector.
"""

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView, on_one_page, warning
from kvwatch.checks.sequence_cap_reached import CHECK as SEQUENCE_CAP_REACHED
from kvwatch.errors import NoData
from kvwatch.finding import Status, Verdict
from kvwatch.recording import signals
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import KV_CACHE_USAGE, QUEUE_TIME, REQUESTS_WAITING, REQUESTS_WAITING_BY_REASON


def evaluate(view: EngineView, limits: Thresholds) -> Verdict:
    window = view.window.held(limits.hold_seconds)
    waiting = window.minimum(REQUESTS_WAITING)
    evidence: dict[str, float | int | str] = {
        "waiting_requests_minimum": waiting,
        "waiting_requests": window.value(REQUESTS_WAITING),
    }
    if waiting <= 0:
        return Verdict(status=Status.OK, summary="no lasting queue", evidence=evidence)
    if len(window.snapshots) < 2:
        raise NoData(f"{waiting:.0f} requests wait {on_one_page(view)}")
    limit = binding_limit(view, limits)
    evidence["binding_limit"] = limit
    seconds = _queue_seconds(view)
    if seconds is None:
        return Verdict(
            status=Status.WARNING,
            summary=f"at least {waiting:.0f} requests waited all the time and none finished ({limit})",
            evidence=evidence,
        )
    evidence["queue_time_mean_seconds"] = seconds
    if seconds < limits.queue_time_warning_seconds:
        return Verdict(status=Status.OK, summary=f"requests wait {seconds:.2f} s on average", evidence=evidence)
    return Verdict(
        status=Status.WARNING,
        summary=f"requests wait {seconds:.1f} s on average, at least {waiting:.0f} at a time; the limit is {limit}",
        evidence=evidence,
    )


def binding_limit(view: EngineView, limits: Thresholds) -> str:
    """What holds waiting requests back: one of a closed set of phrases."""
    window = view.window.held(limits.hold_seconds)
    deferred = window.latest.parts.get(REQUESTS_WAITING_BY_REASON.name, {}).get("deferred", 0.0)
    if deferred >= max(1.0, window.minimum(REQUESTS_WAITING)):
        return "deferred requests (LoRA or KV transfer)"
    if window.mean(KV_CACHE_USAGE) >= limits.kv_cache_has_room_ratio:
        return "the KV pool"
    if SEQUENCE_CAP_REACHED.run(view, limits).status is Status.WARNING:
        return "max_num_seqs"
    return "compute or max_num_batched_tokens"


def _queue_seconds(view: EngineView) -> float | None:
    """Mean wait of the requests that finished inside the window (vLLM observes it then), None if none did."""
    return view.window.average(QUEUE_TIME) if view.window.observations(QUEUE_TIME) else None


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    seen = signals(limits)
    return (
        warning(
            limits,
            expr=f"{seen.waiting_minimum} > 0\nand (\n"
            f"  {seen.queue_time_mean} >= {limits.queue_time_warning_seconds}\n"
            f"  or {seen.queue_times_rate} == 0\n)",
            summary=f"at least {{{{ $value }}}} requests wait on {ENGINE}, longer than interactive use bears",
        ),
    )


CHECK = Check(id="requests_queueing", docs=__doc__, evaluate=evaluate, alert=alert)
