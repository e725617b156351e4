"""A comparison of simulated settings -> the `kind: simulation` document, and text for a terminal."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvwatch.objective import CALM_PREEMPTIONS_PER_REQUEST, Objective, Option, is_calm
from kvwatch.render.data import SCHEMA_VERSION
from kvwatch.settings_now import Assumption
from kvwatch.simulation import SimulationResult, Workload

SETTINGS = ("max_num_seqs", "watermark", "max_num_batched_tokens", "num_gpu_blocks")
MEASURES = (
    "requests",
    "steps",
    "preemptions",
    "preemptions_per_request",
    "scheduled_tokens",
    "recomputed_tokens",
    "prefix_hit_tokens",
    "output_tokens",
    "makespan_seconds",
    "output_tokens_per_second",
    "ttft_p50_seconds",
    "ttft_p99_seconds",
    "itl_p50_seconds",
    "itl_p99_seconds",
    "queue_p50_seconds",
    "queue_p99_seconds",
    "peak_usage_ratio",
    "timeouts",
    "abandoned_requests",
)
ORIGINS = ("assumed", "given", "derived", "observed")
COST_ASSUMED = (
    "What a step costs could not be fitted to this window. Preemptions do not depend on it in a closed loop; compare "
    "times and throughput with each other only."
)
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Simulated options of one workload. `current` is the workload's own engine, which may or may not be an option.

    `assumptions` are the inputs of a workload that was reconstructed from an engine's pages, with their origins.
    """

    name: str
    workload: Workload
    objective: Objective
    current: Option
    options: tuple[Option, ...]
    chosen: Option
    assumptions: tuple[Assumption, ...] = ()


def simulation_data(comparison: Comparison) -> dict[str, Any]:
    """The `kind: simulation` document."""
    chosen, current = comparison.chosen.result, comparison.current.result
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "simulation",
        "workload": comparison.name,
        "clients": comparison.workload.clients,
        "objective": comparison.objective,
        "assumptions": [
            {"name": item.name, "value": item.value, "origin": item.origin} for item in comparison.assumptions
        ],
        "options": [option_data(option) for option in comparison.options],
        "chosen": option_data(comparison.chosen),
        "current": option_data(comparison.current),
        "usage_timelines": {
            "chosen": {"step_seconds": chosen.usage_timeline_step_seconds, "usage_ratio": list(chosen.usage_timeline)},
            "current": {
                "step_seconds": current.usage_timeline_step_seconds,
                "usage_ratio": list(current.usage_timeline),
            },
        },
    }


def option_data(option: Option) -> dict[str, Any]:
    """One option: its settings, then its measures."""
    settings = {name: getattr(option.settings, name) for name in SETTINGS}
    return settings | {name: getattr(option.result, name) for name in MEASURES}


def simulation_text(comparison: Comparison, *, width: int = 80) -> str:
    """What was chosen and what it costs, the options table with the chosen one first, usage over time, the inputs."""
    parts = (
        _headline(comparison, width=width),
        _table(comparison, width=width),
        _timelines(comparison, width=width),
        _inputs(comparison.assumptions, width=width),
    )
    return "\n\n".join(part for part in parts if part)


def _headline(comparison: Comparison, *, width: int) -> str:
    lines = [_fill(subject(comparison), width, "  ")]
    chosen, current = comparison.chosen, comparison.current
    if is_none_calm(comparison):
        lines.append(f"no option has at most {CALM_PREEMPTIONS_PER_REQUEST} preemptions per request; the calmest:")
    flags = changed_flags(chosen, current)
    if not flags:
        lines.append(f"{comparison.objective}: keep the present settings")
        return "\n".join(lines)
    lines += [f"{comparison.objective}: {' '.join(flags)}", *(f"  {line}" for line in effect(chosen, current))]
    return "\n".join(lines)


