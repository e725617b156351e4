"""`kvwatch simulate`: the options table of a workload under other settings."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import click

from kvwatch.cli.options import output_option, terminal_width
from kvwatch.errors import SettingError
from kvwatch.objective import OBJECTIVES, Objective, Option, choose
from kvwatch.render.data import to_json, to_yaml
from kvwatch.render.simulation import Comparison, simulation_data, simulation_text
from kvwatch.simulation import SchedulerSettings, Workload
from kvwatch.simulator import simulate
from kvwatch.sources.workload_files import read_workload
from kvwatch.versions import parse_version
from kvwatch.workload_spec import check_supported

MAX_OPTIONS = 10_000


def _values(number: Callable[[str], float], what: str) -> Callable[..., tuple[float, ...] | None]:
    """`16,32,64` -> numbers, each once, in the order given."""

    def parse(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[float, ...] | None:
        if text is None:
            return None
        try:
            found = tuple(dict.fromkeys(number(part) for part in text.split(",") if part.strip()))
        except ValueError as error:
            raise click.BadParameter(f"{text!r}: {error}; it takes {what} separated by commas, like 16,32") from error
        if not found:
            raise click.BadParameter(f"{text!r} has no values; it takes {what} separated by commas, like 16,32")
        return found

    return parse


_INTEGERS = _values(int, "whole numbers")
_RATIOS = _values(float, "shares")


@click.command("simulate")
@click.option(
    "--workload",
    "workload_name",
    required=True,
    metavar="FILE|NAME",
    help="A workload file (YAML or JSON), or the built-in long-context-trap.",
)
@click.option("--max-num-seqs", callback=_INTEGERS, metavar="N,N...", help="Values to try. [default: the workload's]")
@click.option("--watermark", callback=_RATIOS, metavar="X,X...", help="Values to try. [default: the workload's]")
@click.option(
    "--max-num-batched-tokens", callback=_INTEGERS, metavar="N,N...", help="Values to try. [default: the workload's]"
)
@click.option(
    "--num-gpu-blocks", callback=_INTEGERS, metavar="N,N...", help="Pool sizes to try. [default: the workload's]"
)
@click.option(
    "--objective",
    type=click.Choice(OBJECTIVES),
    default="balanced",
    show_default=True,
    help="balanced: fewest preemptions at 97% of the best throughput. stability: best throughput with at most 0.02 "
    "preemptions per request. latency: lowest TTFT p99 at 97% of the best throughput.",
)
@output_option("text", "json", "yaml")
def command(workload_name: str, objective: Objective, output: str, **values: tuple[float, ...] | None) -> None:
    """Play a workload through vLLM's scheduler under every combination of the settings given, and choose one.

    The scheduler's decisions are vLLM's own, step for step; the workload's cost model says how long a step takes.
    """
    notes: list[str] = []
    workload = read_workload(workload_name, notes=notes)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    comparison = compare(workload, workload_name, objective, {k: v for k, v in values.items() if v is not None})
    if output == "text":
        click.echo(simulation_text(comparison, width=terminal_width()))
    else:
        data = simulation_data(comparison)
        click.echo(to_json(data) if output == "json" else to_yaml(data))


def compare(workload: Workload, name: str, objective: Objective, values: dict[str, tuple[float, ...]]) -> Comparison:
    """Simulate the cross product of `values`, setting -> what to try, and the workload's own engine."""
    count = 1
    for tried in values.values():
        count *= len(tried)
    if count > MAX_OPTIONS:
        raise SettingError(f"{count} combinations are too many to simulate (at most {MAX_OPTIONS}); try fewer values.")
    if any(values.get("watermark", ())) and workload.vllm_version is not None:
        check_supported("watermark", parse_version(workload.vllm_version))
    current = _simulated(workload, workload.engine)
    options = tuple(
        current if settings == workload.engine else _simulated(workload, settings)
        for settings in _cross_product(workload.engine, values)
    )
    return Comparison(
        name=name,
        workload=workload,
        objective=objective,
        current=current,
        options=options,
        chosen=choose(options, objective, workload.engine),
    )


def _cross_product(engine: SchedulerSettings, values: dict[str, tuple[float, ...]]) -> Sequence[SchedulerSettings]:
    return [
        replace(engine, **dict(zip(values, combination, strict=True)))  # type: ignore[arg-type]  # names are fields
        for combination in itertools.product(*values.values())
    ]


def _simulated(workload: Workload, settings: SchedulerSettings) -> Option:
    result = simulate(settings, workload.cost, workload.requests, workload.clients, retry=workload.retry)
    return Option(settings=settings, result=result)
