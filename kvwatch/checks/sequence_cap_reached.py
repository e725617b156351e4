"""The batch is at its cap of sequences while the KV pool has room.

## Meaning

Requests wait although blocks are free, because as many requests run as `--max-num-seqs` (or `--max-num-active-seqs`)
allows. vLLM does not export the cap. kvwatch takes it from `--max-num-seqs` on its own command line, from NIM's
`num_request_max`, or infers it: the number of running requests does not move while others wait.

## Impact

Queue time is added to the time to first token although the GPU's memory could carry more requests.

## Diagnosis

- `vllm:num_requests_running` flat, `vllm:num_requests_waiting` above 0, `vllm:kv_cache_usage_perc` below 0.9.
- `vllm:num_requests_waiting_by_reason{reason="deferred"}` above 0 means another limit: LoRA adapters or KV transfer.
- `--max-num-batched-tokens` can hold prompts back as well; then running still moves.

## Mitigation

- Raise `--max-num-seqs` at the next rollout, not beyond what the pool carries: `kvwatch budget` and
  `kvwatch recommend` give that number.
- Now: add replicas, or accept the queue if inter-token latency is what the cap protects.
"""

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView, warning
from kvwatch.errors import NoData
from kvwatch.finding import Status, Verdict
from kvwatch.recording import signals
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import (
    KV_CACHE_USAGE,
    MAX_NUM_SEQS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    REQUESTS_WAITING_BY_REASON,
)
from kvwatch.window import Window


def evaluate(view: EngineView, limits: Thresholds) -> Verdict:
    window = view.window.held(limits.hold_seconds)
    usage, waiting = window.maximum(KV_CACHE_USAGE), window.minimum(REQUESTS_WAITING)
    lowest, highest = window.minimum(REQUESTS_RUNNING), window.maximum(REQUESTS_RUNNING)
    evidence = {
        "running_requests_minimum": lowest,
        "running_requests_maximum": highest,
        "waiting_requests_minimum": waiting,
        "kv_cache_usage_ratio_maximum": usage,
    }
    other = _not_the_cap(window, limits, waiting, usage)
    if other:
        return Verdict(status=Status.OK, summary=other, evidence=evidence)
    known = view.facts.max_num_seqs or window.latest.get(MAX_NUM_SEQS)
    if known is not None:
        evidence["max_num_seqs"] = known
        if lowest < known:
            return Verdict(status=Status.OK, summary=f"{lowest:.0f} of {known:.0f} sequences ran", evidence=evidence)
        return _reached(f"{known:.0f} sequences", waiting, usage, evidence)
    watched = view.window.held(limits.pinned_seconds)
    if len(watched.snapshots) < 3:
        raise NoData(
            "max_num_seqs is not exposed by vLLM: give --max-num-seqs, or --window to see if running is pinned"
        )
    lowest, highest = watched.minimum(REQUESTS_RUNNING), watched.maximum(REQUESTS_RUNNING)
    evidence |= {"running_requests_minimum": lowest, "running_requests_maximum": highest}
    if lowest < highest or lowest <= 0:
        return Verdict(status=Status.OK, summary="the number of running requests moves", evidence=evidence)
    return _reached(f"{lowest:.0f} sequences (inferred)", waiting, usage, evidence)


def _not_the_cap(window: Window, limits: Thresholds, waiting: float, usage: float) -> str | None:
    """Why the cap of sequences cannot be the limit, None if it may be."""
    if waiting <= 0:
        return "no lasting queue"
    if usage >= limits.kv_cache_has_room_ratio:
        return f"the pool is the limit ({usage:.0%} held)"
    if window.latest.parts.get(REQUESTS_WAITING_BY_REASON.name, {}).get("deferred", 0.0) >= waiting:
        return "requests wait for LoRA slots or KV transfers"
    return None


def _reached(cap: str, waiting: float, usage: float, evidence: dict[str, float]) -> Verdict:
    return Verdict(
        status=Status.WARNING,
        summary=f"the batch is at its cap of {cap}: {waiting:.0f} wait while {1 - usage:.0%} of the pool is free",
        evidence=evidence,
    )


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    seen = signals(limits)
    lowest, highest, known = seen.running_minimum, seen.running_maximum, seen.max_num_seqs
    return (
        warning(
            limits,
            expr=f"(\n  {lowest} >= {known}\n  or ({lowest} == {highest} unless {known})\n) > 0\n"
            f"and {seen.waiting_minimum} > 0\n"
            f"and {seen.usage_maximum} < {limits.kv_cache_has_room_ratio}\n"
            f"unless {seen.deferred} >= {seen.waiting_minimum}",
            summary=f"{ENGINE} runs {{{{ $value }}}} sequences and not more, although its KV pool has room",
        ),
    )


CHECK = Check(id="sequence_cap_reached", docs=__doc__, evaluate=evaluate, alert=alert)
