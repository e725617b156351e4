"""The conditions kvwatch recognises, one file each, in the order in which a report shows them.

metrics_missing             the page lacks what kvwatch needs
engine_stalled              requests are held and no token comes out
preemptions_sustained       the pool is thrashing
kv_cache_saturated          the pool is full and requests wait for it
kv_cache_filling            the running requests fill the pool within minutes
sequence_cap_reached        the batch is at its cap while the pool has room
requests_queueing           requests wait too long, whatever the limit
long_context_monopoly       a few long requests hold the pool while others wait
context_exceeds_capacity    one request of the maximum length does not fit
concurrency_oversubscribed  more requests in flight than the pool can carry
capacity_below_budget       fewer blocks than the configuration should give
kv_cache_underused          a day never needed more than a part of the pool
prefix_cache_ineffective    prefix caching cannot hit: a block is longer than the prompts
prefix_cache_evicting       prefixes are evicted before they are used again
admission_rejected          requests are refused at the limit of the queue
replica_imbalance           requests wait here while another engine has room
config_drift                engines of one model are configured differently
"""

from kvwatch.checks import (
    admission_rejected,
    capacity_below_budget,
    concurrency_oversubscribed,
    config_drift,
    context_exceeds_capacity,
    engine_stalled,
    kv_cache_filling,
    kv_cache_saturated,
    kv_cache_underused,
    long_context_monopoly,
    metrics_missing,
    preemptions_sustained,
    prefix_cache_evicting,
    prefix_cache_ineffective,
    replica_imbalance,
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
    kv_cache_filling.CHECK,
    sequence_cap_reached.CHECK,
    requests_queueing.CHECK,
    long_context_monopoly.CHECK,
    context_exceeds_capacity.CHECK,
    concurrency_oversubscribed.CHECK,
    capacity_below_budget.CHECK,
    kv_cache_underused.CHECK,
    prefix_cache_ineffective.CHECK,
    prefix_cache_evicting.CHECK,
    admission_rejected.CHECK,
    replica_imbalance.CHECK,
    config_drift.CHECK,
)


def evaluate_all(view: EngineView, limits: Thresholds) -> tuple[Finding, ...]:
    """One finding per check, in the order of `ALL`."""
    return tuple(check.run(view, limits) for check in ALL)
