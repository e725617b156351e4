"""What is proposed for an engine: changed settings, what was not decided and why, and what each setting would do."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvwatch.finding import Finding, Status

Confidence = Literal["high", "medium", "low"]

# The first is the harm that a setting is changed for; the others only strengthen the case.
HARM = ("preemptions_sustained", "kv_cache_saturated", "concurrency_oversubscribed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """One changed setting. `apply` is "now" where no engine restarts. `predicted` says what it is expected to do."""

    setting: str
    flag: str | None
    current: float | int | str | None
    proposed: float | int | str
    apply: Literal["now", "restart"]
    because: tuple[str, ...]
    confidence: Confidence
    predicted: Mapping[str, float | int | str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Withheld:
    """A recommendation that was not made, and what would allow it."""

    setting: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingOption:
    """What one combination of settings did when the engine's load was simulated under it.

    `name` is "now", "proposed", "gateway", "pool x2" (the present flags on twice the blocks: what more memory would
    do), what an alternative changes, or with a leading "+" what is changed besides the proposed settings; `setting` and
    `value` name that change. Ratios are relative to the present settings, `_low` and `_high` the extremes over the
    draws of requests. Where the cost of a step could not be fitted, times are None and `output_throughput_ratio` rests
    on an assumed one; `steps_ratio` rests on none. `max_num_seqs` is None where it is not known and never reached.
    With several replicas the settings are those of each, all counts and rates those of all together.
    """

    name: str
    setting: str | None = None
    value: float | int | str | None = None
    max_num_seqs: int | None
    watermark: float
    gateway_max_in_flight: int | None
    num_gpu_blocks: int
    preemptions_per_request: float
    preemptions_per_request_low: float
    preemptions_per_request_high: float
    recomputed_tokens_per_request: float
    output_throughput_ratio: float
    output_throughput_ratio_low: float
    output_throughput_ratio_high: float
    steps_ratio: float
    output_tokens_per_second: float | None
    ttft_p50_ratio: float | None
    ttft_p99_ratio: float | None
    itl_p50_ratio: float | None
    itl_p99_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationBasis:
    """What the options rest on: the inputs with their origins, and how well the present settings were reproduced."""

    objective: str
    requests: int
    draws: int
    observed_preemptions_per_request: float
    simulated_preemptions_per_request: float
    cost_error_ratio: float | None  # None: the cost of a step could not be fitted and is assumed
    inputs: tuple[tuple[str, float | int | str | bool, str], ...]  # name, value, origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """All that is proposed for one engine. `options` is empty and `simulation` None where nothing was simulated."""

    recommendations: tuple[Recommendation, ...] = ()
    withheld: tuple[Withheld, ...] = ()
    options: tuple[SettingOption, ...] = ()
    simulation: SimulationBasis | None = None


def harm_found(findings: tuple[Finding, ...]) -> tuple[str, ...]:
    """The checks that found harm which a scheduler setting can end; empty without preemptions that last."""
    found = tuple(f.check for f in findings if f.check in HARM and f.status in {Status.WARNING, Status.CRITICAL})
    return found if HARM[0] in found else ()


def unjudged(findings: tuple[Finding, ...]) -> tuple[Withheld, ...]:
    """Why nothing can be said where the harm cannot be judged."""
    return tuple(
        Withheld(setting="gateway_max_in_flight", reason=finding.summary)
        for finding in findings
        if finding.check == HARM[0] and finding.status is Status.UNKNOWN
    )
