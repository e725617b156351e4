"""What `check` and `recommend` share: read the sources, make the report, print it, choose the exit code."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kvwatch.cli.engine_flags import engine_facts, engine_flags, given
from kvwatch.cli.options import Progress, headers_from, output_option, source_options, terminal_width, wants_colour
from kvwatch.cli.output import write_result
from kvwatch.errors import printable
from kvwatch.finding import Status
from kvwatch.render import data
from kvwatch.report import Report, report
from kvwatch.sources import parse
from kvwatch.sources.gather import HISTORY_SECONDS, Gathered, gather
from kvwatch.window import windows

if TYPE_CHECKING:  # a check does not load the simulator
    from kvwatch.objective import Objective

FAIL_ON = {"warning": Status.WARNING, "critical": Status.CRITICAL}


def judging_options(*more_formats: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Every option that `check` and `recommend` share; `more_formats` are those of one of them."""
    fail_on = click.option(
        "--fail-on",
        type=click.Choice(tuple(FAIL_ON)),
        default="warning",
        show_default=True,
        help="Exit 1 if a finding is at least this bad.",
    )
    output = output_option("text", "json", "yaml", "html", *more_formats)
    return lambda command: source_options(engine_flags(fail_on(output(command))))


def judge(
    ctx: click.Context,
    *,
    recommendations_first: bool,
    sources: tuple[str, ...],
    window_seconds: float,
    headers: tuple[str, ...],
    fail_on: str,
    output: str,
    objective: "Objective | None" = None,
    **flags: Any,
) -> None:
    """Gather, report, render. Leaves with 2 if a source gave nothing, with 1 if a finding is bad enough.

    With an objective, settings for engines in trouble are simulated and it chooses among them.
    """
    told = given(ctx, flags)
    found = read_sources(ctx, sources, window_seconds=window_seconds, headers=headers)
    made = windows(found.snapshots)
    judged = report(
        made,
        facts=engine_facts(made, found.facts, told),
        notes=(*found.notes, *found.failures),
        simulate=objective is not None,
        objective=objective or "balanced",
    )
    write_result(rendered := render(judged, output, recommendations_first=recommendations_first))
    if not rendered:
        click.echo("No flag is proposed for the next rollout; --output text says why.", err=True)
    for failure in found.failures:
        click.echo(f"Error: {printable(failure)}", err=True)
    if found.failures:
        ctx.exit(2)
    if judged.worst.rank >= FAIL_ON[fail_on].rank:
        ctx.exit(1)


def read_sources(
    ctx: click.Context, sources: tuple[str, ...], *, window_seconds: float, headers: tuple[str, ...]
) -> Gathered:
    """SOURCE... as given -> what they gave. Says on stderr that a live one is sampled."""
    parsed = tuple(parse(source) for source in sources)
    is_given = ctx.get_parameter_source("window_seconds") is not click.core.ParameterSource.DEFAULT
    return gather(
        parsed,
        window_seconds=window_seconds,
        history_seconds=window_seconds if is_given and window_seconds > 0 else HISTORY_SECONDS,
        headers=headers_from(headers),
        progress=Progress(", ".join(source.given for source in parsed if source.is_live)),
    )


def render(judged: Report, output: str, *, recommendations_first: bool) -> str:
    if output == "json":
        return data.to_json(data.report_data(judged))
    if output == "yaml":
        return data.to_yaml(data.report_data(judged))
    if output == "html":
        from kvwatch.render.html import report_html

        times = [engine.at_seconds for engine in judged.engines if engine.at_seconds is not None]
        return report_html(judged, at_seconds=max(times, default=None)).rstrip("\n")
    if output == "args":
        from kvwatch.render.args import report_args

        return report_args(judged)
    from kvwatch.render.text import report_text

    return report_text(
        judged, width=terminal_width(), colour=wants_colour(), recommendations_first=recommendations_first
    )
