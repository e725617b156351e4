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

- Free the GPU of other tenants, or lower `--gpu-memory-utilization` honestly and plan with the smaller pool.
- `--kv-cache-memory-bytes` (vLLM 0.10.2 and later) fixes the pool instead of leaving it to profiling.
"""

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView, warning
from kvwatch.errors import NoData
from kvwatch.finding import Status, Verdict
from kvwatch.thresholds import Thresholds


def evaluate(view: EngineView, limits: Thresholds) -> Verdict:
    live, budget = view.capacity.num_gpu_blocks, view.facts.budget
    if live is None:
        raise NoData("num_gpu_blocks is not exposed by this engine")
    if budget is None:
        raise NoData("no budget to compare with: give --model, the vLLM flags and --gpu")
    predicted = budget.num_gpu_blocks
    if predicted is None:
        raise NoData("no memory to predict blocks from: give --gpu, --gpu-memory-gib or --kv-cache-memory-bytes")
    deviation = live / predicted - 1
    evidence = {
        "num_gpu_blocks": live,
        "budget_num_gpu_blocks": predicted,
        "capacity_deviation_ratio": round(deviation, 4),
    }
    summary = f"{live:,} blocks, {deviation:+.1%} against the {predicted:,} predicted"
    if deviation < -limits.capacity_deviation_ratio:
        return Verdict(status=Status.WARNING, summary=summary, evidence=evidence)
    return Verdict(status=Status.OK, summary=summary, evidence=evidence)


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    return (
        warning(
            limits,
            expr=f"kvwatch_capacity_deviation_ratio < -{limits.capacity_deviation_ratio}",
            summary=f"the KV pool of {ENGINE} is {{{{ $value | humanizePercentage }}}} off its budget",
        ),
    )


CHECK = Check(id="capacity_below_budget", docs=__doc__, evaluate=evaluate, alert=alert)
