"""Requests wait on one engine while another engine of the same model has room.

## Meaning

Of several engines that serve one model, this one has a lasting queue, and another has none and holds far less of its
pool. The load is spread by something that does not see the engines' queues.

## Impact

Requests wait, and may be preempted, although the fleet has room for them.

## Diagnosis

- `vllm:num_requests_waiting` and `vllm:kv_cache_usage_perc` by `instance` and `engine`.
- Round-robin gives every engine as many requests, not as much work: a few long ones make one engine the slow one.
- Sticky sessions and prefix-aware routing concentrate load on purpose; too much of it looks like this.
- With `--data-parallel-size`, vLLM balances by queue length between the engines of one server.

## Mitigation

- Now: take the hot engine out of rotation until its queue is gone.
- Route by queue length and KV-cache usage (a gateway with endpoint picking, llm-d, the router of the production stack).
- Prefix-aware routing: weigh the engine's load against the cached prefix.
"""

from collections.abc import Iterable

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView, warning
from kvwatch.finding import Status, Verdict
from kvwatch.recording import signals
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import KV_CACHE_USAGE, REQUESTS_WAITING
from kvwatch.window import Window


def evaluate(view: EngineView, limits: Thresholds) -> Verdict:
    window = view.window.held(limits.hold_seconds)
    waiting, usage = window.minimum(REQUESTS_WAITING), window.mean(KV_CACHE_USAGE)
    evidence = {"waiting_requests_minimum": waiting, "kv_cache_usage_ratio_mean": usage}
    if waiting <= 0:
        return Verdict(status=Status.OK, summary="no lasting queue", evidence=evidence)
    idle = view.fleet.derived(_usages_with_room, limits.hold_seconds)
    evidence |= {"peers": len(view.fleet.windows) - 1, "peers_without_a_queue": len(idle)}
    if not idle:
        return Verdict(status=Status.OK, summary="no other engine of this model without a queue", evidence=evidence)
    evidence["kv_cache_usage_ratio_mean_lowest"] = idle[0]
    summary = f"{waiting:.0f} requests wait with {usage:.0%} of the pool held; another engine holds {idle[0]:.0%}"
    status = Status.WARNING if usage - idle[0] >= limits.imbalance_ratio else Status.OK
    return Verdict(status=status, summary=summary, evidence=evidence)


def _usages_with_room(windows: Iterable[Window], hold_seconds: float) -> list[float]:
    """The mean usage of every engine that has room, ascending. An engine with a lasting queue has none."""
    held = (window.held(hold_seconds) for window in windows)
    return sorted(window.mean(KV_CACHE_USAGE) for window in held if _has_room(window))


def _has_room(peer: Window) -> bool:
    """Whether an engine shows both signals and had a moment without a queue."""
    shows = peer.latest.get(KV_CACHE_USAGE) is not None and peer.latest.get(REQUESTS_WAITING) is not None
    return shows and peer.minimum(REQUESTS_WAITING) <= 0


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    seen = signals(limits)
    fleet = "cluster, namespace, job, model_name"
    return (
        warning(
            limits,
            expr=f"(\n  {seen.usage_mean}\n  - on ({fleet}) group_left ()\n"
            f"  min by ({fleet}) ({seen.usage_mean} unless {seen.waiting_minimum} > 0)\n"
            f") >= {limits.imbalance_ratio}\n"
            f"and {seen.waiting_minimum} > 0",
            summary=f"requests wait on {ENGINE} while another engine of the model holds "
            "{{ $value | humanizePercentage }} of its pool less",
        ),
    )


CHECK = Check(id="replica_imbalance", docs=__doc__, evaluate=evaluate, alert=alert)
