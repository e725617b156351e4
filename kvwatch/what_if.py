"""Simulate an engine's load under other settings: what each would do, and which serves an objective best.

All settings are tried on the same drawn requests, five draws (seeds) of them, three of large ones, so that their
differences are not those of luck. The search is wide on the first draw and narrow on the others:

1. caps of running requests, from what the pool holds at the end of every request to what runs now, and watermarks, one
   by one and then together, without those that alone leave the engine idle;
2. of these, on the other draws too, the present settings, those that stand out, and the calmest, one after the other,
   until enough of them prove fast: the first draw alone may be a lucky one;
3. the neighbours of the best, where the caps were not tried one by one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import TypeVar

from kvwatch.flag_releases import has_flag
from kvwatch.objective import CALM_PREEMPTIONS_PER_REQUEST, THROUGHPUT_KEPT_RATIO, Objective, Option, choose
from kvwatch.simulation import CostModel, Request, SchedulerSettings, SimulationResult
from kvwatch.simulator import simulate
from kvwatch.versions import Version

SEEDS, FEW_SEEDS = (0, 1, 2, 3, 4), (0, 1, 2)
WATERMARKS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2)
_FEW_WATERMARKS = (0.0, 0.02, 0.05, 0.1, 0.2)
# Above it a simulation takes long enough to try fewer settings, on fewer draws, which differ less.
_MANY_REQUESTS = 500
_FINALISTS = 14  # so many are tried on every draw
# Of more, the calmest on the first draw, until so many turn out fast on all.
_FAST_FINALISTS, _MOST_FINALISTS = 6, 30
_ONE_DRAW_ERROR = 0.01  # what is simulated on one draw only gets a margin
_IDLE_RATIO, _CALM_SHARE = 0.94, 0.05
_RELIEF_RATIO, RELIEF_THROUGHPUT_RATIO = 0.1, 0.90
# Settings whose preemptions exceed those of the best by no more than this are as good: luck moves counts by that much.
_AS_CALM_RATIO, _AS_CALM_PREEMPTIONS = 1.25, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is simulated: draws of requests, how they arrive, the present settings, what a step costs.

    Without `may_loosen` no cap above the present one and no watermark below it is tried. With it, nothing is chosen
    that is not calm, unless the present settings preempt as often: it would have to be taken back.

    `throughput_error` is by how much the relative throughput of two settings may be simulated wrongly, the draws not
    being the true requests. So much less still counts as fast.
    """

    settings: SchedulerSettings
    cost: CostModel
    draws: tuple[tuple[Request, ...], ...]
    clients: int | None
    version: Version | None
    may_loosen: bool = True
    throughput_error: float = 0.0

    @property
    def kept_ratio(self) -> float:
        """The share of the best throughput, as simulated, that is enough."""
        return THROUGHPUT_KEPT_RATIO - self.throughput_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One combination of settings, simulated on every draw. `in_flight` caps the requests sent to the engine."""

    settings: SchedulerSettings
    in_flight: int | None
    runs: tuple[SimulationResult, ...]

    @property
    def preemptions(self) -> float:
        """Mean per draw."""
        return math.fsum(run.preemptions for run in self.runs) / len(self.runs)

    @property
    def preemptions_per_request(self) -> float:
        return sum(run.preemptions for run in self.runs) / sum(run.requests for run in self.runs)

    @property
    def output_tokens_per_second(self) -> float:
        return sum(run.output_tokens for run in self.runs) / math.fsum(run.makespan_seconds for run in self.runs)

    @property
    def pooled(self) -> SimulationResult:
        """All draws as one result: counts summed, percentiles averaged."""
        first = self.runs[0]
        return replace(
            first,
            requests=sum(run.requests for run in self.runs),
            preemptions=sum(run.preemptions for run in self.runs),
            recomputed_tokens=sum(run.recomputed_tokens for run in self.runs),
            preemptions_per_request=self.preemptions_per_request,
            output_tokens_per_second=self.output_tokens_per_second,
            ttft_p50_seconds=mean_of(run.ttft_p50_seconds for run in self.runs),
            ttft_p99_seconds=mean_of(run.ttft_p99_seconds for run in self.runs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The present settings, the best found, and others by what they change. `best` is `now` where nothing is better."""

    now: Tried
    best: Tried
    alternatives: tuple[tuple[str, Tried], ...] = ()

    @property
    def is_change_worth_it(self) -> bool:
        return self.best is not self.now


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of those there are; None without any."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def seeds_for(requests: int) -> tuple[int, ...]:
    """The draws of a load that so many requests represent."""
    return SEEDS if requests <= _MANY_REQUESTS else FEW_SEEDS


