#!/usr/bin/env python3
"""How good are the settings that kvwatch chooses? Measured on the workloads of tests/grid_cases.py.

python tools/measure_recommendations.py            the table, as Markdown; about a quarter of an hour on two cores
python tools/measure_recommendations.py --write    into docs/simulator.md, between its two marks

Kvwatch was made looking at the first series of workloads, and faults were found with the second and the third. The
fourth and the fifth, drawn with other random numbers again, are only measured.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / "tests"), str(Path(__file__).parent.parent)]

from grid_cases import (  # noqa: E402 -- the path must be set first
    WANTED,
    WANTED_OF_PAGES,
    GridCase,
    Truth,
    Wanted,
    cases,
    truth_of,
)

from kvwatch.simulation import SchedulerSettings, SimulationResult  # noqa: E402
from kvwatch.what_if import best_settings, run, with_seqs  # noqa: E402

PAGE = Path(__file__).parent.parent / "docs" / "simulator.md"
ERROR_SETTINGS = ((256, 0.05), (256, 0.1), (18, 0.0), (18, 0.075))  # caps and watermarks
FURTHER_SERIES = (4, 5)
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Settings, what they give on the true requests, and whether they are as good as was wanted."""

    settings: SchedulerSettings
    result: SimulationResult
    throughput_ratio: float
    is_good: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """By how much the simulation of a reconstructed load is off, under one of ERROR_SETTINGS."""

    throughput_ratio: float  # of the present settings' throughput
    preemptions_per_request: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    case: GridCase
    truth: Truth
    from_requests: Choice
    from_pages: Choice
    misses: tuple[Miss, ...]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--write", action="store_true", help=f"write into {PAGE.name}")
    asked = options.parse_args()
    wanted = [case for series in (1, *FURTHER_SERIES) for case in cases(series)]
    with Pool() as pool:
        measured_rows = pool.map(measured, wanted, chunksize=1)
    first = len(cases())
    rows, further = measured_rows[:first], measured_rows[first:]
    text = f"{summary(rows, further)}\n\n{errors(measured_rows)}\n\n{table(rows)}\n\n{missed(further)}"
    if asked.write:
        page = PAGE.read_text(encoding="utf-8")
        head, rest = page.split(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
    sys.stdout.write(f"{text}\n")
    return 0


def measured(case: GridCase) -> Row:
    truth = truth_of(case)
    row = Row(
        case=case,
        truth=truth,
        from_requests=_choice(case, truth, best_settings(case.trial).best.settings, WANTED),
        from_pages=_choice(case, truth, case.chosen_from_pages(), WANTED_OF_PAGES),
        misses=tuple(_misses(case)),
    )
    sys.stderr.write(f"{case.name}\n")
    return row


def _choice(case: GridCase, truth: Truth, settings: SchedulerSettings, wanted: Wanted) -> Choice:
    result = case.play(settings)
    return Choice(
        settings=settings,
        result=result,
        throughput_ratio=truth.throughput_ratio(result),
        is_good=truth.is_good(result, wanted),
    )


def _misses(case: GridCase) -> Iterator[Miss]:
    trial = case.reconstructed()
    draws = range(len(trial.draws))
    now, true_now = run(trial, trial.settings, None, draws), case.play(case.settings)
    for cap, watermark in ERROR_SETTINGS:
        ours = run(trial, with_seqs(trial.settings, cap, watermark), None, draws)
        true = case.play(with_seqs(case.settings, cap, watermark))
        yield Miss(
            throughput_ratio=ours.output_tokens_per_second / now.output_tokens_per_second
            - true.output_tokens_per_second / true_now.output_tokens_per_second,
            preemptions_per_request=ours.preemptions_per_request - true.preemptions / len(case.requests),
        )


def errors(rows: Sequence[Row]) -> str:
    """How far predictions from pages alone are off."""
    misses = [miss for row in rows for miss in row.misses]
    speed, preempted = (
        math.sqrt(math.fsum(value**2 for value in values) / len(misses))
        for values in ([m.throughput_ratio for m in misses], [m.preemptions_per_request for m in misses])
    )
    settings = ", ".join(f"({cap}, {watermark:g})" for cap, watermark in ERROR_SETTINGS)
    return (
        f"Simulating the load that the pages show, at {settings}, is off by\n"
        f"{100 * speed:.1f} points of the throughput relative to now and {preempted:.3f} preemptions per request "
        "(root mean square)."
    )


def summary(rows: Sequence[Row], further: Sequence[Row]) -> str:
    """The distributions."""
    lines = [
        "| choice made from | as good as wanted | throughput: lowest, median | preemptions left: median, highest |",
        "|---|---|---|---|",
    ]
    for name, of, choices in (
        ("the true requests", rows, [row.from_requests for row in rows]),
        ("/metrics pages alone", rows, [row.from_pages for row in rows]),
        ("the true requests, drawn anew", further, [row.from_requests for row in further]),
        ("/metrics pages alone, drawn anew", further, [row.from_pages for row in further]),
    ):
        speeds = sorted(choice.throughput_ratio for choice in choices)
        left = sorted(
            choice.result.preemptions / row.truth.now.preemptions
            for choice, row in zip(choices, of, strict=True)
            if row.truth.now.preemptions > 0.02 * len(row.case.requests)
        )
        good = sum(choice.is_good for choice in choices)
        lines.append(
            f"| {name} | {good} of {len(of)} | {speeds[0]:.1%}, {_median(speeds):.1%} "
            f"| {_median(left):.1%}, {left[-1]:.1%} |"
        )
    return "\n".join(lines)


def missed(further: Sequence[Row]) -> str:
    """The rows with a miss among the workloads drawn anew."""
    misses = [row for row in further if not (row.from_requests.is_good and row.from_pages.is_good)]
    return f"The misses among the {len(further)} workloads drawn anew:\n\n{table(misses)}"


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| workload | now | best | from the true requests | from pages |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        truth = row.truth
        cells = [
            row.case.name,
            f"{truth.now.preemptions} at {truth.throughput_ratio(truth.now):.1%}",
            _cell(truth.best.settings, truth.best.result, truth),
            _cell(row.from_requests.settings, row.from_requests.result, truth, good=row.from_requests.is_good),
            _cell(row.from_pages.settings, row.from_pages.result, truth, good=row.from_pages.is_good),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(settings: SchedulerSettings, result: SimulationResult, truth: Truth, *, good: bool = True) -> str:
    flags = f"{settings.max_num_seqs}, {settings.watermark:g}"
    text = f"{result.preemptions} at {truth.throughput_ratio(result):.1%} ({flags})"
    return text if good else f"**{text}**"


def _median(values: Sequence[float]) -> float:
    middle = len(values) / 2
    return (values[math.floor(middle - 0.5)] + values[math.ceil(middle - 0.5)]) / 2


if __name__ == "__main__":
    sys.exit(main())
