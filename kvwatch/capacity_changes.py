"""What else than the scheduler's caps could change: the pool, a step's tokens, the longest request, the engines.

Each is simulated together with the best `max_num_seqs` and `watermark`, on the same draws, so that it shows what it
adds to them; a larger pool with the present `max_num_seqs`, for a lower one is what the smaller pool carries. A pool
under another flag is the live one times the ratio of two budgets: what this model and GPU give with the flag to what
they give now. Without a model nothing is known of that, and only the others are tried.

- gpu_memory_utilization 0.95, the most that leaves vLLM's uncounted memory room.
- kv_cache_dtype fp8, where vLLM takes it for this model and it gives more tokens than the present one.
- max_num_batched_tokens, half and twice: a step's activations come out of the same memory as the pool, so twice is
  tried only with a model.
- max_model_len, down to what 99 % of the requests need: vLLM refuses the others. It does not enlarge the pool.
- replicas, 2 to 4 for each engine there is: its load is dealt to them in turn.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvwatch.checks.check import EngineView
from kvwatch.errors import KvwatchError
from kvwatch.objective import CALM_PREEMPTIONS_PER_REQUEST
from kvwatch.settings_now import with_budget
from kvwatch.simulation import Request, SchedulerSettings, SimulationResult
from kvwatch.simulator import simulate
from kvwatch.what_if import Trial, Tried, mean_of, run, with_seqs

UTILIZATION = 0.95
MOST_REPLICAS = 4
LENGTHS_KEPT_RATIO = 0.99
_LENGTH_STEP = 256
ENDED_RATIO = 0.20  # of the present preemptions may be left
_FP8_SINCE = (8, 9)  # vllm/v1/attention/backends/triton_attn.py, TritonAttentionImpl.__init__ (0.32.0)
FASTER_RATIO, EARLIER_RATIO = 1.10, 0.50


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityChange:
    """One change, and what came of simulating it. `current` is None where it is not known.

    `tried.settings` are those of each engine; counts and throughput are of all `replicas` that share its load.
    """

    setting: str
    current: float | int | str | None
    proposed: float | int | str
    apply: Literal["now", "restart"]
    tried: Tried
    replicas: int = 1
    max_concurrency: float | None = None  # of requests of max_model_len, by the recomputed budget
    note: str = ""


def capacity_changes(
    view: EngineView, trial: Trial, settings: SchedulerSettings, *, batch_known: bool
) -> tuple[CapacityChange, ...]:
    """Every change that can be tried, in the order in which one would make them: the cheapest first.

    `settings` are the best of the scheduler's.
    """
    most = max(settings.max_num_seqs, trial.settings.max_num_seqs)
    return (
        *_larger_pools(view, trial, with_seqs(settings, most, settings.watermark)),
        *(_batches(view, trial, settings) if batch_known else ()),
        *_shorter_requests(view, trial, settings),
        *_replicas(trial, settings, engines=max(1, len(view.fleet.windows))),
    )


# ---- the pool ------------------------------------------------------------------------------------------------------


def _larger_pools(view: EngineView, trial: Trial, settings: SchedulerSettings) -> Iterator[CapacityChange]:
    budget = view.facts.budget
    if budget is None:
        return
    engine = budget.engine
    has_estimate = engine.kv_cache_memory_bytes is None and engine.num_gpu_blocks_override is None
    if has_estimate and engine.gpu_memory_utilization < UTILIZATION - 0.01:
        now = engine.gpu_memory_utilization
        yield from _pool(view, trial, settings, setting="gpu_memory_utilization", current=now, value=UTILIZATION)
    if engine.num_gpu_blocks_override is None:
        note = "halves the precision of keys and values: compare answers before the rollout"
        if engine.device is not None and not engine.device.is_amd and (engine.device.capability or (9, 0)) < _FP8_SINCE:
            note += "; on this GPU it needs FlashInfer, for Triton has no fp8 below compute capability 8.9"
        dtype = engine.kv_cache_dtype
        yield from _pool(view, trial, settings, setting="kv_cache_dtype", current=dtype, value="fp8", note=note)


def _pool(
    view: EngineView,
    trial: Trial,
    settings: SchedulerSettings,
    *,
    setting: str,
    current: float | str,
    value: float | str,
    note: str = "",
) -> Iterator[CapacityChange]:
    """The change, if the budget can be recomputed with it and gives more blocks' worth of tokens."""
    under = _under(view, trial, settings, {setting: value})
    if under is None or under[0].pool_tokens <= settings.pool_tokens:
        return
    yield CapacityChange(
        setting=setting,
        current=current,
        proposed=value,
        apply="restart",
        tried=_tried(trial, under[0]),
        max_concurrency=under[1],
        note=note,
    )


