"""`kvwatch check`: a verdict per engine with its evidence."""

from typing import Any

import click

from kvwatch.cli.judge import judge, judging_options
from kvwatch.cli.vllm_flags import EngineCommand


@click.command("check", cls=EngineCommand)
@judging_options()
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Judge the engines behind SOURCE...

    SOURCE is a vLLM server (http://HOST:8000), a saved metrics page, a capture folder, - for standard input, or
    prometheus+http://HOST:9090?selector={...} for engines behind Prometheus, Thanos, Mimir or VictoriaMetrics.
    """
    judge(ctx, recommendations_first=False, **options)
