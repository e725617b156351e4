"""`kvwatch recommend`: what to change, now and at the next rollout."""

from typing import Any

import click

from kvwatch.cli.judge import judge, judging_options
from kvwatch.cli.vllm_flags import EngineCommand


@click.command("recommend", cls=EngineCommand)
@judging_options("args")
@click.option(
    "--objective",
    type=click.Choice(("balanced", "stability", "latency")),
    default="balanced",
    show_default=True,
    help="What settings are chosen for: few preemptions at full throughput, next to none, or early first tokens.",
)
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Judge the engines behind SOURCE... and say what to change: first what needs no restart, then the flags.

    Where requests are preempted or held back, the load is reconstructed from the window and simulated under other
    settings; a longer --window makes that more exact.

    --output args prints the flags alone, one line per engine, to be pasted into its command line.

    SOURCE is a vLLM server (http://HOST:8000), a saved metrics page, a capture folder, - for standard input, or
    prometheus+http://HOST:9090?selector={...} for engines behind Prometheus, Thanos, Mimir or VictoriaMetrics.
    """
    judge(ctx, recommendations_first=True, **options)
