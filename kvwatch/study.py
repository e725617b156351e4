"""An engine's load, simulated under the present settings and under others: all that a recommendation rests on."""

from dataclasses import dataclass, replace

from kvwatch.capacity_changes import CapacityChange, capacity_changes
from kvwatch.checks.check import EngineView
from kvwatch.cost import SHORTEST_STEP_SECONDS, CostFit, assumed_cost, fit_cost, seconds_per_step, tokens_per_step
from kvwatch.errors import NoData
from kvwatch.objective import Objective
from kvwatch.proposal import SettingOption
from kvwatch.versions import engine_version
from kvwatch.vllm_metrics import INTER_TOKEN_LATENCY, PREEMPTIONS, REQUEST_SUCCESS
from kvwatch.what_if import Outcome, Trial, Tried, best_in_flight, best_settings, mean_of, run, seeds_for
from kvwatch.window import Window
from kvwatch.workload import OfferedLoad, offered_load

# The error of the throughput relative to now, simulated from pages alone: docs/simulator.md, root mean square.
_THROUGHPUT_ERROR = 0.01
_UNIT_SECONDS = 0.02  # a step, where neither steps nor time between tokens are exposed: it only paces open loops


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The load, the fit of its costs, and what was found. `changes` are tried besides the best flags."""

    load: OfferedLoad
    fit: CostFit | None
    objective: Objective
    flags: Outcome
    gateway: Outcome
    changes: tuple[CapacityChange, ...]
    larger_pool: Tried
    observed_per_request: float


def study(view: EngineView, objective: Objective, *, may_loosen: bool) -> Study:
    """Raises NoData naming what is missing, SettingError for settings with which no engine starts."""
    load = offered_load(view)
    trial, fit = trial_of(view, load)
    trial = replace(trial, may_loosen=may_loosen)
    doubled = replace(load.settings, num_gpu_blocks=2 * load.settings.num_gpu_blocks)
    flags = best_settings(trial, objective)
    return Study(
        load=load,
        fit=fit,
        objective=objective,
        flags=flags,
        gateway=best_in_flight(trial, objective),
        changes=capacity_changes(view, trial, flags.best.settings, batch_known=_is_batch_known(load)),
        larger_pool=run(trial, doubled, None, range(len(trial.draws))),
        observed_per_request=preemptions_per_request(view.window),
    )


def preemptions_per_request(window: Window) -> float:
    """Preemptions seen in the window per request that finished in it. Raises NoData where either is not known."""
    return window.increase(PREEMPTIONS) / max(1.0, window.increase(REQUEST_SUCCESS))


def _is_batch_known(load: OfferedLoad) -> bool:
    return any(a.name == "max_num_batched_tokens" and a.origin != "assumed" for a in load.assumptions)


def trial_of(view: EngineView, load: OfferedLoad) -> tuple[Trial, CostFit | None]:
    """The load, drawn, with the cost of a step: fitted, or else assumed."""
    window = view.window
    paced = assumed_cost(seconds_per_step(window) or _mean_gap(window) or _UNIT_SECONDS, tokens_per_step(window))
    trial = Trial(
        settings=load.settings,
        cost=paced,
        draws=tuple(load.requests(seed) for seed in seeds_for(load.typical_count)),
        clients=load.clients,
        version=engine_version(view.facts.vllm_version, window.latest.vllm_version_at_least),
        throughput_error=_THROUGHPUT_ERROR,
    )
    now = run(trial, load.settings, None, draws=(0,)).runs[0]
    fit = fit_cost(
        window,
        pool_tokens=load.settings.pool_tokens,
        tokens_per_preemption=now.recomputed_tokens / now.preemptions if now.preemptions else 0.0,
        read_again=load.read_again,
    )
    if fit is None:
        return trial, None
    return replace(trial, cost=fit.cost), fit


def _mean_gap(window: Window) -> float | None:
    try:
        gap = window.average(INTER_TOKEN_LATENCY)
    except NoData:
        return None
    return gap if gap >= SHORTEST_STEP_SECONDS else None


def option_of(
    name: str, tried: Tried, now: Tried, study: Study, *, change: CapacityChange | None = None
) -> SettingOption:
    """One row of the options table."""
    per_request = [one.preemptions / one.requests for one in tried.runs]
    speeds = [
        one.output_tokens_per_second / other.output_tokens_per_second
        for one, other in zip(tried.runs, now.runs, strict=True)
    ]
    timed = study.fit is not None
    # what a gateway holds back may be simulated as a queue of the engine's; its flags stay as they are
    settings = tried.settings if tried.in_flight is None else now.settings
    hidden = not study.load.max_num_seqs_known and settings.max_num_seqs == now.settings.max_num_seqs

    def ratio(field: str) -> float | None:
        ours = mean_of(getattr(one, field) for one in tried.runs)
        theirs = mean_of(getattr(one, field) for one in now.runs)
        return round(ours / theirs, 4) if timed and ours is not None and theirs else None

    return SettingOption(
        name=name,
        setting=change.setting if change else None,
        value=change.proposed if change else None,
        max_num_seqs=None if hidden else settings.max_num_seqs,
        watermark=settings.watermark,
        gateway_max_in_flight=tried.in_flight,
        num_gpu_blocks=tried.settings.num_gpu_blocks,
        preemptions_per_request=round(tried.preemptions_per_request, 4),
        preemptions_per_request_low=round(min(per_request), 4),
        preemptions_per_request_high=round(max(per_request), 4),
        recomputed_tokens_per_request=round(tried.pooled.recomputed_tokens / tried.pooled.requests, 1),
        output_throughput_ratio=round(tried.output_tokens_per_second / now.output_tokens_per_second, 4),
        output_throughput_ratio_low=round(min(speeds), 4),
        output_throughput_ratio_high=round(max(speeds), 4),
        steps_ratio=round(sum(one.steps for one in tried.runs) / sum(one.steps for one in now.runs), 4),
        output_tokens_per_second=round(tried.output_tokens_per_second, 1) if timed else None,
        ttft_p50_ratio=ratio("ttft_p50_seconds"),
        ttft_p99_ratio=ratio("ttft_p99_seconds"),
        itl_p50_ratio=ratio("itl_p50_seconds"),
        itl_p99_ratio=ratio("itl_p99_seconds"),
    )
