"""A comparison of simulated settings -> the `kind: simulation` document, and text for a terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvwatch.objective import CALM_PREEMPTIONS_PER_REQUEST, Objective, Option, is_calm
from kvwatch.render.data import SCHEMA_VERSION
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
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Simulated options of one workload. `current` is the workload's own engine, which may or may not be an option."""

    name: str
    workload: Workload
    objective: Objective
    current: Option
    options: tuple[Option, ...]
    chosen: Option


def simulation_data(comparison: Comparison) -> dict[str, Any]:
    """The `kind: simulation` document."""
    chosen, current = comparison.chosen.result, comparison.current.result
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "simulation",
        "workload": comparison.name,
        "clients": comparison.workload.clients,
        "objective": comparison.objective,
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
    """What was chosen and what it costs, the options table with the chosen one first, usage over time."""
    return "\n\n".join(
        (
            _headline(comparison),
            _table(comparison, width=width),
            _timelines(comparison, width=width),
        )
    )


def _headline(comparison: Comparison) -> str:
    workload, engine = comparison.workload, comparison.workload.engine
    load = "open loop" if workload.clients is None else f"{workload.clients} clients"
    pool = f"{engine.num_gpu_blocks} blocks of {engine.block_size} tokens"
    lines = [f"{comparison.name}: {len(workload.requests)} requests, {load}; {pool}"]
    chosen, current = comparison.chosen, comparison.current
    if comparison.objective == "stability" and not is_calm(chosen):
        lines.append(f"no option has at most {CALM_PREEMPTIONS_PER_REQUEST} preemptions per request; the calmest:")
    flags = _changed_flags(chosen, current)
    if not flags:
        lines.append(f"{comparison.objective}: keep the present settings")
        return "\n".join(lines)
    lines += [f"{comparison.objective}: {' '.join(flags)}", *(f"  {line}" for line in effect(chosen, current))]
    return "\n".join(lines)


def _changed_flags(chosen: Option, current: Option) -> list[str]:
    return [
        f"--{name.replace('_', '-')}{'-override' if name == 'num_gpu_blocks' else ''} {getattr(chosen.settings, name)}"
        for name in SETTINGS
        if getattr(chosen.settings, name) != getattr(current.settings, name)
    ]


def effect(chosen: Option, current: Option) -> list[str]:
    """What the chosen option changes, measure by measure: from, to, and by how much."""
    new, old = chosen.result, current.result
    recomputed = f"recomputed tokens {old.recomputed_tokens:,} -> {new.recomputed_tokens:,}"
    return [
        f"preemptions {old.preemptions} -> {new.preemptions}, {recomputed}",
        _change("output", old.output_tokens_per_second, new.output_tokens_per_second, " tokens/s"),
        _change("TTFT p99", old.ttft_p99_seconds, new.ttft_p99_seconds, " s"),
        _change("ITL p99", _milli(old.itl_p99_seconds), _milli(new.itl_p99_seconds), " ms"),
    ]


def _change(what: str, old: float | None, new: float | None, unit: str) -> str:
    if old is None or new is None:
        return f"{what}: no samples"
    share = f" ({new / old - 1:+.1%})" if old else ""
    return f"{what} {_number(old)} -> {_number(new)}{unit}{share}"


def _table(comparison: Comparison, *, width: int) -> str:
    """The chosen option first, then the others as given, and the present settings. What is too wide loses columns."""
    ordered = [comparison.chosen, *(option for option in comparison.options if option is not comparison.chosen)]
    if all(option.settings != comparison.current.settings for option in ordered):
        ordered.append(comparison.current)
    varied = [
        name
        for name in SETTINGS
        if name in {"max_num_seqs", "watermark"} or len({getattr(o.settings, name) for o in ordered}) > 1
    ]
    dropped: tuple[str, ...] = ()
    while True:
        rows = [{"": _mark(option, comparison), **_cells(option, varied)} for option in ordered]
        header = [name for name in rows[0] if name not in dropped]
        table = _aligned([header, *([row[name] for name in header] for row in rows)])
        if len(dropped) == len(_LEAST_IMPORTANT) or max(map(len, table.splitlines())) <= width:
            return table
        dropped = _LEAST_IMPORTANT[: len(dropped) + 1]


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
        "preempt": str(result.preemptions),
        "recomp": _short(result.recomputed_tokens),
        "tok/s": _number(result.output_tokens_per_second),
        "TTFT p50": _number(result.ttft_p50_seconds),
        "p99 s": _number(result.ttft_p99_seconds),
        "ITL p50": _number(_milli(result.itl_p50_seconds)),
        "p99 ms": _number(_milli(result.itl_p99_seconds)),
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
    lines = [f"KV cache usage, 0 to {_number(longest)} s ({_BARS[0]} empty, {_BARS[-1]} full)"]
    lines += [f"{name:<3} {sparkline(result, longest, room)}" for name, result in results.items()]
    return "\n".join(lines)


def sparkline(result: SimulationResult, span_seconds: float, columns: int) -> str:
    """The largest usage in each of `columns` equal parts of `span_seconds`, as bars; nothing after the run's end."""
    step, peaks = result.usage_timeline_step_seconds, result.usage_timeline
    bars = []
    for column in range(columns):
        start, end = column * span_seconds / columns, (column + 1) * span_seconds / columns
        if start >= result.makespan_seconds:
            break
        first = min(int(start / step), len(peaks) - 1)
        last = max(first + 1, min(len(peaks), -int(-end // step)))
        bars.append(_BARS[min(len(_BARS) - 1, int(max(peaks[first:last]) * len(_BARS)))])
    return "".join(bars)


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _number(value: float | None) -> str:
    """Three significant digits; a dash where there is none."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _short(count: int) -> str:
    """Tokens in at most five characters."""
    if count < 10_000:
        return str(count)
    return f"{count / 1e3:.0f}k" if count < 1e6 else f"{count / 1e6:.1f}M"
