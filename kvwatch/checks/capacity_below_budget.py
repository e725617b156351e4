"""The engine has fewer KV blocks than its model, flags and GPU should give.

## Meaning

kvwatch computed from the model's config, the flags and the GPU how many blocks vLLM should have allocated, and the
engine reports clearly fewer. Something took memory before the KV pool was sized.

## Impact

Fewer requests fit than planned: queueing and preemptions start at a lower load than on the other replicas.

## Diagnosis

- Another process on the GPU: `nvidia-smi` on the node. vLLM counts what is free at start, not what the card has.
- Flags that differ from the ones given to kvwatch: compare `vllm:cache_config_info` with the evidence.
- The start-up log: `Available KV cache memory`, the memory of CUDA graphs, a draft model, LoRA adapters.
- The rank with the least memory decides for all ranks.

## Mitigation

- Free the GPU of other tenants, or lower `--gpu-memory-utilization` to what is there and plan with the smaller pool.
- `--kv-cache-memory-bytes` (vLLM 0.10.2 and later) fixes the pool instead of leaving it to profiling.
"""

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView, warning
from kvwatch.errors import NoData
from kvwatch.finding import Status, Verdict
from kvwatch.reconcile import Difference, differences
from kvwatch.thresholds import Thresholds


def evaluate(view: EngineView, limits: Thresholds) -> Verdict:
    live, budget = view.capacity.num_gpu_blocks, view.facts.budget
    if live is None:
        raise NoData("num_gpu_blocks is not exposed by this engine")
    if budget is None:
        raise NoData(view.facts.budget_problem or "no budget to compare with: give --model, the vLLM flags and --gpu")
    predicted = budget.num_gpu_blocks
    deviation = live / predicted - 1
    found = differences(view.window.latest.cache_config, view.capacity, budget)
    evidence: dict[str, float | int | str] = {
        "num_gpu_blocks": live,
        "budget_num_gpu_blocks": predicted,
        "capacity_deviation_ratio": round(deviation, 4),
    }
    low = view.facts.budget_low_num_gpu_blocks
    if low is not None:
        evidence["budget_num_gpu_blocks_low"] = low
    if found:
        evidence["differs"] = "; ".join(str(difference) for difference in found)
    floor = predicted * (1 - limits.capacity_deviation_ratio) if low is None else low
    return Verdict(
        status=Status.WARNING if live < floor else Status.OK,
        summary=_summary(live, predicted, deviation, low, found),
        evidence=evidence,
    )


def _summary(live: int, predicted: int, deviation: float, low: int | None, found: tuple[Difference, ...]) -> str:
    estimated = "" if low is None else f", an estimate with at least {low:,}"
    why = f": {found[0]}" if found else ""
    return f"{live:,} blocks, {deviation:+.1%} against the {predicted:,} predicted{estimated}{why}"


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    return (
        warning(
            limits,
            expr=f"kvwatch_capacity_deviation_ratio < -{limits.capacity_deviation_ratio}",
            summary=f"the KV pool of {ENGINE} is {{{{ $value | humanizePercentage }}}} off its budget",
        ),
    )


CHECK = Check(id="capacity_below_budget", docs=__doc__, evaluate=evaluate, alert=alert)
