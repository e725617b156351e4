"""A few long requests hold the KV pool while others wait.

## Meaning

Every running request holds a quarter of the pool or more on average, and others wait behind them. The pool carries only
a handful of requests of this length, whatever `--max-num-seqs` says.

## Impact

Short requests wait for the long ones to end: their time to first token is somebody else's answer.

## Diagnosis

- `vllm:kv_cache_usage_perc` divided by `vllm:num_requests_running` is the share of one request.
- `vllm:request_prompt_tokens` and `vllm:request_generation_tokens` say how long they are.
- `kvwatch budget` with `--context` says how many requests of that length fit.

## Mitigation

- Now: send requests beyond a length to an engine of their own, so that short ones do not queue behind them.
- At the next rollout: a larger pool (`--kv-cache-dtype fp8`, more GPUs per engine), or a lower `--max-model-len`.
- `--long-prefill-token-threshold` keeps long prompts from taking whole steps; it does not give blocks back.
"""

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView, on_one_page, warning
from kvwatch.finding import Status, Verdict
from kvwatch.recording import signals
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import KV_CACHE_USAGE, REQUESTS_RUNNING, REQUESTS_WAITING


def evaluate(view: EngineView, limits: Thresholds) -> Verdict:
    window = view.window.held(limits.hold_seconds)
    usage, waiting = window.mean(KV_CACHE_USAGE), window.minimum(REQUESTS_WAITING)
    running = window.maximum(REQUESTS_RUNNING)
    evidence = {
        "kv_cache_usage_ratio_mean": usage,
        "running_requests_maximum": running,
        "waiting_requests_minimum": waiting,
    }
    if waiting <= 0 or running <= 0:
        return Verdict(status=Status.OK, summary="no lasting queue behind running requests", evidence=evidence)
    share = usage / running
    evidence["kv_cache_usage_ratio_per_request"] = share
    what = f"{running:.0f} running requests hold {usage:.0%} of the pool, and {waiting:.0f} wait"
    if share < limits.monopoly_share_ratio or usage < limits.monopoly_pool_ratio:
        return Verdict(status=Status.OK, summary=what, evidence=evidence)
    if len(window.snapshots) < 2:
        return Verdict(
            status=Status.UNKNOWN,
            summary=f"{what} {on_one_page(view)}",
            evidence=evidence,
        )
    return Verdict(status=Status.WARNING, summary=what, evidence=evidence)


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    seen = signals(limits)
    return (
        warning(
            limits,
            expr=f"{seen.usage_mean} / ({seen.running_maximum} > 0) >= {limits.monopoly_share_ratio}\n"
            f"and {seen.usage_mean} >= {limits.monopoly_pool_ratio}\n"
            f"and {seen.waiting_minimum} > 0",
            summary=f"a running request holds {{{{ $value | humanizePercentage }}}} of the KV pool of {ENGINE} "
            "while others wait",
        ),
    )


CHECK = Check(id="long_context_monopoly", docs=__doc__, evaluate=evaluate, alert=alert)
