"""`kvwatch simulate`: the options table of a workload under other settings.

What --workload means is told by its form alone, in this order: the name of a built-in workload; `-`, an address with
`://`, a folder or a file named *.prom is a SOURCE as `kvwatch check` takes it; anything else is a workload file.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvwatch.cli.options import output_option, sampling_options, terminal_width
from kvwatch.cli.output import write_result
from kvwatch.cli.vllm_flags import engine_options
from kvwatch.errors import SettingError
from kvwatch.flag_releases import check_supported
from kvwatch.objective import OBJECTIVES, Objective, Option, choose
from kvwatch.render.data import to_json, to_yaml
from kvwatch.render.simulation import Comparison, simulation_data, simulation_text
from kvwatch.simulation import SchedulerSettings, Workload
from kvwatch.simulator import simulate
from kvwatch.sources.workload_files import BUILT_IN, read_workload
from kvwatch.versions import parse_version

if TYPE_CHECKING:  # a workload file needs no source
    from kvwatch.settings_now import Assumption

MAX_OPTIONS = 10_000
PAGE_SUFFIX = ".prom"
_OF_SOURCES = (
    "window_seconds", "headers", "engine", "model_name",
    "model", "gpu", "gpu_memory_gib", "vllm_version", "vllm_args", "vllm_args_file",
)  # fmt: skip


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
    metavar="FILE|NAME|SOURCE",
    help="A workload file (YAML or JSON), the built-in long-context-trap, or an engine whose load is reconstructed.",
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
@click.option("--engine", metavar="ID", help="Of a SOURCE with several engines: the one with this engine label.")
@click.option("--model-name", metavar="NAME", help="Of a SOURCE with several engines: the one that serves this model.")
@sampling_options
@engine_options
@output_option("text", "json", "yaml", "html")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    workload_name: str,
    objective: Objective,
    output: str,
    max_num_seqs: tuple[float, ...] | None,
    watermark: tuple[float, ...] | None,
    max_num_batched_tokens: tuple[float, ...] | None,
    num_gpu_blocks: tuple[float, ...] | None,
    **of_source: Any,
) -> None:
    """Play a workload through vLLM's scheduler under every combination of the settings given, and choose one.

    The scheduler's decisions are vLLM's own, step for step; the workload's cost model says how long a step takes.

    SOURCE is what `kvwatch check` takes: an address with ://, a capture folder, a page named *.prom, or - for standard
    input. Its load is reconstructed as `kvwatch recommend` does it. What no page shows, say with --vllm-args: how the
    engine was started. Options from --engine to --vllm-args-file are for a SOURCE only.
    """
    values = {
        "max_num_seqs": max_num_seqs,
        "watermark": watermark,
        "max_num_batched_tokens": max_num_batched_tokens,
        "num_gpu_blocks": num_gpu_blocks,
    }
    name, workload, assumptions, notes = _workload(ctx, workload_name, of_source, with_watermark=any(watermark or ()))
    for note in notes:
        click.echo(f"note: {note}", err=True)
    comparison = compare(workload, name, objective, {k: v for k, v in values.items() if v is not None}, assumptions)
    write_result(render(comparison, output))


def is_source(name: str) -> bool:
    """Whether --workload names an engine to look at, rather than a workload that is written down."""
    if name in BUILT_IN:
        return False
    if name == "-" or "://" in name or name.endswith(PAGE_SUFFIX):
        return True
    try:
        return Path(name).is_dir()
    except OSError:  # no name that a file can have; reading it says why
        return False


def _workload(
    ctx: click.Context, name: str, of_source: dict[str, Any], *, with_watermark: bool
) -> "tuple[str, Workload, tuple[Assumption, ...], Sequence[str]]":
    """Its name, the workload, what it rests on where it was reconstructed, and what was left out."""
    if is_source(name):
        from kvwatch.cli.observed_load import observed_load

        own = {key: of_source.pop(key) for key in ("window_seconds", "headers", "engine", "model_name")}
        load = observed_load(ctx, name, told=of_source, with_watermark=with_watermark, **own)
        return load.name, load.workload, load.assumptions, load.notes
    typed = [key for key in _OF_SOURCES if ctx.get_parameter_source(key) is ParameterSource.COMMANDLINE]
    if typed:
        flags = ", ".join(max(p.opts, key=len) for p in ctx.command.params if p.name in typed)
        raise SettingError(
            f"{flags}: only for a --workload that is a SOURCE (an address with ://, a capture folder, a page named "
            f"*{PAGE_SUFFIX}, or -); {name} is read as a workload file, which has its own engine and requests."
        )
    notes: list[str] = []
    return name, read_workload(name, notes=notes), (), notes


def render(comparison: Comparison, output: str) -> str:
    if output == "text":
        return simulation_text(comparison, width=terminal_width())
    if output == "html":
        from kvwatch.render.simulation_html import ChartLibrary, simulation_html

        folder = resources.files("kvwatch").joinpath("data/uplot")
        script, style, licence = (
            folder.joinpath(name).read_text("utf-8") for name in ("uPlot.iife.min.js", "uPlot.min.css", "LICENSE")
        )
        return simulation_html(comparison, ChartLibrary(script=script, style=style, licence=licence))
    data = simulation_data(comparison)
    return to_json(data) if output == "json" else to_yaml(data)


def compare(
    workload: Workload,
    name: str,
    objective: Objective,
    values: dict[str, tuple[float, ...]],
    assumptions: "tuple[Assumption, ...]" = (),
) -> Comparison:
    """Simulate the cross product of `values`, setting -> what to try, and the workload's own engine."""
    count = 1
    for tried in values.values():
        count *= len(tried)
    if count > MAX_OPTIONS:
        raise SettingError(f"{count} combinations are too many to simulate (at most {MAX_OPTIONS}); try fewer values.")
    if any(values.get("watermark", ())) and workload.vllm_version is not None:
        check_supported(
            "watermark",
            parse_version(workload.vllm_version),
            said=f"--watermark is {', '.join(f'{share:g}' for share in values['watermark'])}",
            remedy="Leave it out, or name a later release: engine.vllm_version of a file, --vllm-version of a SOURCE.",
        )
    current = _simulated(workload, workload.engine)
    options = tuple(
        current if settings == workload.engine else _simulated(workload, settings)
        for settings in _cross_product(workload.engine, values)
    )
    # The present settings are always one of the choices: a change that gives nothing is none to make.
    choices = options if current in options else (current, *options)
    return Comparison(
        name=name,
        workload=workload,
        objective=objective,
        current=current,
        options=options,
        chosen=choose(choices, objective, workload.engine),
        assumptions=assumptions,
    )


def _cross_product(engine: SchedulerSettings, values: dict[str, tuple[float, ...]]) -> Sequence[SchedulerSettings]:
    return [
        replace(engine, **dict(zip(values, combination, strict=True)))  # type: ignore[arg-type]  # names are fields
        for combination in itertools.product(*values.values())
    ]


def _simulated(workload: Workload, settings: SchedulerSettings) -> Option:
    result = simulate(settings, workload.cost, workload.requests, workload.clients, retry=workload.retry)
    return Option(settings=settings, result=result)