def _under(
    view: EngineView, trial: Trial, settings: SchedulerSettings, changes: Mapping[str, Any]
) -> tuple[SchedulerSettings, float] | None:
    """The settings on the pool of a budget recomputed with these flags, and its concurrency; None where vLLM refuses
    them, where the load's longest request would no longer fit, or nobody can say.
    """
    if view.facts.budget is None or view.facts.budget_under is None:
        return None
    try:
        budget = view.facts.budget_under(changes)
    except KvwatchError:  # such a flag is no option here
        return None
    changed = with_budget(settings, view.facts.budget, budget)
    longest_tokens = max(r.prompt_tokens + r.output_tokens for draw in trial.draws for r in draw)
    if changed is None or changed.admission_blocks(longest_tokens - 1) > changed.usable_blocks:
        return None
    return changed, budget.max_concurrency


# ---- the tokens of a step ------------------------------------------------------------------------------------------


def _batches(view: EngineView, trial: Trial, settings: SchedulerSettings) -> Iterator[CapacityChange]:
    now = settings.max_num_batched_tokens
    for value in (now // 2, 2 * now):
        if value < settings.max_num_seqs or value < settings.block_size:
            continue
        under = _under(view, trial, settings, {"max_num_batched_tokens": value})
        if under is None and value > now:
            continue  # how much smaller the pool gets is not known
        pool, concurrency = under or (settings, None)
        yield CapacityChange(
            setting="max_num_batched_tokens",
            current=now,
            proposed=value,
            apply="restart",
            tried=_tried(trial, replace(pool, max_num_batched_tokens=value)),
            max_concurrency=concurrency,
        )


# ---- the longest request -------------------------------------------------------------------------------------------


def _shorter_requests(view: EngineView, trial: Trial, settings: SchedulerSettings) -> Iterator[CapacityChange]:
    """Without the longest requests; only where they are several times as long as the others."""
    lengths = sorted(request.prompt_tokens + request.output_tokens for draw in trial.draws for request in draw)
    usual = lengths[len(lengths) // 2]
    kept = lengths[math.ceil(LENGTHS_KEPT_RATIO * len(lengths)) - 1]
    longest = math.ceil(kept / _LENGTH_STEP) * _LENGTH_STEP
    if longest >= min(lengths[-1], settings.max_model_len) or lengths[-1] < 4 * usual:
        return
    draws = tuple(tuple(r for r in draw if r.prompt_tokens + r.output_tokens <= longest) for draw in trial.draws)
    refused = 1 - sum(map(len, draws)) / len(lengths)
    yield CapacityChange(
        setting="max_model_len",
        current=view.capacity.max_model_len,
        proposed=longest,
        apply="restart",
        tried=_tried(replace(trial, draws=draws), replace(settings, max_model_len=longest)),
        note=f"vLLM then refuses {refused:.1%} of the requests; send those to an engine of their own",
    )


# ---- more engines --------------------------------------------------------------------------------------------------


def _replicas(trial: Trial, settings: SchedulerSettings, *, engines: int) -> Iterator[CapacityChange]:
    """Twice as many as there are, and more until the preemptions are gone."""
    for replicas in range(2, MOST_REPLICAS + 1):
        if trial.clients is not None and trial.clients < 2 * replicas:
            return
        runs = tuple(_on_replicas(trial, settings, draw, replicas) for draw in trial.draws)
        yield CapacityChange(
            setting="replicas",
            current=engines,
            proposed=engines * replicas,
            apply="now",
            tried=Tried(settings=settings, in_flight=None, runs=runs),
            replicas=replicas,
            note="behind a router that keeps the load of the engines alike",
        )
        if not any(run.preemptions for run in runs):
            return


def _on_replicas(
    trial: Trial, settings: SchedulerSettings, requests: Sequence[Request], replicas: int
) -> SimulationResult:
    """Every request goes to the next engine in turn, every client to one of them; all engines as one result."""
    clients = [None] * replicas if trial.clients is None else _dealt(trial.clients, replicas)
    runs = [
        simulate(settings, trial.cost, tuple(requests[number::replicas]), clients[number]) for number in range(replicas)
    ]
    seconds = max(run.makespan_seconds for run in runs)
    output_tokens = sum(run.output_tokens for run in runs)
    preemptions, count = sum(run.preemptions for run in runs), sum(run.requests for run in runs)
    return replace(
        runs[0],
        requests=count,
        steps=max(run.steps for run in runs),
        preemptions=preemptions,
        preemptions_per_request=preemptions / count,
        output_tokens=output_tokens,
        makespan_seconds=seconds,
        output_tokens_per_second=output_tokens / seconds,
        recomputed_tokens=sum(run.recomputed_tokens for run in runs),
        ttft_p50_seconds=mean_of(run.ttft_p50_seconds for run in runs),
        ttft_p99_seconds=mean_of(run.ttft_p99_seconds for run in runs),
        itl_p50_seconds=mean_of(run.itl_p50_seconds for run in runs),
        itl_p99_seconds=mean_of(run.itl_p99_seconds for run in runs),
    )


def _dealt(clients: int, replicas: int) -> list[int]:
    return [clients // replicas + (number < clients % replicas) for number in range(replicas)]


def _tried(trial: Trial, settings: SchedulerSettings) -> Tried:
    return run(trial, settings, None, range(len(trial.draws)))


# ---- which of them -------------------------------------------------------------------------------------------------


def needed_change(
    changes: Sequence[CapacityChange],
    now: Tried,
    best: Tried,
    *,
    harm_per_request: float,
    is_preempting: bool,
    may_refuse: bool,
    is_timed: bool,
) -> CapacityChange | None:
    """The cheapest change that ends what no scheduler setting ends; None where one of these does, or none can.

    While requests are preempted it must leave a fifth of the present preemptions, or `harm_per_request` per request.
    While they only queue: give a tenth more throughput or, where time is known, half the 99th percentile of the time to
    first token, and not preempt for it. Requests are refused only where long ones are the trouble.
    """

    def ends_it(tried: Tried) -> bool:
        if not is_preempting:
            calm = tried.preemptions_per_request <= max(CALM_PREEMPTIONS_PER_REQUEST, best.preemptions_per_request)
            return calm and _ends_waiting(tried, best, is_timed)
        return tried.preemptions_per_request <= max(harm_per_request, ENDED_RATIO * now.preemptions_per_request)

    if is_preempting and ends_it(best):
        return None
    allowed = (change for change in changes if may_refuse or change.setting != "max_model_len")
    return next((change for change in allowed if ends_it(change.tried)), None)


def _ends_waiting(tried: Tried, best: Tried, is_timed: bool) -> bool:
    if tried.output_tokens_per_second >= FASTER_RATIO * best.output_tokens_per_second:
        return True
    late, early = best.pooled.ttft_p99_seconds, tried.pooled.ttft_p99_seconds
    return is_timed and late is not None and early is not None and early <= EARLIER_RATIO * late
