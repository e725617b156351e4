"""`kvwatch budget`: what the KV cache of a model costs and holds, before anything runs."""

import re
from collections.abc import Mapping
from typing import Any

import click

from kvwatch.budget_report import BudgetReport, budget_report
from kvwatch.cli.kv_memory import kv_memory
from kvwatch.cli.vllm_flags import EngineCommand, engine_request, vllm_flags
from kvwatch.demand import Arrivals, arrivals
from kvwatch.errors import SettingError
from kvwatch.model import read_model
from kvwatch.sources.model_files import load_model
from kvwatch.vllm_args import left_out, whole_number

_MIX = re.compile(r"\s*([\d._,]+[kKmM]?)\s*[x×:*]\s*(\d+)\s*")


class _Count(click.ParamType):  # type: ignore[type-arg]  # generic in click's newest releases only
    """8192, 8k, 8K."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return whole_number(str(value))
        except ValueError:
            self.fail(f"{value!r} is not a whole number (8192, 8k = 8000, 8K = 8192)", param, ctx)


@click.command("budget", cls=EngineCommand)
@vllm_flags
@click.option(
    "--context", "contexts", type=_Count(), multiple=True, metavar="TOKENS", help="A context length; repeatable."
)
@click.option(
    "--concurrency", "concurrencies", type=_Count(), multiple=True, metavar="N", help="Users at once; repeatable."
)
@click.option("--mix", multiple=True, metavar="TOKENSxN", help="N requests of TOKENS among unequal ones; repeatable.")
@click.option("--arrival-rate", type=float, metavar="R", help="Requests per second, with --response-time.")
@click.option("--response-time", type=float, metavar="S", help="Seconds from arrival to the last token.")
@click.option("--retry-ratio", type=float, default=0.0, metavar="Q", help="Share of attempts that clients repeat.")
@click.option("--explain", is_flag=True, help="Every step, with its rule in vLLM's source.")
@click.option(
    "--output", "-o", type=click.Choice(("text", "json", "yaml")), default="text", show_default=True, help="Format."
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    contexts: tuple[int, ...],
    concurrencies: tuple[int, ...],
    mix: tuple[str, ...],
    arrival_rate: float | None,
    response_time: float | None,
    retry_ratio: float,
    explain: bool,
    output: str,
    **options: Any,
) -> None:
    """KV-cache budget of a model: bytes per token, blocks, concurrency, and whether it fits.

    \b
    kvwatch budget --model meta-llama/Llama-3.1-70B --gpu H100 -tp 4
    kvwatch budget --model config.json --kv-cache-memory-bytes 40GiB
    kvwatch budget --gpu H100 --vllm-args "serve Qwen/Qwen3-32B -tp 2"

    Exit code 0: fits, or the memory is not known. 1: vLLM would refuse to start, or a load given does not fit.
    """
    request = engine_request(ctx, options)
    if request.model is None:
        raise SettingError("no model: give --model with a config.json, its folder or a known name, or --vllm-args")
    files = load_model(request.model)
    model = read_model(files.config, name=files.name)
    report = budget_report(
        model,
        request.engine,
        kv_memory(request.engine, files, model),
        contexts=contexts,
        concurrencies=concurrencies,
        mixed=[_mixed(text) for text in mix],
        load=_arrivals(arrival_rate, response_time, retry_ratio),
        memory_for=lambda engine: kv_memory(engine, files, model),
    )
    click.echo(_rendered(report, output, explain=explain))
    if request.ignored:
        click.echo(left_out(request.ignored), err=True)
    overflows = (contexts or concurrencies) and any(row.fits is False for row in report.table)
    if report.fits is False or overflows or (report.mix is not None and report.mix.fits is False):
        ctx.exit(1)


def _mixed(text: str) -> tuple[int, int]:
    found = _MIX.fullmatch(text)
    if found is None:
        raise SettingError(f"--mix {text!r} is not TOKENSxN, such as 64000x1 or 2kx50")
    return whole_number(found[1]), int(found[2])


def _arrivals(rate: float | None, response_time: float | None, retry_ratio: float) -> Arrivals | None:
    if rate is None and response_time is None and not retry_ratio:
        return None
    if rate is None or response_time is None:
        raise SettingError("--arrival-rate and --response-time belong together: in flight = rate × response time")
    return arrivals(arrival_rate=rate, response_time=response_time, retry_ratio=retry_ratio)


def _rendered(report: BudgetReport, output: str, *, explain: bool) -> str:
    if output == "text":
        from kvwatch.cli.options import terminal_width, wants_colour
        from kvwatch.render.budget_text import budget_text

        return budget_text(report, width=terminal_width(), colour=wants_colour(), explain=explain)
    from kvwatch.render.budget_data import budget_document

    document: Mapping[str, Any] = budget_document(report, explain=explain)
    if output == "json":
        import json

        return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True)).rstrip("\n")
