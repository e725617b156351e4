"""The conditions kvwatch recognises, one file each, in the order in which a report shows them.

metrics_missing             the page lacks what kvwatch needs
engine_stalled              requests are held and no token comes out
preemptions_sustained       the pool is thrashing
kv_cache_saturated          the pool is full and requests wait for it
sequence_cap_reached        the batch is at its cap while the pool has room
requests_queueing           requests wait too long, whatever the limit
context_exceeds_capacity    one request of the maximum length does not fit
concurrency_oversubscribed  more requests in flight than the pool can carry
capacity_below_budget       fewer blocks than the configuration should give
"""

from kvwatch.checks import (
    capacity_below_budget,
    concurrency_oversubscribed,
    context_exceeds_capacity,
    engine_stalled,
    kv_cache_saturated,
    metrics_missing,
    preemptions_sustained,
    requests_queueing,
    sequence_cap_reached,
)
from kvwatch.checks.check import Check, EngineView
from kvwatch.finding import Finding
from kvwatch.thresholds import Thresholds

ALL: tuple[Check, ...] = (
    metrics_missing.CHECK,
    engine_stalled.CHECK,
    preemptions_sustained.CHECK,
    kv_cache_saturated.CHECK,
    sequence_cap_reached.CHECK,
    requests_queueing.CHECK,
    context_exceeds_capacity.CHECK,
    concurrency_oversubscribed.CHECK,
    capacity_below_budget.CHECK,
)


def evaluate_all(view: EngineView, limits: Thresholds) -> tuple[Finding, ...]:
    """One finding per check, in the order of `ALL`."""
    return tuple(check.run(view, limits) for check in ALL)
