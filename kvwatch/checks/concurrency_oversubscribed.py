"""More requests are in flight than the KV pool can carry to their end.

## Meaning

The requests running, and those waiting for the pool, need more blocks at the lengths seen lately than the pool has.
vLLM admits by what a request needs now, not by what it will have grown to, so it starts more than it can finish.

## Impact

Preemptions follow as the running requests grow, unless enough of them end early.

## Diagnosis

- Requests in flight times the blocks that one holds on average, plus their spread, against the pool: the evidence.
- `--max-num-seqs` defaults to 256 or 1,024, far beyond what most pools carry at long lengths.
- The concurrency that vLLM logs at start is for requests of the maximum length; shorter ones fit more often.

## Mitigation

- Cap requests in flight at the gateway at the number `kvwatch recommend` gives.
- Set `--max-num-seqs` or, on vLLM 0.24 and later, `--watermark` at the next rollout.
"""

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView, reported, warning
from kvwatch.errors import NoData
from kvwatch.finding import Status, Verdict
from kvwatch.footprint import Footprint, footprint
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import KV_CACHE_USAGE, REQUESTS_RUNNING, REQUESTS_WAITING
from kvwatch.window import Window


def evaluate(view: EngineView, limits: Thresholds) -> Verdict:
    usable = view.capacity.usable_blocks
    if usable is None:
        raise NoData("num_gpu_blocks is not exposed by this engine")
    in_flight = _on_the_pool(view.window.held(limits.hold_seconds), limits)
    size = request_footprint(view)
    carried = size.carried_by(usable, limits.pool_fits_probability)
    needed = size.demand_blocks(int(in_flight), limits.pool_fits_probability)
    evidence: dict[str, float | int | str] = {
        "requests_in_flight_minimum": in_flight,
        "requests_carried": carried,
        "demand_blocks": round(needed, 1),
        "usable_blocks": usable,
        "live_blocks_per_request_mean": round(size.live_blocks_mean, 2),
        "lengths_from": size.source,
    }
    if in_flight > carried:
        return Verdict(
            status=Status.WARNING,
            summary=f"{in_flight:.0f} requests in flight; the pool carries {carried} of today's length",
            evidence=evidence,
        )
    return Verdict(
        status=Status.OK,
        summary=f"as few as {in_flight:.0f} requests in flight; the pool carries {carried} of today's length",
        evidence=evidence,
    )


def _on_the_pool(window: Window, limits: Thresholds) -> float:
    """Requests in flight, without those that wait while the pool has room: another limit holds them back."""
    if window.maximum(KV_CACHE_USAGE) < limits.kv_cache_has_room_ratio:
        return window.minimum(REQUESTS_RUNNING)
    return lasting_in_flight(window)


def request_footprint(view: EngineView) -> Footprint:
    """The footprint of this engine's requests. Raises NoData naming what is missing."""
    usable = view.capacity.usable_blocks
    if usable is None:
        raise NoData("num_gpu_blocks is not exposed by this engine")
    budget = view.facts.budget
    return footprint(
        view.window,
        blocks_for=view.capacity.blocks_for
        if budget is None
        else lambda tokens: budget.blocks_for_request(int(tokens)),
        usable_blocks=usable,
        max_model_len=view.capacity.max_model_len,
    )


def lasting_in_flight(window: Window) -> float:
    """Requests running or waiting all through the window: the smallest sum of the two."""
    return min(_in_flight(window))


def peak_in_flight(window: Window) -> float:
    """The most requests running or waiting at a time: what a cap would have cut."""
    return max(_in_flight(window))


def _in_flight(window: Window) -> list[float]:
    sums = [
        running + waiting
        for snapshot in window.snapshots
        if (running := snapshot.get(REQUESTS_RUNNING)) is not None
        and (waiting := snapshot.get(REQUESTS_WAITING)) is not None
    ]
    if not sums:
        raise NoData(f"{REQUESTS_RUNNING.exposed} and {REQUESTS_WAITING.exposed} are not exposed")
    return sums


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    return (
        warning(
            limits,
            expr=reported("concurrency_oversubscribed", Status.WARNING),
            summary=f"{ENGINE} has more requests in flight than its KV pool can carry to their end",
        ),
    )


CHECK = Check(id="concurrency_oversubscribed", docs=__doc__, evaluate=evaluate, alert=alert)