def subject(comparison: Comparison) -> str:
    """What was simulated, in a line."""
    workload, engine = comparison.workload, comparison.workload.engine
    load = "open loop" if workload.clients is None else f"{workload.clients} clients"
    pool = f"{engine.num_gpu_blocks} blocks of {engine.block_size} tokens"
    return f"{comparison.name}: {len(workload.requests)} requests, {load}; {pool}"


def is_none_calm(comparison: Comparison) -> bool:
    """Whether stability was asked for and no option has it."""
    return comparison.objective == "stability" and not is_calm(comparison.chosen)


def changed_flags(chosen: Option, current: Option) -> list[str]:
    """The flags of vLLM that turn the present settings into the chosen ones."""
    return [
        f"--{name.replace('_', '-')}{'-override' if name == 'num_gpu_blocks' else ''} {getattr(chosen.settings, name)}"
        for name in SETTINGS
        if getattr(chosen.settings, name) != getattr(current.settings, name)
    ]


def effect(chosen: Option, current: Option) -> list[str]:
    """What the chosen option changes, measure by measure: from, to, and by how much."""
    new, old = chosen.result, current.result
    given_up = f"given up {old.abandoned_requests} -> {new.abandoned_requests} of {new.requests}"
    recomputed = f"recomputed tokens {old.recomputed_tokens:,} -> {new.recomputed_tokens:,}"
    return [
        f"preemptions {old.preemptions} -> {new.preemptions}, {recomputed}",
        _change("output", old.output_tokens_per_second, new.output_tokens_per_second, " tokens/s"),
        _change("TTFT p99", old.ttft_p99_seconds, new.ttft_p99_seconds, " s"),
        _change("ITL p99", milli(old.itl_p99_seconds), milli(new.itl_p99_seconds), " ms"),
        *((given_up,) if are_some_given_up((chosen, current)) else ()),
    ]


def _change(what: str, old: float | None, new: float | None, unit: str) -> str:
    if old is None or new is None:
        return f"{what}: no samples"
    share = f" ({new / old - 1:+.1%})" if old else ""
    return f"{what} {number(old)} -> {number(new)}{unit}{share}"


def ordered_options(comparison: Comparison) -> list[Option]:
    """The chosen one, the others as given, and the present settings if they are none of these."""
    ordered = [comparison.chosen, *(option for option in comparison.options if option is not comparison.chosen)]
    if all(option.settings != comparison.current.settings for option in ordered):
        ordered.append(comparison.current)
    return ordered


def varied_settings(options: Sequence[Option]) -> list[str]:
    """Names of the settings that tell the options apart; max_num_seqs and watermark always."""
    return [
        name
        for name in SETTINGS
        if name in {"max_num_seqs", "watermark"} or len({getattr(o.settings, name) for o in options}) > 1
    ]


def are_some_given_up(options: Iterable[Option]) -> bool:
    """Whether clients give up on requests: their times to the first token are in no percentile."""
    return any(option.result.abandoned_requests for option in options)


def _table(comparison: Comparison, *, width: int) -> str:
    """The chosen option first, then the others as given, and the present settings. What is too wide loses columns."""
    ordered = ordered_options(comparison)
    varied = varied_settings(ordered)
    dropped: tuple[str, ...] = () if are_some_given_up(ordered) else ("gave up",)
    while True:
        rows = [{"": _mark(option, comparison), **_cells(option, varied)} for option in ordered]
        header = [name for name in rows[0] if name not in dropped]
        table = _aligned([header, *([row[name] for name in header] for row in rows)])
        left = [name for name in _LEAST_IMPORTANT if name not in dropped]
        if not left or max(map(len, table.splitlines())) <= width:
            return table
        dropped = (*dropped, left[0])


_COLUMN = {
    "max_num_seqs": "seqs",
    "watermark": "wmark",
    "max_num_batched_tokens": "batch",
    "num_gpu_blocks": "blocks",
}
_LEAST_IMPORTANT = ("peak", "ITL p50", "recomp")


