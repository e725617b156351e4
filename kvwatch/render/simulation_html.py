"""A comparison of simulated settings -> one self-contained page: the choice, what it changes, all options, two charts.

The tables are there without scripts; the charts are drawn by uPlot, which the page carries. Everything from outside is
escaped, in the data of the charts as well.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from kvwatch import __version__
from kvwatch.objective import CALM_PREEMPTIONS_PER_REQUEST, Option
from kvwatch.render.html_assets import STYLE
from kvwatch.render.simulation import (
    COST_ASSUMED,
    ORIGINS,
    SETTINGS,
    Comparison,
    are_some_given_up,
    changed_flags,
    is_cost_assumed,
    is_none_calm,
    milli,
    number,
    ordered_options,
    peaks,
    subject,
    varied_settings,
)
from kvwatch.render.simulation_assets import PAGE_STYLE, SCRIPT
from kvwatch.settings_now import Assumption

_KEEP = "Keep the present settings"
CHART_COLUMNS = 240
_SHORT = {
    "max_num_seqs": "seqs",
    "watermark": "watermark",
    "max_num_batched_tokens": "batched tokens",
    "num_gpu_blocks": "blocks",
}
MAX_LINES = 8  # more cannot be told apart; the table has all options


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLibrary:
    """uPlot: its script, its style sheet, and its licence, which goes where the code goes."""

    script: str
    style: str
    licence: str


def simulation_html(comparison: Comparison, library: ChartLibrary) -> str:
    """The page, without a trailing line feed."""
    flags = changed_flags(comparison.chosen, comparison.current)
    more = _limits(comparison)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{escape(' '.join(flags) or _KEEP)} - kvwatch simulate</title>",
        f"<style>{STYLE}{PAGE_STYLE}{library.style}</style></head><body>",
        f"<header><div class='verdict choice'><p><span class='word'>{comparison.objective.upper()}</span></p>",
        f"<h1>{_headline(flags)}</h1>{more}<p class='soft'>{escape(subject(comparison))}</p></div></header>",
        "<main>",
        _changes(comparison),
        _options(comparison),
        _charts(),
        _inputs(comparison.assumptions),
        f"</main><footer class='soft'>kvwatch {escape(__version__)}</footer>",
        f"<script type='application/json' id='data'>{_embedded(_chart_data(comparison))}</script>",
        f"<script>/*\n{library.licence.strip()}\n*/\n{library.script}</script>",
        f"<script>{SCRIPT}</script>",
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part)


# The top of the page --------------------------------------------------------------------------------------------------


def _headline(flags: Sequence[str]) -> str:
    """The flags, none of them broken over two lines."""
    return " ".join(f"<code>{escape(flag)}</code>" for flag in flags) or _KEEP


def _limits(comparison: Comparison) -> str:
    """What the choice cannot give."""
    if not is_none_calm(comparison):
        return ""
    return f"<p>No option has at most {CALM_PREEMPTIONS_PER_REQUEST} preemptions per request; this is the calmest.</p>"


def _changes(comparison: Comparison) -> str:
    """What the chosen settings change, measure by measure; nothing where they are the present ones."""
    new, old = comparison.chosen.result, comparison.current.result
    if comparison.chosen.settings == comparison.current.settings:
        return ""
    counts = (
        ("preemptions", old.preemptions, new.preemptions),
        ("recomputed tokens", old.recomputed_tokens, new.recomputed_tokens),
    )
    measures = (
        ("output tokens/s", old.output_tokens_per_second, new.output_tokens_per_second),
        ("TTFT p50, s", old.ttft_p50_seconds, new.ttft_p50_seconds),
        ("TTFT p99, s", old.ttft_p99_seconds, new.ttft_p99_seconds),
        ("ITL p50, ms", milli(old.itl_p50_seconds), milli(new.itl_p50_seconds)),
        ("ITL p99, ms", milli(old.itl_p99_seconds), milli(new.itl_p99_seconds)),
        ("time for all, s", old.makespan_seconds, new.makespan_seconds),
    )
    rows = [
        *((name, f"{before:,}", f"{after:,}", _share(before, after)) for name, before, after in counts),
        *((name, number(before), number(after), _share(before, after)) for name, before, after in measures),
    ]
    table = _table(("", "now", "chosen", "change"), rows)
    return f"<section class='engine'><h2>What it changes</h2>{table}</section>"


def _charts() -> str:
    """Places for the charts. They are hidden until the script draws into them."""
    return (
        "<noscript><p class='soft'>The charts need scripts; the tables do not.</p></noscript>"
        "<section class='engine' id='usage' hidden><h2>KV cache usage over time</h2><div class='chart'></div>"
        "<p class='soft'></p></section>"
        "<section class='engine' id='trade' hidden><h2>Preemptions and throughput</h2><div class='chart'></div>"
        "<p class='soft' aria-live='polite'></p></section>"
    )


def _options(comparison: Comparison) -> str:
    """All options, the chosen one first."""
    ordered = ordered_options(comparison)
    varied = varied_settings(ordered)
    given_up = are_some_given_up(ordered)
    heads = (
        "",
        *(name.replace("_", "-") for name in varied),
        *(("given up",) if given_up else ()),
        *("preempted", "recomputed", "tokens/s", "TTFT p50, s", "TTFT p99, s", "ITL p50, ms", "ITL p99, ms", "peak KV"),
    )
    rows = []
    for option in ordered:
        result = option.result
        rows.append(
            (
                _mark(option, comparison),
                *(_setting(option, name) for name in varied),
                *((f"{result.abandoned_requests:,}",) if given_up else ()),
                f"{result.preemptions:,}",
                f"{result.recomputed_tokens:,}",
                number(result.output_tokens_per_second),
                number(result.ttft_p50_seconds),
                number(result.ttft_p99_seconds),
                number(milli(result.itl_p50_seconds)),
                number(milli(result.itl_p99_seconds)),
                f"{result.peak_usage_ratio:.0%}",
            )
        )
    return (
        f"<section class='engine'><h2>Options</h2><div class='scroll' tabindex='0'>{_table(heads, rows)}</div>"
        "<p class='soft'>TTFT: time to first token. ITL: time between two tokens of a request.</p></section>"
    )


def _mark(option: Option, comparison: Comparison) -> str:
    words = ["chosen"] if option is comparison.chosen else []
    if option.settings == comparison.current.settings:
        words.append("now")
    return ", ".join(words)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A first column of names and then numbers; the row of the choice is marked."""
    head = "".join(f"<th class='number'>{escape(name)}</th>" for name in heads[1:])
    lines = [f"<tr><th></th>{head}</tr>"]
    for name, *cells in rows:
        numbers = "".join(f"<td class='number'>{escape(cell)}</td>" for cell in cells)
        marked = " class='chosen'" if name.startswith("chosen") else ""
        lines.append(f"<tr{marked}><th scope='row'>{escape(name)}</th>{numbers}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _inputs(assumptions: Sequence[Assumption]) -> str:
    """What a reconstructed load rests on, by where it is from."""
    if not assumptions:
        return ""
    listed = sorted(assumptions, key=lambda item: ORIGINS.index(item.origin))
    rows = "".join(
        f"<tr><td>{item.origin}</td><td>{escape(item.name)}</td><td class='number'>{escape(str(item.value))}</td></tr>"
        for item in listed
    )
    cost = f"<p>{escape(COST_ASSUMED)}</p>" if is_cost_assumed(assumptions) else ""
    assumed = ", ".join(f"{item.name} {item.value}" for item in listed if item.origin == "assumed")
    said = f"<p>Assumed: {escape(assumed)}.</p>" if assumed else ""
    return (
        f"<section class='engine'><h2>What the load rests on</h2>{said}{cost}"
        f"<details><summary>all inputs</summary><table>{rows}</table></details></section>"
    )


def _share(before: float | None, after: float | None) -> str:
    """By how much it changed; nothing where that has no meaning."""
    return f"{after / before - 1:+.1%}" if before and after is not None else ""


def _setting(option: Option, name: str) -> str:
    value: float = getattr(option.settings, name)
    return f"{value:,}" if value >= 1 else f"{value:g}"


# What the charts draw -------------------------------------------------------------------------------------------------


def _chart_data(comparison: Comparison) -> dict[str, Any]:
    """`seconds` and one `usage` list per line, shorter where a run ended earlier; `points` of all options."""
    ordered = ordered_options(comparison)
    varied = [name for name in SETTINGS if len({getattr(option.settings, name) for option in ordered}) > 1]
    named = [(_label(option, varied), _kind(option, comparison), option.result) for option in ordered]
    # what is chosen and what is now are always drawn
    lines = sorted(named, key=lambda line: ("chosen", "now", "other").index(line[1]))[:MAX_LINES]
    span = max(result.makespan_seconds for _, _, result in lines)
    return {
        "seconds": [round((column + 0.5) * span / CHART_COLUMNS, 3) for column in range(CHART_COLUMNS)],
        "lines": [
            {"label": label, "kind": kind, "usage": [round(peak, 4) for peak in peaks(result, span, CHART_COLUMNS)]}
            for label, kind, result in lines
        ],
        "left_out": len(named) - len(lines),
        "points": [
            {
                "label": label,
                "kind": kind,
                "preemptions": result.preemptions,
                "tokens_per_second": round(result.output_tokens_per_second, 2),
            }
            for label, kind, result in named
        ],
    }


def _kind(option: Option, comparison: Comparison) -> str:
    if option is comparison.chosen:
        return "chosen"
    return "now" if option.settings == comparison.current.settings else "other"


def _label(option: Option, varied: Iterable[str]) -> str:
    """What tells the option apart, short enough for a legend."""
    return ", ".join(f"{_SHORT[name]} {_setting(option, name)}" for name in varied)


def _embedded(data: Any) -> str:
    """JSON that cannot end the element it stands in, nor open a comment."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
