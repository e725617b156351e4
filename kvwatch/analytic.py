"""Findings and lengths -> changed settings by formula, without simulating: the estimate where that is not possible.

The number is the largest count of requests in flight whose demand stays under the pool with a stated probability
(`footprint`). A setting is proposed only while requests are being preempted: an engine that is fine gets no change.
"""

import contextlib
import math
from dataclasses import dataclass

from kvwatch.checks.check import EngineView
from kvwatch.checks.concurrency_oversubscribed import peak_in_flight, request_footprint
from kvwatch.errors import NoData
from kvwatch.finding import Finding
from kvwatch.flag_releases import has_flag
from kvwatch.footprint import Footprint
from kvwatch.proposal import Confidence, Proposals, Recommendation, Withheld, harm_found, unjudged
from kvwatch.thresholds import Thresholds
from kvwatch.versions import engine_version
from kvwatch.vllm_metrics import PREEMPTIONS, REQUESTS_RUNNING

# vLLM pull request 44594: 0.02 to 0.05 end most preemptions at equal or better throughput; above 0.10 only queues grow.
WATERMARK_MINIMUM, WATERMARK_MAXIMUM = 0.02, 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Basis:
    """What all proposals for one engine rest on."""

    size: Footprint
    in_flight: float  # the most at a time, lately
    running: float  # the most at a time, in the window: max_num_seqs is at least that
    usable_blocks: int
    because: tuple[str, ...]
    probability: float

    @property
    def carried(self) -> int:
        return self.size.carried_by(self.usable_blocks, self.probability)

    @property
    def demand_blocks(self) -> float:
        return self.size.demand_blocks(self.carried, self.probability)

    @property
    def confidence(self) -> Confidence:
        if self.size.source == "lifetime":
            return "low"
        return "high" if self.size.observations >= 100 else "medium"

    @property
    def predicted(self) -> dict[str, float | int | str]:
        return {
            "method": "analytic",
            "in_flight": self.carried,
            "demand_blocks": round(self.demand_blocks, 1),
            "usable_blocks": self.usable_blocks,
            "probability": self.probability,
        }


def estimate(view: EngineView, findings: tuple[Finding, ...], limits: Thresholds) -> Proposals:
    """The settings to change, those for now first, and those that could not be decided with the reason."""
    because = harm_found(findings)
    if not because:
        return Proposals(withheld=unjudged(findings))
    if over := harm_before_restart(view, limits):
        return Proposals(withheld=(over,))
    try:
        basis = _Basis(
            size=request_footprint(view),
            in_flight=peak_in_flight(view.window.last(limits.hold_seconds)),
            running=view.window.maximum(REQUESTS_RUNNING),
            usable_blocks=view.capacity.usable_blocks or 0,
            because=because,
            probability=limits.pool_fits_probability,
        )
    except NoData as missing:
        return Proposals(withheld=(Withheld(setting="gateway_max_in_flight", reason=str(missing)),))
    if basis.carried < 1:
        reason = f"not even one request of today's length fits the {basis.usable_blocks:,} usable blocks"
        return Proposals(withheld=(Withheld(setting="gateway_max_in_flight", reason=reason),))
    outcomes = (_gateway(basis), _at_restart(view, basis))
    return Proposals(
        recommendations=tuple(outcome for outcome in outcomes if isinstance(outcome, Recommendation)),
        withheld=tuple(outcome for outcome in outcomes if isinstance(outcome, Withheld)),
    )


def harm_before_restart(view: EngineView, limits: Thresholds) -> Withheld | None:
    """Why nothing is proposed where the process before preempted and the present one does not, as after a rollout."""
    present = view.window.since_restart
    if present is view.window:
        return None
    with contextlib.suppress(NoData):
        if present.increase(PREEMPTIONS) >= limits.preemptions_minimum:
            return None
    reason = (
        f"requests were preempted before the engine restarted, and hardly any in the {present.duration_seconds:.0f} s "
        "since: ask again later, with a --window that begins after the restart"
    )
    return Withheld(setting="gateway_max_in_flight", reason=reason)


def _gateway(basis: _Basis) -> Recommendation | Withheld:
    carried = basis.carried
    if basis.in_flight <= carried:
        return Withheld(
            setting="gateway_max_in_flight",
            reason=f"at most {basis.in_flight:.0f} requests were in flight, not above the {carried} that the pool "
            "carries: the lengths seen do not explain the preemptions; sample a longer --window",
        )
    return Recommendation(
        setting="gateway_max_in_flight",
        flag=None,
        current=int(basis.in_flight),
        proposed=carried,
        apply="now",
        because=basis.because,
        confidence=basis.confidence,
        predicted=basis.predicted,
        note=f"cap the requests in flight on this engine at {carried} in the gateway and answer 429 beyond that",
    )


def _at_restart(view: EngineView, basis: _Basis) -> Recommendation | Withheld:
    version = engine_version(view.facts.vllm_version, view.window.latest.vllm_version_at_least)
    if has_flag("watermark", version):
        return _watermark(view.facts.watermark, basis)
    return _max_num_seqs(view.facts.max_num_seqs, basis)


def _max_num_seqs(current: int | None, basis: _Basis) -> Recommendation | Withheld:
    carried = basis.carried
    if current is not None and current <= carried:
        return Withheld(
            setting="max_num_seqs",
            reason=f"it is {current} already, not above the {carried} that the pool carries at the lengths seen",
        )
    if basis.running <= carried:
        return Withheld(
            setting="max_num_seqs",
            reason=f"at most {basis.running:.0f} requests ran at a time, not above the {carried} that the pool carries "
            "at the lengths seen, so a cap there changes nothing",
        )
    return Recommendation(
        setting="max_num_seqs",
        flag=f"--max-num-seqs {carried}",
        current=current,
        proposed=carried,
        apply="restart",
        because=basis.because,
        confidence=basis.confidence,
        predicted=basis.predicted,
        note="ends preemptions; costs throughput when requests turn out shorter. vLLM 0.24 and later have --watermark",
    )


def _watermark(current: float | None, basis: _Basis) -> Recommendation | Withheld:
    """Free blocks for running requests to grow into: the spread of their demand, within the range measured to work."""
    spread = basis.demand_blocks - basis.carried * basis.size.live_blocks_mean
    share = min(WATERMARK_MAXIMUM, max(WATERMARK_MINIMUM, math.ceil(100 * spread / basis.usable_blocks) / 100))
    if current is not None and current >= share:
        return Withheld(
            setting="watermark",
            reason=f"it is {current} already, not below {share}: cap requests in flight, or give the pool more memory",
        )
    reserve = math.floor(share * (basis.usable_blocks + 1))
    return Recommendation(
        setting="watermark",
        flag=f"--watermark {share}",
        current=current,
        proposed=share,
        apply="restart",
        because=basis.because,
        confidence=basis.confidence,
        predicted={"method": "analytic", "reserve_blocks": reserve, "usable_blocks": basis.usable_blocks},
        note=f"keeps {reserve:,} blocks for running requests to grow into before another is admitted"
        + ("" if current is not None else "; vLLM does not export its watermark: compare with the engine's flags"),
    )