def best_settings(trial: Trial, objective: Objective = "balanced") -> Outcome:
    """The best max_num_seqs and watermark (where the version has it)."""
    caps = cap_candidates(trial)
    watermarks: Sequence[float] = (trial.settings.watermark,)
    if has_flag("watermark", trial.version):
        usual = WATERMARKS if len(trial.draws[0]) <= _MANY_REQUESTS else _FEW_WATERMARKS
        watermarks = sorted({*usual, trial.settings.watermark})
    now = trial.settings
    if not trial.may_loosen:
        caps = tuple(cap for cap in caps if cap <= now.max_num_seqs)
        watermarks = [share for share in watermarks if share >= now.watermark]
    search = _Search(trial, objective)
    caps, watermarks = search.without_idle(caps, watermarks)
    search.run((with_seqs(now, cap, share), None) for cap in sorted({*caps, now.max_num_seqs}) for share in watermarks)
    search.refine(caps, watermarks)
    return search.outcome()


def best_in_flight(trial: Trial, objective: Objective = "balanced") -> Outcome:
    """The best cap of the requests in flight, with the present flags.

    It is there to end an incident. So where the balanced choice leaves more than a tenth of the preemptions, it is the
    calmest that keeps 90 % of the throughput.
    """
    caps = [cap for cap in cap_candidates(trial) if cap < (trial.clients or math.inf)]
    search = _Search(trial, objective)
    search.run((trial.settings, cap) for cap in caps)
    outcome = search.outcome()
    if objective != "balanced" or outcome.best.preemptions <= _RELIEF_RATIO * outcome.now.preemptions:
        return outcome
    best = search.calmest(RELIEF_THROUGHPUT_RATIO)
    lowest = min(caps, default=1)
    while lowest > 1 and best.in_flight == lowest and best.preemptions > _RELIEF_RATIO * outcome.now.preemptions:
        lowest -= 1  # lower than any that serves for good, but it is the one that relieves
        search.run([(trial.settings, lowest)])
        best = search.calmest(RELIEF_THROUGHPUT_RATIO)
    return replace(outcome, best=best)


