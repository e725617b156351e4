"""Findings and a window -> changed settings, by simulating the engine's load under others.

The only place where proposals are settled, so that none contradicts another: what works now first (a cap of the
requests in flight, at the gateway), then the flags for the next rollout, both chosen by one objective from the same
simulated load. Where the present settings are as good as any tried, nothing is proposed. While requests are preempted,
no cap is raised and no watermark lowered: the answer, once applied, is not followed by its opposite. Where the load
cannot be reconstructed, `analytic` estimates by formula.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvwatch.analytic import estimate
from kvwatch.checks.check import EngineView
from kvwatch.checks.concurrency_oversubscribed import peak_in_flight
from kvwatch.cost import CostFit, assumed_cost, fit_cost, seconds_per_step, tokens_per_step
from kvwatch.errors import NoData, SettingError
from kvwatch.finding import Finding, Status
from kvwatch.flag_releases import has_flag
from kvwatch.objective import Objective
from kvwatch.proposal import (
    HARM,
    Confidence,
    Proposals,
    Recommendation,
    SettingOption,
    SimulationBasis,
    Withheld,
    harm_found,
    unjudged,
)
from kvwatch.thresholds import Thresholds
from kvwatch.versions import engine_version
from kvwatch.vllm_metrics import INTER_TOKEN_LATENCY, PREEMPTIONS, REQUEST_SUCCESS
from kvwatch.what_if import SEEDS, Outcome, Trial, Tried, best_in_flight, best_settings, mean_of, run
from kvwatch.window import Window
from kvwatch.workload import OfferedLoad, offered_load

__all__ = ["Proposals", "Recommendation", "Withheld", "recommend"]

_UNIT_SECONDS = 0.02  # a step, where neither steps nor time between tokens are exposed: it only paces open loops
# A simulation of the present settings that misses the preemptions seen by more than this ratio is not relied on.
_REPRODUCED_RATIO, _ROUGHLY_RATIO = 1.5, 2.5


def recommend(
    view: EngineView,
    findings: tuple[Finding, ...],
    limits: Thresholds,
    *,
    objective: Objective = "balanced",
    turned_away: str | None = None,
) -> Proposals:
    """What to change on one engine, with the options it was chosen from. `turned_away`: why nothing is simulated."""
    because = harm_found(findings) or _held_back(findings)
    if not because:
        return Proposals(withheld=unjudged(findings))
    try:
        study = None if turned_away else _study(view, objective, may_loosen=HARM[0] not in because)
    except (NoData, SettingError) as missing:
        study, turned_away = None, str(missing)
    if study is not None:
        return _Answer(view, because, limits, study).proposals()
    known = estimate(view, findings, limits)
    return Proposals(
        recommendations=known.recommendations,
        withheld=(*known.withheld, Withheld(setting="max_num_seqs", reason=f"not simulated: {turned_away}")),
    )


def _held_back(findings: Sequence[Finding]) -> tuple[str, ...]:
    """Without preemptions: the pool is full, or the cap reached, while requests queue."""
    found = {f.check for f in findings if f.status in {Status.WARNING, Status.CRITICAL}}
    if "sequence_cap_reached" in found:
        return ("sequence_cap_reached",)
    if {"kv_cache_saturated", "requests_queueing"} <= found:
        return ("kv_cache_saturated", "requests_queueing")
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Study:
    """The load, the fit of its costs, and what was found."""

    load: OfferedLoad
    fit: CostFit | None
    objective: Objective
    flags: Outcome
    gateway: Outcome
    larger_pool: Tried
    observed_per_request: float


def trial_of(view: EngineView, load: OfferedLoad) -> tuple[Trial, CostFit | None]:
    """The load, drawn, with the cost of a step: fitted, or else assumed."""
    window = view.window
    paced = assumed_cost(seconds_per_step(window) or _mean_gap(window) or _UNIT_SECONDS, tokens_per_step(window))
    trial = Trial(
        settings=load.settings,
        cost=paced,
        draws=tuple(load.requests(seed) for seed in SEEDS),
        clients=load.clients,
        version=engine_version(view.facts.vllm_version, window.latest.vllm_version_at_least),
    )
    now = run(trial, load.settings, None, draws=(0,)).runs[0]
    fit = fit_cost(
        window,
        pool_tokens=load.settings.usable_blocks * load.settings.block_size // len(load.settings.kv_groups),
        tokens_per_preemption=now.recomputed_tokens / now.preemptions if now.preemptions else 0.0,
    )
    if fit is None:
        return trial, None
    return replace(trial, cost=fit.cost), fit


def _study(view: EngineView, objective: Objective, *, may_loosen: bool) -> _Study:
    load = offered_load(view)
    trial, fit = trial_of(view, load)
    trial = replace(trial, may_loosen=may_loosen)
    finished = view.window.increase(REQUEST_SUCCESS)
    doubled = replace(load.settings, num_gpu_blocks=2 * load.settings.num_gpu_blocks)
    return _Study(
        load=load,
        fit=fit,
        objective=objective,
        flags=best_settings(trial, objective),
        gateway=best_in_flight(trial, objective),
        larger_pool=run(trial, doubled, None, range(len(trial.draws))),
        observed_per_request=view.window.increase(PREEMPTIONS) / max(1.0, finished),
    )


def _mean_gap(window: Window) -> float | None:
    try:
        return window.average(INTER_TOKEN_LATENCY)
    except NoData:
        return None


class _Answer:
    """From what was found to what is said."""

    def __init__(self, view: EngineView, because: tuple[str, ...], limits: Thresholds, study: _Study) -> None:
        self._view = view
        self._because = because
        self._limits = limits
        self._study = study

    def proposals(self) -> Proposals:
        study = self._study
        made: list[Recommendation] = []
        withheld: list[Withheld] = []
        gateway = self._gateway(study.gateway)
        if study.gateway.is_change_worth_it and gateway.current is not None and gateway.proposed < gateway.current:
            made.append(gateway)
        elif study.flags.is_change_worth_it:
            reason = "no cap of the requests in flight does better than the present settings"
            withheld.append(Withheld(setting="gateway_max_in_flight", reason=reason))
        if study.flags.is_change_worth_it:
            made += self._flags(study.flags)
        else:
            withheld.append(Withheld(setting="max_num_seqs", reason=self._nothing_better()))
        return Proposals(
            recommendations=tuple(made),
            withheld=tuple(withheld),
            options=self._options(),
            simulation=self._basis(),
        )

    def _nothing_better(self) -> str:
        now = self._study.flags.now
        has_watermark = has_flag("watermark", self._version)
        tried = "max_num_seqs and watermark" if has_watermark else "max_num_seqs"
        return (
            f"of the values of {tried} simulated, none does better than the present ones "
            f"({now.preemptions_per_request:.2f} preemptions per request): give the pool more memory or add replicas"
        )

    @property
    def _version(self) -> tuple[int, int, int] | None:
        return engine_version(self._view.facts.vllm_version, self._view.window.latest.vllm_version_at_least)

    @property
    def confidence(self) -> Confidence:
        """How well the simulation of the present settings reproduces the preemptions seen, and on how much it rests."""
        study = self._study
        seen, simulated = study.observed_per_request, study.flags.now.preemptions_per_request
        finished = self._view.window.increase(REQUEST_SUCCESS)
        spread = 2 / max(1.0, finished) ** 0.5 * max(seen, 0.1) ** 0.5  # of a count of that size, twice its deviation
        low, high = sorted((max(seen, 1e-9), max(simulated, 1e-9)))
        if study.load.source == "lifetime" or high > _ROUGHLY_RATIO * low + spread:
            return "low"
        if high > _REPRODUCED_RATIO * low + spread or finished < 100 or study.fit is None:
            return "medium"
        return "high"

    def _gateway(self, outcome: Outcome) -> Recommendation:
        cap = outcome.best.in_flight or 0
        return Recommendation(
            setting="gateway_max_in_flight",
            flag=None,
            current=int(peak_in_flight(self._view.window.last(self._limits.hold_seconds))),
            proposed=cap,
            apply="now",
            because=self._because,
            confidence=self.confidence,
            predicted=self._predicted(outcome),
            note=f"cap the requests in flight on this engine at {cap} in the gateway and answer 429 beyond that",
        )

    def _flags(self, outcome: Outcome) -> list[Recommendation]:
        now, best, facts = outcome.now.settings, outcome.best.settings, self._view.facts
        changes: list[tuple[str, float | int | None, float | int]] = []
        if best.max_num_seqs != now.max_num_seqs:
            known = now.max_num_seqs if self._study.load.max_num_seqs_known else None
            changes.append(("max_num_seqs", known, best.max_num_seqs))
        if best.watermark != now.watermark:
            changes.append(("watermark", facts.watermark, best.watermark))
        flags = [f"--{setting.replace('_', '-')} {proposed}" for setting, _, proposed in changes]
        return [
            Recommendation(
                setting=setting,
                flag=flag,
                current=current,
                proposed=proposed,
                apply="restart",
                because=self._because,
                confidence=self.confidence,
                predicted=self._predicted(outcome),
                note=self._note(setting, [other for other in flags if other != flag]),
            )
            for (setting, current, proposed), flag in zip(changes, flags, strict=True)
        ]

    def _note(self, setting: str, together: Sequence[str]) -> str:
        notes = []
        if together:
            notes.append(f"together with {' '.join(together)}")
        if setting == "max_num_seqs" and has_flag("max_num_active_seqs", self._version):
            notes.append("--max-num-active-seqs has the same effect and keeps the sizes that were captured as graphs")
        return "; ".join(notes)

    def _predicted(self, outcome: Outcome) -> dict[str, float | int | str]:
        option = _option("", outcome.best, outcome.now, self._study)
        found: dict[str, float | int | str | None] = {
            "method": "simulated",
            "cost": "fitted" if self._study.fit else "assumed",
            "preemptions_per_request": option.preemptions_per_request,
            "preemptions_per_request_now": round(outcome.now.preemptions_per_request, 4),
            "output_throughput_ratio": option.output_throughput_ratio,
            "ttft_p99_ratio": option.ttft_p99_ratio,
            "itl_p99_ratio": option.itl_p99_ratio,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _options(self) -> tuple[SettingOption, ...]:
        study = self._study
        flags, gateway = study.flags, study.gateway
        named = [("now", flags.now)]
        if flags.is_change_worth_it:
            named.append(("proposed", flags.best))
        if gateway.is_change_worth_it:
            named.append(("gateway", gateway.best))
        named += flags.alternatives
        named.append(("pool x2", study.larger_pool))
        return tuple(_option(name, tried, flags.now, study) for name, tried in named)

    def _basis(self) -> SimulationBasis:
        study = self._study
        runs = study.flags.now.runs
        return SimulationBasis(
            objective=study.objective,
            requests=runs[0].requests,
            draws=len(runs),
            observed_preemptions_per_request=round(study.observed_per_request, 4),
            simulated_preemptions_per_request=round(study.flags.now.preemptions_per_request, 4),
            cost_error_ratio=round(study.fit.error_ratio, 4) if study.fit else None,
            inputs=tuple((a.name, a.value, a.origin) for a in study.load.assumptions),
        )


def _option(name: str, tried: Tried, now: Tried, study: _Study) -> SettingOption:
    requests = tried.runs[0].requests
    per_request = [one.preemptions / requests for one in tried.runs]
    speeds = [
        one.output_tokens_per_second / other.output_tokens_per_second
        for one, other in zip(tried.runs, now.runs, strict=True)
    ]
    timed = study.fit is not None
    hidden = not study.load.max_num_seqs_known and tried.settings.max_num_seqs == now.settings.max_num_seqs

    def ratio(field: str) -> float | None:
        ours = mean_of(getattr(one, field) for one in tried.runs)
        theirs = mean_of(getattr(one, field) for one in now.runs)
        return round(ours / theirs, 4) if timed and ours is not None and theirs else None

    return SettingOption(
        name=name,
        max_num_seqs=None if hidden else tried.settings.max_num_seqs,
        watermark=tried.settings.watermark,
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
