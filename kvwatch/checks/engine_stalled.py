"""The engine holds requests and produces no token.

## Meaning

Requests are running or waiting, yet for a minute no prompt token was counted, no token was generated and no block was
allocated or freed. (During a long prefill the tokens stand still as well, but `kv_cache_usage_perc` moves.) With
running 0 and waiting above 0 the scheduler is deadlocked; with running above 0 a worker hangs, or a request was
admitted that can never fit into the pool.

## Impact

Every client of this engine waits until its own timeout. Load balancers that look at the queue only keep sending.

## Diagnosis

- `vllm:num_requests_running`, `vllm:num_requests_waiting` and `vllm:kv_cache_usage_perc` stand still.
- `vllm:engine_sleep_state` tells a sleeping engine from a stalled one.
- The engine's log: a worker's stack trace, an NCCL time-out, a KV connector waiting for a transfer.
- `context_exceeds_capacity` tells whether one request of the maximum length fits the pool at all.

## Mitigation

- Take the engine out of rotation, keep its log and `py-spy dump` of the engine process, then restart it.
- With KV offloading or a KV connector, look for a deadlock fixed in a later vLLM release before adding capacity.
- If a request longer than the pool was admitted, lower `--max-model-len` to what the pool holds.
"""

from kvwatch.checks.check import ENGINE, AlertRule, Check, EngineView, critical
from kvwatch.errors import NoData
from kvwatch.finding import Status, Verdict
from kvwatch.recording import signals
from kvwatch.thresholds import Thresholds
from kvwatch.vllm_metrics import (
    ENGINE_SLEEP_STATE,
    GENERATION_TOKENS,
    KV_CACHE_USAGE,
    PROMPT_TOKENS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
)
from kvwatch.window import Window


def evaluate(view: EngineView, limits: Thresholds) -> Verdict:
    held = view.window.held(limits.stall_seconds * 1.5)
    if _sleeps(held):
        return Verdict(status=Status.OK, summary="the engine sleeps on request")
    running, waiting = held.minimum(REQUESTS_RUNNING), held.minimum(REQUESTS_WAITING)
    if running + waiting <= 0:
        return Verdict(status=Status.OK, summary="no request was held all the time")
    if len(held.snapshots) < 2 and view.window.restarts:
        raise NoData("the engine restarted; a rate needs two pages since then")
    tokens = held.increase(GENERATION_TOKENS) + held.increase(PROMPT_TOKENS)
    evidence = {
        "running_requests": held.value(REQUESTS_RUNNING),
        "waiting_requests": held.value(REQUESTS_WAITING),
        "tokens": tokens,
        "watched_seconds": held.counted_seconds,
    }
    if tokens > 0:
        rate = tokens / held.counted_seconds
        return Verdict(status=Status.OK, summary=f"{rate:,.0f} tokens per second", evidence=evidence)
    if _usage_moves(held):
        summary = "no token was counted, but blocks are being allocated: a long prefill"
        return Verdict(status=Status.OK, summary=summary, evidence=evidence)
    what = f"no token in {held.counted_seconds:.0f} s with {running:.0f} running and {waiting:.0f} waiting"
    if held.counted_seconds < limits.stall_seconds:
        return Verdict(
            status=Status.UNKNOWN,
            summary=f"{what}; {limits.stall_seconds:.0f} s tell a stall from a long prefill: give --window 70s",
            evidence=evidence,
        )
    kind = "the scheduler is deadlocked" if running == 0 else "the engine hangs"
    return Verdict(status=Status.CRITICAL, summary=f"{what}: {kind}", evidence=evidence)


def _usage_moves(window: Window) -> bool:
    """Whether blocks were allocated or freed: tokens of a prompt are counted only when all of it is computed."""
    if window.latest.get(KV_CACHE_USAGE) is None:
        return False
    return window.maximum(KV_CACHE_USAGE) > window.minimum(KV_CACHE_USAGE)


def _sleeps(window: Window) -> bool:
    return window.latest.parts.get(ENGINE_SLEEP_STATE.name, {}).get("awake") == 0


def alert(limits: Thresholds) -> tuple[AlertRule, ...]:
    seen = signals(limits)
    return (
        critical(
            limits,
            expr=f"{seen.held_while_stalled} > 0\nand {seen.tokens_while_stalled} == 0\n"
            f"unless {seen.usage_moves_while_stalled} > 0\nunless {seen.awake} == 0",
            summary=f"{ENGINE} holds {{{{ $value }}}} requests and produces no token",
        ),
    )


CHECK = Check(id="engine_stalled", docs=__doc__, evaluate=evaluate, alert=alert)