def cap_candidates(trial: Trial) -> tuple[int, ...]:
    """Caps from what the pool holds of requests at their end to what it holds at half their answer; at most 12."""
    settings, requests = trial.settings, trial.draws[0]
    shared = _shared_blocks(settings, requests)  # held once, whoever runs
    usable = settings.usable_blocks - sum(shared.values())

    def own(request: Request, answer_tokens: int) -> int:
        return max(1, settings.blocks(request.prompt_tokens + answer_tokens) - shared.get(request.prefix, 0))

    at_end = sum(own(r, r.output_tokens) for r in requests) / len(requests)
    # requests are seen running in proportion to their answers
    weight = sum(r.output_tokens for r in requests)
    halfway = sum(own(r, r.output_tokens // 2) * r.output_tokens for r in requests) / weight
    limit = settings.max_num_batched_tokens
    if trial.clients is not None:
        limit = min(limit, trial.clients)
    lowest = max(1, min(limit, math.floor(0.8 * usable / at_end)))
    highest = max(lowest, min(limit, math.ceil(1.3 * usable / halfway)))
    most = 12 if len(requests) <= _MANY_REQUESTS else 7
    if highest - lowest < most:
        caps = set(range(lowest, highest + 1))
    else:
        ratio = (highest / lowest) ** (1 / (most - 1))
        caps = {round(lowest * ratio**step) for step in range(most)}
    return tuple(sorted(caps))


def _shared_blocks(settings: SchedulerSettings, requests: Iterable[Request]) -> dict[str | None, int]:
    """Blocks per prefix; none where the pool does not hold all of them at once."""
    if not settings.enable_prefix_caching:
        return {}
    shared: dict[str | None, int] = {
        r.prefix: r.prefix_tokens // settings.block_size for r in requests if r.prefix is not None
    }
    return shared if sum(shared.values()) < settings.usable_blocks else {}


def with_seqs(settings: SchedulerSettings, max_num_seqs: int, watermark: float) -> SchedulerSettings:
    """The settings with another cap and watermark; max_num_active_seqs never exceeds max_num_seqs."""
    active = settings.max_num_active_seqs
    return replace(
        settings,
        max_num_seqs=max_num_seqs,
        watermark=watermark,
        max_num_active_seqs=None if active is None else min(active, max_num_seqs),
    )


def run(trial: Trial, settings: SchedulerSettings, in_flight: int | None, draws: Iterable[int]) -> Tried:
    """Simulate settings on some of the draws.

    A cap of the requests in flight is, in a closed loop, so many clients. In an open loop the gateway holds back the
    others, which the engine sees as a queue: as with max_num_seqs.
    """
    clients = trial.clients
    if in_flight is not None:
        if clients is None:
            settings = with_seqs(settings, min(in_flight, settings.max_num_seqs), settings.watermark)
        else:
            clients = min(clients, in_flight)
    runs = tuple(simulate(settings, trial.cost, trial.draws[draw], clients) for draw in draws)
    return Tried(settings=settings, in_flight=in_flight, runs=runs)


_Number = TypeVar("_Number", int, float)
_Key = tuple[SchedulerSettings, int | None]


class _Search:
    """One search: what was tried, each combination once per draw."""

    def __init__(self, trial: Trial, objective: Objective) -> None:
        self._trial = trial
        self._objective: Objective = objective
        self._now = run(trial, trial.settings, None, range(len(trial.draws)))
        self._full: dict[_Key, Tried] = {(trial.settings, None): self._now}
        # on the first draw only
        self._drafts: dict[_Key, Tried] = {(trial.settings, None): replace(self._now, runs=self._now.runs[:1])}

    def without_idle(
        self, caps: Sequence[int], watermarks: Sequence[float]
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The values that, alone, do not leave the engine idle: calm, and so slow that another makes it worse.

        Whoever asks for stability takes what is calm, however slow.
        """
        if self._objective == "stability":
            return tuple(caps), tuple(watermarks)
        now, present = self._trial.settings, self._first_draw((self._trial.settings, None))
        by_cap = {cap: self._first_draw((with_seqs(now, cap, now.watermark), None)) for cap in caps}
        by_share = {share: self._first_draw((with_seqs(now, now.max_num_seqs, share), None)) for share in watermarks}
        # on this draw only: another may be faster under any settings
        tried = self._allowed((*by_cap.values(), *by_share.values(), present))
        fastest = max(one.output_tokens_per_second for one in tried)

        def is_idle(one: Tried) -> bool:
            slow = one.output_tokens_per_second < _IDLE_RATIO * fastest
            return slow and one.preemptions <= _CALM_SHARE * present.preemptions

        kept = tuple(share for share, one in by_share.items() if share == now.watermark or not is_idle(one))
        return tuple(cap for cap, one in by_cap.items() if not is_idle(one)), kept

    def _allowed(self, tried: Iterable[Tried]) -> list[Tried]:
        """Those that may be chosen; the present settings always may."""
        return [one for one in tried if not self._trial.may_loosen or self._is_calm(one)]

    def _is_calm(self, tried: Tried) -> bool:
        """Calm, or no more preempting than the present settings on the same draws."""
        now = replace(self._now, runs=self._now.runs[: len(tried.runs)])
        return tried.preemptions_per_request <= max(CALM_PREEMPTIONS_PER_REQUEST, now.preemptions_per_request)

    def _first_draw(self, key: _Key) -> Tried:
        if key not in self._drafts:
            self._drafts[key] = run(self._trial, *key, draws=(0,))
        return self._drafts[key]

    def run(self, asked: Iterable[_Key]) -> None:
        """Try all on the first draw, and the promising ones on the others."""
        drafts = {key: self._first_draw(key) for key in asked if key not in self._full}
        first = {key: draft for key, draft in drafts.items() if self._allowed((draft,))}
        if not first:
            return
        if len(first) <= _FINALISTS:
            for key in first:
                self._complete(key)
            return
        for key in self._outstanding(first):
            self._complete(key)
        found = 0
        for key in self._calm_first(first)[:_MOST_FINALISTS]:
            found += self._is_fast(self._complete(key))
            if found == _FAST_FINALISTS:
                break

    def refine(self, caps: Sequence[int], watermarks: Sequence[float]) -> None:
        """Try the values halfway between the best ones and their neighbours."""
        best = self._chosen(self._allowed(self._full.values())).settings
        between = [(cap + best.max_num_seqs) // 2 for cap in _neighbours(caps, best.max_num_seqs)]
        shares = [round((share + best.watermark) / 2, 3) for share in _neighbours(watermarks, best.watermark)]
        asked = [with_seqs(best, cap, best.watermark) for cap in between]
        asked += [with_seqs(best, best.max_num_seqs, share) for share in shares]
        self.run((settings, None) for settings in asked)

    def outcome(self) -> Outcome:
        tried = self._allowed(self._full.values())
        now = self._now.settings
        best = self._simplest(self._chosen(tried))
        families = {
            "watermark only": [one for one in tried if one.settings.max_num_seqs == now.max_num_seqs],
            "max_num_seqs only": [one for one in tried if one.settings.watermark == now.watermark],
        }
        alternatives = [(name, self._chosen(family)) for name, family in families.items()]
        alternatives.append(("stability", self._chosen(tried, "stability")))
        return Outcome(now=self._now, best=best, alternatives=_distinct(alternatives, seen=(self._now, best)))

    def calmest(self, kept_ratio: float) -> Tried:
        """The fewest preemptions among those that keep so much of the highest throughput, then the fastest."""
        tried = self._allowed(self._full.values())
        fastest = max(one.output_tokens_per_second for one in tried)
        fast = [one for one in tried if one.output_tokens_per_second >= kept_ratio * fastest]
        return min(fast, key=lambda one: (one.preemptions, -one.output_tokens_per_second))

    def _speed(self, tried: Tried) -> float:
        """The throughput relative to the present settings, at the upper end of its error.

        Which of two settings is faster differs from draw to draw, and what is real is one more draw. So a setting is
        not taken for too slow before the draws show it: mean plus the standard error of the mean.
        """
        ratios = [
            one.output_tokens_per_second / now.output_tokens_per_second
            for one, now in zip(tried.runs, self._now.runs, strict=False)
        ]
        error = stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
        return (fmean(ratios) + error) * self._now.output_tokens_per_second

    def _chosen(self, tried: Sequence[Tried], objective: Objective | None = None) -> Tried:
        options = [
            Option(settings=one.settings, result=replace(one.pooled, output_tokens_per_second=self._speed(one)))
            for one in tried
        ]
        wanted = objective or self._objective
        chosen = choose(options, wanted, self._trial.settings, kept_ratio=self._trial.kept_ratio)
        return tried[next(number for number, option in enumerate(options) if option is chosen)]

    def _simplest(self, best: Tried) -> Tried:
        """The present settings if they are as good; else the best, without a change that makes no difference."""
        if self._is_as_good(self._now, best, ratio=_AS_CALM_RATIO, preemptions=_AS_CALM_PREEMPTIONS):
            return self._now
        now = self._now.settings
        # A watermark follows the lengths of tomorrow, a cap does not: it is left out only where it does nothing.
        for kept, ratio, preemptions in (
            ({"max_num_seqs": now.max_num_seqs}, 1.1, 1.0),
            ({"watermark": now.watermark}, 1.0, 0.0),
        ):
            simpler = self._full.get((replace(best.settings, **kept), best.in_flight))
            if simpler is None or not self._allowed((simpler,)):
                continue
            if self._is_as_good(simpler, best, ratio=ratio, preemptions=preemptions):
                return simpler
        return best

    def _complete(self, key: _Key) -> Tried:
        """The setting on all draws."""
        if key not in self._full:
            first = self._first_draw(key)
            rest = run(self._trial, *key, draws=range(1, len(self._trial.draws)))
            self._full[key] = replace(first, runs=(*first.runs, *rest.runs))
        return self._full[key]

    def _outstanding(self, first: dict[_Key, Tried]) -> list[_Key]:
        """Of the settings tried on the first draw the fastest, the calmest, and the best that changes one only."""
        by_speed = sorted(first, key=lambda key: -first[key].output_tokens_per_second)
        now = self._trial.settings
        families = (
            [tried for (settings, _), tried in first.items() if settings.max_num_seqs == now.max_num_seqs],
            [tried for (settings, _), tried in first.items() if settings.watermark == now.watermark],
        )
        winners = [self._chosen(family) for family in families if family]
        winners.append(self._chosen(list(first.values()), "stability"))
        keys = [*by_speed[:2], *((one.settings, one.in_flight) for one in winners)]
        return [key for key in dict.fromkeys(keys) if key in first]

    def _calm_first(self, first: dict[_Key, Tried]) -> list[_Key]:
        """Those that may be fast enough, by their preemptions on the first draw; of those that do the same, one.

        A cap that is never reached does the same as none, which is the smaller change.
        """
        fastest = max(tried.output_tokens_per_second for tried in first.values())
        enough = (self._trial.kept_ratio - _ONE_DRAW_ERROR) * fastest
        fast = [key for key in first if first[key].output_tokens_per_second >= enough]
        now = self._trial.settings.max_num_seqs
        fast.sort(key=lambda key: abs(key[0].max_num_seqs - now))
        distinct: dict[tuple[float, float], _Key] = {}
        for key in fast:
            distinct.setdefault((first[key].preemptions, -first[key].output_tokens_per_second), key)
        return [key for _, key in sorted(distinct.items(), key=lambda item: item[0])]

    def _is_fast(self, tried: Tried) -> bool:
        fastest = max(self._speed(one) for one in self._allowed(self._full.values()))
        return self._speed(tried) >= self._trial.kept_ratio * fastest

    def _is_as_good(self, ours: Tried, best: Tried, *, ratio: float, preemptions: float) -> bool:
        if self._objective == "latency":
            late, early = ours.pooled.ttft_p99_seconds, best.pooled.ttft_p99_seconds
            return late is not None and early is not None and late <= 1.1 * early
        return ours.preemptions <= ratio * best.preemptions + preemptions and self._is_fast(ours)


def _neighbours(values: Sequence[_Number], value: _Number) -> list[_Number]:
    if value not in values:
        return []
    place = values.index(value)
    return [values[other] for other in (place - 1, place + 1) if 0 <= other < len(values)]


def _distinct(named: Iterable[tuple[str, Tried]], seen: Iterable[Tried]) -> tuple[tuple[str, Tried], ...]:
    """Without those that are in `seen` or named before."""
    known = {(one.settings, one.in_flight) for one in seen}
    kept = []
    for name, one in named:
        if (one.settings, one.in_flight) not in known:
            known.add((one.settings, one.in_flight))
            kept.append((name, one))
    return tuple(kept)