def _mark(option: Option, comparison: Comparison) -> str:
    is_current = option.settings == comparison.current.settings
    if option is comparison.chosen:
        return "* now" if is_current else "*"
    return "now" if is_current else ""


def _cells(option: Option, varied: Iterable[str]) -> dict[str, str]:
    """Column -> text. Seconds for TTFT, milliseconds for ITL."""
    result: SimulationResult = option.result
    return {
        **{_COLUMN[name]: f"{getattr(option.settings, name):g}" for name in varied},
        "gave up": str(result.abandoned_requests),
        "preempt": str(result.preemptions),
        "recomp": short(result.recomputed_tokens),
        "tok/s": number(result.output_tokens_per_second),
        "TTFT p50": number(result.ttft_p50_seconds),
        "p99 s": number(result.ttft_p99_seconds),
        "ITL p50": number(milli(result.itl_p50_seconds)),
        "p99 ms": number(milli(result.itl_p99_seconds)),
        "peak": f"{result.peak_usage_ratio:.0%}",
    }


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(size) if i == 0 else cell.rjust(size)
            for i, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _timelines(comparison: Comparison, *, width: int) -> str:
    """KV cache usage over time, now and with the chosen settings, on one time axis."""
    results = {"now": comparison.current.result, "*": comparison.chosen.result}
    if comparison.chosen.settings == comparison.current.settings:
        del results["*"]
    longest = max(result.makespan_seconds for result in results.values())
    room = width - 4
    lines = [f"KV cache usage, 0 to {number(longest)} s ({_BARS[0]} empty, {_BARS[-1]} full)"]
    lines += [f"{name:<3} {sparkline(result, longest, room)}" for name, result in results.items()]
    return "\n".join(lines)


def sparkline(result: SimulationResult, span_seconds: float, columns: int) -> str:
    """The largest usage in each of `columns` equal parts of `span_seconds`, as bars; nothing after the run's end."""
    return "".join(_BARS[min(len(_BARS) - 1, int(peak * len(_BARS)))] for peak in peaks(result, span_seconds, columns))


def peaks(result: SimulationResult, span_seconds: float, columns: int) -> list[float]:
    """The largest usage, 0..1, in each of `columns` equal parts of `span_seconds`, up to the run's end."""
    step, usage = result.usage_timeline_step_seconds, result.usage_timeline
    found = []
    for column in range(columns):
        start, end = column * span_seconds / columns, (column + 1) * span_seconds / columns
        if start >= result.makespan_seconds:
            break
        first = min(int(start / step), len(usage) - 1)
        last = max(first + 1, min(len(usage), -int(-end // step)))
        found.append(max(usage[first:last]))
    return found


def _inputs(assumptions: Sequence[Assumption], *, width: int) -> str:
    """What a reconstructed load rests on, by where it is from: first what is only assumed."""
    lines = ["The load was reconstructed from what the engine shows"] if assumptions else []
    for origin in ORIGINS:
        named = [f"{item.name} {item.value}" for item in assumptions if item.origin == origin]
        if named:
            lines.append(_fill(f"  {origin:<9}{', '.join(named)}", width, " " * 11))
    if is_cost_assumed(assumptions):
        lines.append(_fill(COST_ASSUMED, width, "  "))
    return "\n".join(lines)


def is_cost_assumed(assumptions: Iterable[Assumption]) -> bool:
    """Whether the cost of a step could not be fitted to what was seen."""
    return any(item.name == "step_seconds" and item.origin == "assumed" for item in assumptions)


def _fill(text: str, width: int, indent: str) -> str:
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def milli(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def number(value: float | None) -> str:
    """Three significant digits; a dash where there is none."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def short(count: int) -> str:
    """Tokens in at most five characters."""
    if count < 10_000:
        return str(count)
    return f"{count / 1e3:.0f}k" if count < 1e6 else f"{count / 1e6:.1f}M"
