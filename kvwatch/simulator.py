"""Run a workload through vLLM's scheduler without an engine, and measure what the requests went through.

The decisions are those of vLLM's V1 scheduler, step for step (kvwatch/scheduling.py says what is modelled and what is
not). A cost model says how long a step takes.
"""

from collections.abc import Sequence

from kvwatch.errors import SettingError
from kvwatch.samples import nearest_rank
from kvwatch.scheduling import Engine
from kvwatch.simulation import CostModel, Request, Retry, SchedulerSettings, SimulationResult, Trace
from kvwatch.ticks import seconds_of


def simulate(
    settings: SchedulerSettings,
    cost: CostModel,
    requests: Sequence[Request],
    clients: int | None = None,
    trace: Trace | None = None,
    *,
    retry: Retry | None = None,
) -> SimulationResult:
    """Run `requests` through the scheduler until all are done. Deterministic.

    Requests that have arrived by the start of a step are seen by it, in the order of the list; an empty engine jumps
    to the next arrival; a token counts at the end of its step; every request makes exactly `output_tokens`. With
    `clients` the loop is closed: the next request of the list arrives at the end of the step that finished one.
    The clock starts at 0 with the engine empty; `makespan_seconds` is its reading at the end.

    `trace` is called with every step's decision; it makes the run slower and changes nothing else.

    Raises SettingError if a request could never run with these settings.
    """
    if clients is not None and clients < 1:
        raise SettingError(f"clients is {clients}; a closed loop needs at least one client.")
    if not requests:
        raise SettingError("the workload has no requests, so there is nothing to simulate. Add some to `requests`.")
    for index, request in enumerate(requests):
        check_fits(settings, request, index)
    engine = Engine(settings, cost, requests, clients=clients, retry=retry, trace=trace)
    engine.run()
    return _result(engine, settings, len(requests))


def check_fits(settings: SchedulerSettings, request: Request, index: int) -> None:
    """Raise SettingError for a request that vLLM would reject, or hold in its queue for ever.

    vLLM answers HTTP 400 to a request whose prompt and output exceed max_model_len. One that needs more blocks than
    there are is never scheduled; vLLM guards against it at start-up only, by comparing max_model_len with the pool.
    """
    length = request.prompt_tokens + request.output_tokens
    if length > settings.max_model_len:
        raise SettingError(
            f"request {index} has {request.prompt_tokens} prompt and {request.output_tokens} output tokens, together "
            f"{length}, more than max_model_len {settings.max_model_len}: vLLM rejects it with HTTP 400. Shorten it or "
            "raise max_model_len."
        )
    needed = settings.admission_blocks(length - 1)  # the KV of the last token is never computed
    if needed > settings.usable_blocks:
        raise SettingError(
            f"request {index} needs {needed} blocks for its {length} tokens, and the pool has {settings.usable_blocks} "
            f"({settings.num_gpu_blocks} minus the null block): vLLM would never schedule it to its end. Shorten it or "
            "raise num_gpu_blocks."
        )


def _result(engine: Engine, settings: SchedulerSettings, requests: int) -> SimulationResult:
    tally, usable = engine.tally, settings.usable_blocks
    makespan = seconds_of(engine.now)
    return SimulationResult(
        requests=requests,
        steps=engine.steps,
        preemptions=tally.preemptions,
        scheduled_tokens=tally.scheduled_tokens,
        output_tokens=tally.output_tokens,
        makespan_seconds=makespan,
        output_tokens_per_second=tally.output_tokens / makespan if makespan else 0.0,
        ttft_p50_seconds=nearest_rank(tally.ttft, 50),
        ttft_p99_seconds=nearest_rank(tally.ttft, 99),
        itl_p50_seconds=tally.itl.nearest_rank(50),
        itl_p99_seconds=tally.itl.nearest_rank(99),
        queue_p50_seconds=nearest_rank(tally.queue, 50),
        queue_p99_seconds=nearest_rank(tally.queue, 99),
        peak_usage_ratio=1.0 - tally.least_free / usable,
        recomputed_tokens=tally.recomputed_tokens,
        prefix_hit_tokens=tally.prefix_hit_tokens,
        preemptions_per_request=tally.preemptions / requests,
        timeouts=tally.timeouts,
        abandoned_requests=tally.abandoned,
        usage_timeline=tuple(peak / usable for peak in tally.timeline.peaks),
        usage_timeline_step_seconds=seconds_of(tally.timeline.span),
    )
