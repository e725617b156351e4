"""Findings and a window -> changed settings, by simulating the engine's load under others.

The only place where proposals are settled, so that none contradicts another: what works now first (a cap of the
requests in flight, at the gateway), then the flags for the next rollout, both chosen by one objective from the same
simulated load. Where the present settings are as good as any tried, nothing is proposed. While requests are preempted,
no cap is raised and no watermark lowered: the answer, once applied, is not followed by its opposite. Where the load
cannot be reconstructed, `analytic` estimates by formula.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kvwatch.analytic import estimate, harm_before_restart
from kvwatch.capacity_changes import CapacityChange, needed_change
from kvwatch.checks.check import EngineView
from kvwatch.checks.concurrency_oversubscribed import peak_in_flight
from kvwatch.errors import NoData, SettingError
from kvwatch.finding import Finding, Status
from kvwatch.flag_releases import has_flag
from kvwatch.objective import CALM_PREEMPTIONS_PER_REQUEST, Objective
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
from kvwatch.study import Study, option_of, study
from kvwatch.thresholds import Thresholds
from kvwatch.versions import engine_version
from kvwatch.vllm_metrics import REQUEST_SUCCESS
from kvwatch.what_if import Tried

__all__ = ["Proposals", "Recommendation", "Withheld", "recommend"]

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
    over = harm_before_restart(view, limits) if harm_found(findings) else None
    because = (() if over else harm_found(findings)) or _held_back(findings)
    if not because:
        return Proposals(withheld=(over,) if over else unjudged(findings))
    if any(f.check == "engine_stalled" and f.status is Status.CRITICAL for f in findings):
        reason = "the engine hangs (engine_stalled): no setting ends that. Restart it, and look at its log"
        return Proposals(withheld=(Withheld(setting="max_num_seqs", reason=reason),))
    view = replace(view, window=view.window.since_restart)  # the process before had other flags, perhaps another pool
    try:
        studied = None if turned_away else study(view, objective, may_loosen=HARM[0] not in because)
    except (NoData, SettingError) as missing:
        studied, turned_away = None, str(missing)
    if studied is not None:
        long_ones = any(f.check == "long_context_monopoly" and f.status is Status.WARNING for f in findings)
        answer = _Answer(view, because, limits, studied, may_refuse=long_ones)
        if answer.shows_what_is:
            return answer.proposals()
        return answer.without_proposals(estimate(view, findings, limits))
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


class _Answer:
    """From what was found to what is said."""

    def __init__(
        self, view: EngineView, because: tuple[str, ...], limits: Thresholds, studied: Study, *, may_refuse: bool
    ) -> None:
        self._view = view
        self._because = because
        self._limits = limits
        self._study = studied
        self._needed: CapacityChange | None = None
        if because[0] != "sequence_cap_reached":
            self._needed = needed_change(
                studied.changes,
                studied.flags.now,
                studied.flags.best,
                harm_per_request=limits.preemptions_per_request_critical,
                is_preempting=because[0] == HARM[0],
                may_refuse=may_refuse,
                is_timed=studied.fit is not None,
            )

    def proposals(self) -> Proposals:
        now, restart = self._without_restart(), self._with_restart()
        return Proposals(
            recommendations=(*now, *restart),
            withheld=tuple(self._withheld(now, restart)),
            options=self._options(),
            simulation=self._basis(),
        )

    @property
    def shows_what_is(self) -> bool:
        """False where requests are preempted and next to none are in the simulation, or none and many there: then it
        cannot say what would help.
        """
        simulated = self._study.flags.now.preemptions_per_request
        if self._because[0] == HARM[0]:
            is_other = simulated <= CALM_PREEMPTIONS_PER_REQUEST
        else:
            is_other = simulated >= self._limits.preemptions_per_request_critical
        return not (is_other and self._is_off_by(_ROUGHLY_RATIO))

    def without_proposals(self, known: Proposals) -> Proposals:
        """What is known without the simulation, and what was simulated, for its inputs show what may be wrong."""
        study = self._study
        reason = (
            f"the simulation gives {study.flags.now.preemptions_per_request:.2f} preemptions per request where "
            f"{study.observed_per_request:.2f} were seen, so nothing is chosen by it; give the flags of the engine "
            "(--vllm-args), or sample a longer --window"
        )
        return Proposals(
            recommendations=known.recommendations,
            withheld=(*known.withheld, Withheld(setting="max_num_seqs", reason=reason)),
            options=self._options(decides=False),
            simulation=self._basis(),
        )

    def _without_restart(self) -> tuple[Recommendation, ...]:
        outcome, change, made = self._study.gateway, self._needed, []
        peak = self._peak_in_flight()
        if outcome.is_change_worth_it and (outcome.best.in_flight or 0) < peak and not self._raises_cap:
            made.append(self._gateway(outcome.best, peak))
        if change is not None and change.apply == "now":
            made.append(self._capacity(change))
        return tuple(made)

    def _peak_in_flight(self) -> int:
        """The most requests at a time lately; in the whole window, where the latest pages do not show them."""
        with contextlib.suppress(NoData):
            return int(peak_in_flight(self._view.window.last(self._limits.hold_seconds)))
        return int(peak_in_flight(self._view.window))  # a load without them could not be reconstructed

    @property
    def _raises_cap(self) -> bool:
        """Whether more requests are to run at a time: a cap of those in flight would keep them from it."""
        flags = self._study.flags
        return flags.best.settings.max_num_seqs > flags.now.settings.max_num_seqs

    def _with_restart(self) -> tuple[Recommendation, ...]:
        """The best flags; with a larger pool those that were simulated together with it."""
        change, flags = self._needed, self._study.flags
        if change is not None and change.apply == "restart":
            flag = _flag(change.setting, change.proposed)
            return (self._capacity(change), *self._flags(change.tried, self._predicted_change(change), beside=flag))
        return self._flags(flags.best, self._predicted(flags.best)) if flags.is_change_worth_it else ()

    def _withheld(self, now: Sequence[Recommendation], restart: Sequence[Recommendation]) -> Iterator[Withheld]:
        if not any(made.setting == "gateway_max_in_flight" for made in now) and self._study.flags.is_change_worth_it:
            reason = "no cap of the requests in flight does better than the present settings"
            if self._raises_cap:
                reason = "a cap of the requests in flight would keep the higher max_num_seqs from being reached"
            yield Withheld(setting="gateway_max_in_flight", reason=reason)
        if not restart:
            yield Withheld(setting="max_num_seqs", reason=self._nothing_better())

    def _nothing_better(self) -> str:
        now = self._study.flags.now
        has_watermark = has_flag("watermark", self._version)
        tried = "max_num_seqs and watermark" if has_watermark else "max_num_seqs"
        advice = "" if self._needed else ": give the pool more memory or add replicas"
        if self._study.objective == "latency":
            return f"of the values of {tried} simulated, none has a lower TTFT p99 at 97 % of the throughput{advice}"
        return (
            f"of the values of {tried} simulated, none does better than the present ones "
            f"({now.preemptions_per_request:.2f} preemptions per request){advice}"
        )

    @property
    def _version(self) -> tuple[int, int, int] | None:
        return engine_version(self._view.facts.vllm_version, self._view.window.latest.vllm_version_at_least)

    @property
    def confidence(self) -> Confidence:
        """How well the simulation of the present settings reproduces the preemptions seen, and on how much it rests."""
        study = self._study
        if study.load.source == "lifetime" or not study.load.prefixes_known or self._is_off_by(_ROUGHLY_RATIO):
            return "low"
        if self._is_off_by(_REPRODUCED_RATIO) or self._finished < 100 or study.fit is None:
            return "medium"
        return "high"

    def _is_off_by(self, ratio: float) -> bool:
        """Whether the preemptions simulated are off those seen by more than this ratio, and by more than chance."""
        seen, simulated = self._study.observed_per_request, self._study.flags.now.preemptions_per_request
        spread = 2 * math.sqrt(max(seen, 0.1) / max(1.0, self._finished))  # of such a count, twice its deviation
        low, high = sorted((max(seen, 1e-9), max(simulated, 1e-9)))
        return high > ratio * low + spread

    @property
    def _finished(self) -> float:
        return self._view.window.increase(REQUEST_SUCCESS)

    def _gateway(self, best: Tried, peak: int) -> Recommendation:
        cap = best.in_flight or 0
        return Recommendation(
            setting="gateway_max_in_flight",
            flag=None,
            current=peak,
            proposed=cap,
            apply="now",
            because=self._because,
            confidence=self.confidence,
            predicted=self._predicted(best),
            note=f"cap the requests in flight on this engine at {cap} in the gateway and answer 429 beyond that",
        )

    def _capacity(self, change: CapacityChange) -> Recommendation:
        return Recommendation(
            setting=change.setting,
            flag=_flag(change.setting, change.proposed) if change.apply == "restart" else None,
            current=change.current,
            proposed=change.proposed,
            apply=change.apply,
            because=self._because,
            confidence=self.confidence,
            predicted=self._predicted_change(change),
            note=_joined(change.note, _together(_flag(name, to) for name, _, to in self._changes(change.tried))),
        )

    def _changes(self, best: Tried) -> list[tuple[str, float | int | None, float | int]]:
        """The scheduler's flags that differ from the present ones: name, present value if known, proposed value."""
        now, facts = self._study.flags.now.settings, self._view.facts
        changes: list[tuple[str, float | int | None, float | int]] = []
        if best.settings.max_num_seqs != now.max_num_seqs:
            known = now.max_num_seqs if self._study.load.max_num_seqs_known else None
            changes.append(("max_num_seqs", known, best.settings.max_num_seqs))
        if best.settings.watermark != now.watermark:
            changes.append(("watermark", facts.watermark, best.settings.watermark))
        return changes

    def _flags(
        self, best: Tried, predicted: dict[str, float | int | str], beside: str | None = None
    ) -> tuple[Recommendation, ...]:
        """`beside` is a flag that was simulated together with them."""
        changes = self._changes(best)
        flags = [_flag(setting, proposed) for setting, _, proposed in changes]
        return tuple(
            Recommendation(
                setting=setting,
                flag=flag,
                current=current,
                proposed=proposed,
                apply="restart",
                because=self._because,
                confidence=self.confidence,
                predicted=predicted,
                note=self._note(setting, [other for other in (beside, *flags) if other and other != flag]),
            )
            for (setting, current, proposed), flag in zip(changes, flags, strict=True)
        )

    def _note(self, setting: str, together: Sequence[str]) -> str:
        same = "--max-num-active-seqs has the same effect and keeps the sizes that were captured as graphs"
        has_same = setting == "max_num_seqs" and has_flag("max_num_active_seqs", self._version)
        return _joined(_together(together), same if has_same else "")

    def _predicted(self, tried: Tried) -> dict[str, float | int | str]:
        now = self._study.flags.now
        option = option_of("", tried, now, self._study)
        found: dict[str, float | int | str | None] = {
            "method": "simulated",
            "cost": "fitted" if self._study.fit else "assumed",
            "preemptions_per_request": option.preemptions_per_request,
            "preemptions_per_request_now": round(now.preemptions_per_request, 4),
            "output_throughput_ratio": option.output_throughput_ratio,
            "ttft_p99_ratio": option.ttft_p99_ratio,
            "itl_p99_ratio": option.itl_p99_ratio,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _predicted_change(self, change: CapacityChange) -> dict[str, float | int | str]:
        predicted = self._predicted(change.tried)
        if change.max_concurrency is not None:  # the budget was recomputed
            predicted["num_gpu_blocks"] = change.tried.settings.num_gpu_blocks
            predicted["max_concurrency"] = round(change.max_concurrency, 2)
        return predicted

    def _options(self, *, decides: bool = True) -> tuple[SettingOption, ...]:
        """All that was simulated; what is proposed goes by that name, unless nothing is decided by it."""
        studied = self._study
        flags, gateway = studied.flags, studied.gateway
        named = [("now", flags.now)]
        enlarged = self._needed if decides and self._needed and self._needed.apply == "restart" else None
        if flags.is_change_worth_it and decides:
            named.append(("flags alone" if enlarged else "proposed", flags.best))
        if gateway.is_change_worth_it and decides:
            named.append(("gateway", gateway.best))
        named += flags.alternatives
        rows = [option_of(name, tried, flags.now, studied) for name, tried in named]
        for change in studied.changes:
            name = "proposed" if change is enlarged else _row_name(change)
            rows.append(option_of(name, change.tried, flags.now, studied, change=change))
        return (*rows, option_of("pool x2", studied.larger_pool, flags.now, studied))

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


def _flag(setting: str, value: float | str) -> str:
    return f"--{setting.replace('_', '-')} {value}"


def _together(flags: Iterable[str]) -> str:
    """What a figure holds for: a change that was simulated together with these flags."""
    words = " ".join(flags)
    return f"together with {words}" if words else ""


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


_ROW_NAMES = {
    "gpu_memory_utilization": "+ gpu memory {}",
    "kv_cache_dtype": "+ {} kv cache",
    "max_num_batched_tokens": "+ batch {}",
    "max_model_len": "+ max len {}",
    "replicas": "+ replicas x{}",
}


def _row_name(change: CapacityChange) -> str:
    return _ROW_NAMES[change.setting].format(change.replicas if change.setting == "replicas" else change.proposed)
