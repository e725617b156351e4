"""The options table of an engine: what was simulated, and what each combination of settings did."""

import textwrap
from collections.abc import Sequence

from kvwatch.proposal import SettingOption, SimulationBasis

_HEADS = ("", "seqs", "watermark", "preempted/req", "tokens/s", "TTFT p99", "ITL p99")
_HEADS_WITHOUT_TIME = (*_HEADS[:4], "tokens/s*", "steps")


def options_table(options: Sequence[SettingOption], basis: SimulationBasis, *, width: int, indent: str = "  ") -> str:
    """A heading that says what the numbers rest on, then a row per option; under 80 columns at the usual widths."""
    timed = basis.cost_error_ratio is not None
    heads = _HEADS if timed else _HEADS_WITHOUT_TIME
    rows = [_row(option, timed=timed) for option in options]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [_fill(_heading(basis), width, indent)]
    for name, *cells in (heads, *rows):
        aligned = [cell.rjust(column) for cell, column in zip(cells, widths[1:], strict=True)]
        lines.append(f"{indent}  {'  '.join([name.ljust(widths[0]), *aligned])}".rstrip())
    lines.append(_fill(_footing(basis), width, indent))
    return "\n".join(lines)


def _heading(basis: SimulationBasis) -> str:
    return (
        f"Simulated ({basis.objective}; {basis.draws} draws of {basis.requests} requests). The present settings give "
        f"{basis.simulated_preemptions_per_request:.2f} preemptions per request; "
        f"{basis.observed_preemptions_per_request:.2f} were seen."
    )


def _footing(basis: SimulationBasis) -> str:
    assumed = [f"{name} {value}" for name, value, origin in basis.inputs if origin == "assumed"]
    sentences = [f"Assumed: {', '.join(assumed)}."] if assumed else []
    if basis.cost_error_ratio is None:
        sentences.append(
            "* What a step costs could not be fitted to this window: a token more is assumed to cost 1/300 of a step."
        )
    return " ".join(sentences)


def _row(option: SettingOption, *, timed: bool) -> tuple[str, ...]:
    name = option.name.replace("max_num_seqs", "seqs")
    if option.gateway_max_in_flight is not None:
        name = f"gateway {option.gateway_max_in_flight}"
    spread = (option.preemptions_per_request_high - option.preemptions_per_request_low) / 2
    calm = f"{option.preemptions_per_request:.2f} ±{spread:.2f}"
    return (
        name,
        "-" if option.max_num_seqs is None else f"{option.max_num_seqs}",
        f"{option.watermark:g}",
        calm,
        _percent(option.output_throughput_ratio),
        *(
            (_percent(option.ttft_p99_ratio), _percent(option.itl_p99_ratio))
            if timed
            else (f"{option.steps_ratio:.0%}",)
        ),
    )


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.0%}"


def _fill(text: str, width: int, indent: str) -> str:
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
