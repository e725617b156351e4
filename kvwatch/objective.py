"""Which of several simulated settings to choose, and what it costs compared with the present ones.

Three objectives:

- balanced: of the settings that reach 97 % of the best output throughput, those with the fewest preemptions; of these
  the lowest 99th percentile of the time to first token; of these the smallest change.
- stability: of the settings with at most 0.02 preemptions per request, the highest output throughput. If none is that
  calm, the calmest.
- latency: of the settings that reach 97 % of the best output throughput, the lowest 99th percentile of the time to
  first token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from kvwatch.errors import SettingError
from kvwatch.simulation import SchedulerSettings, SimulationResult

Objective = Literal["balanced", "stability", "latency"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)

THROUGHPUT_KEPT_RATIO = 0.97
CALM_PREEMPTIONS_PER_REQUEST = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Settings, and what simulating them gave."""

    settings: SchedulerSettings
    result: SimulationResult


def choose(
    options: Sequence[Option],
    objective: Objective,
    current: SchedulerSettings,
    *,
    kept_ratio: float = THROUGHPUT_KEPT_RATIO,
) -> Option:
    """The option that serves the objective best. Ties go to the smaller change from `current`, then to the first.

    `kept_ratio` is the share of the best throughput from which on an option counts as fast.

    Raises SettingError if there are no options.
    """
    if not options:
        raise SettingError("there are no settings to choose from; give at least one value for a setting.")
    if objective == "stability":
        calm = [o for o in options if is_calm(o)]
        if not calm:
            return min(options, key=lambda o: (o.result.preemptions, -_throughput(o), _change(o, current)))
        return min(calm, key=lambda o: (-_throughput(o), _ttft(o), _change(o, current)))
    best = max(_throughput(o) for o in options)
    fast = [o for o in options if _throughput(o) >= kept_ratio * best]
    if objective == "latency":
        return min(fast, key=lambda o: (_ttft(o), _change(o, current)))
    return min(fast, key=lambda o: (o.result.preemptions, _ttft(o), _change(o, current)))


def is_calm(option: Option) -> bool:
    return option.result.preemptions_per_request <= CALM_PREEMPTIONS_PER_REQUEST


def _throughput(option: Option) -> float:
    return option.result.output_tokens_per_second


def _ttft(option: Option) -> float:
    """Without a single first token there is nothing worse."""
    ttft = option.result.ttft_p99_seconds
    return math.inf if ttft is None else ttft


def _change(option: Option, current: SchedulerSettings) -> tuple[int, float]:
    """How many settings change, then by how much: each as a share of the larger value."""
    changed, amount = 0, 0.0
    for field in fields(SchedulerSettings):
        old, new = getattr(current, field.name), getattr(option.settings, field.name)
        if old == new:
            continue
        changed += 1
        if isinstance(old, (int, float)) and isinstance(new, (int, float)):
            amount += abs(new - old) / max(abs(new), abs(old))
        else:
            amount += 1.0
    return changed, amount
