"""One request of the maximum length does not fit into the KV pool.

## Meaning

The engine accepts requests up to `max_model_len` tokens, and one of that length needs more blocks than the pool can
ever give. vLLM 0.29 and later refuse to start like this; earlier versions start when the need equals the pool, which is
one block too many because block 0 is never handed out, and hybrid models could be admitted and hang.

## Impact

A request that long is accepted, grows until the pool is empty, preempts everybody else and then itself, and never ends.

## Diagnosis

- Maximum concurrency below 1 in the start-up line or in `kv_cache_max_concurrency` of `vllm:cache_config_info`.
- `kvwatch budget` with the same flags prints the largest `max_model_len` that fits.

## Mitigation

- Lower `--max-model-len` to what fits, or give the pool more memory; both need a restart.
- Until then, refuse longer requests at the gateway.
"""

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView, critical, reported
from kvwatch.errors import NoData
from kvwatch.finding import Status, Verdict
from kvwatch.recording import joined, signals
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import CACHE_CONFIG_INFO

# The label kv_cache_max_concurrency (vLLM 0.24+) is blocks / blocks per request, so up to 1 the null block is lacking.
_AT_MOST_ONE = r'kv_cache_max_concurrency=~"0|0\\..*|1|1\\.0"'


def evaluate(view: EngineView, _limits: Thresholds) -> Verdict:
    capacity = view.capacity
    if capacity.usable_blocks is None:
        raise NoData("num_gpu_blocks is not exposed by this engine")
    if capacity.blocks_per_max_len_request is None:
        raise NoData("max_model_len is not known: give --max-model-len or a URL that answers /v1/models")
    needed, usable = capacity.blocks_per_max_len_request, capacity.usable_blocks
    fits = usable / needed
    evidence: dict[str, float | int | str] = {
        "blocks_per_max_len_request": needed,
        "usable_blocks": usable,
        "max_len_requests_that_fit": fits,
    }
    if capacity.max_model_len:
        evidence["max_model_len"] = capacity.max_model_len
    if needed > usable:
        return Verdict(
            status=Status.CRITICAL,
            summary=f"a request of max_model_len needs {needed:,} blocks and the pool has {usable:,}",
            evidence=evidence,
        )
    return Verdict(
        status=Status.OK,
        summary=f"the pool holds {fits:.2f} requests of the maximum length",
        evidence=evidence,
    )


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    config = joined(CACHE_CONFIG_INFO, "{}", matcher=_AT_MOST_ONE).replace("\n", "\n  ")
    return (
        critical(
            limits,
            expr=f"{signals(limits).seen}\nand on (job, instance, namespace, pod, engine) (\n  {config}\n)\n"
            f"or {reported('context_exceeds_capacity', Status.CRITICAL)}",
            summary=f"a request of the maximum length does not fit into the KV pool of {ENGINE}",
        ),
    )


CHECK = Check(id="context_exceeds_capacity", docs=__doc__, evaluate=evaluate, alert=alert)
