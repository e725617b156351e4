"""`kvwatch agent`: the sidecar."""

import logging
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from kvwatch.agent import Agent
from kvwatch.capacity import EngineFacts
from kvwatch.cli.engine_flags import Given, engine_facts, engine_flags, given
from kvwatch.cli.not_empty import PathName
from kvwatch.cli.options import DURATION, HEADER, headers_from
from kvwatch.cli.vllm_flags import EngineCommand
from kvwatch.config import Config, OptionKind, listen_address, read_config
from kvwatch.server import Board, Server
from kvwatch.thresholds import DEFAULTS
from kvwatch.window import Window

DEFAULT_LISTEN = "127.0.0.1:9109"
STOP_SECONDS = 1.0
_LIMITS = "kvwatch.limits"


def _use_file(ctx: click.Context, _param: click.Parameter, path: Path | None) -> None:
    """Make the file's values the defaults of the options, so that flags and the environment win over them."""
    if path is None:
        return
    kinds = {
        param.name: OptionKind(
            convert=_converter(ctx, param),
            is_list=param.multiple,
            is_flag=param.is_flag,
        )
        for param in ctx.command.params
        if isinstance(param, click.Option) and param.name and param.name not in {"config", "help"}
    }
    settings = read_config(path, kinds)
    ctx.default_map = {**(ctx.default_map or {}), **settings.options}
    ctx.meta[_LIMITS] = settings.limits


def _converter(ctx: click.Context, param: click.Option) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        try:
            return param.type.convert(value, param, ctx)
        except click.BadParameter as error:
            raise ValueError(error.message) from error

    return convert


@click.command("agent", cls=EngineCommand)
@click.option(
    "--config",
    type=PathName(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_use_file,
    help="YAML file whose keys are the names of these options.",
)
@click.option("--target", multiple=True, metavar="URL", help="A vLLM server, http://HOST:8000. May be given again.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=DEFAULT_LISTEN,
    show_default=True,
    help="Where to serve the page, /metrics, /api/v1/report, /healthz and /readyz. There is no login: "
    "0.0.0.0:9109 opens them to everybody who reaches this host.",
)
@click.option("--interval", type=DURATION, default="5s", show_default=True, help="Time between two scrapes.")
@click.option("--window", type=DURATION, default="60s", show_default=True, help="Span that rates are taken over.")
@click.option(
    "--header", multiple=True, type=HEADER, metavar="'NAME: VALUE'", help="Send this header with every scrape."
)
@click.option(
    "--alertmanager", multiple=True, metavar="URL", help="Send alerts to this Alertmanager. May be given again."
)
@click.option(
    "--for",
    "for",
    type=DURATION,
    help="How long a condition holds before its alert fires. "
    f"Default: {DEFAULTS.alert_critical_for_seconds:.0f}s critical, {DEFAULTS.alert_for_seconds:.0f}s warning.",
)
@click.option(
    "--down-for",
    type=DURATION,
    default="5m",
    show_default=True,
    help="How long a target cannot be read before its alert fires; a rollout takes minutes.",
)
@click.option(
    "--keep-firing-for",
    type=DURATION,
    help="How long a condition is gone before its alert is resolved. "
    f"Default: {DEFAULTS.alert_critical_keep_firing_seconds:.0f}s critical, "
    f"{DEFAULTS.alert_keep_firing_seconds:.0f}s warning.",
)
@engine_flags
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
    """Watch vLLM servers until stopped: scrape, judge, serve the report and metrics, send alerts.

    Settings come from flags, else from KVWATCH_AGENT_* variables, else from --config, else from the defaults.
    Firing alerts end by themselves within 30 s (or three intervals) after the agent is stopped.
    """
    host, port = listen_address(options.pop("listen"))
    config = Config(
        targets=tuple(options.pop("target")),
        host=host,
        port=port,
        interval_seconds=options.pop("interval"),
        window_seconds=options.pop("window"),
        headers=headers_from(tuple(options.pop("header"))),
        alertmanagers=tuple(options.pop("alertmanager")),
        for_seconds=options.pop("for"),
        down_for_seconds=options.pop("down_for"),
        keep_firing_seconds=options.pop("keep_firing_for"),
        limits=ctx.meta.get(_LIMITS, DEFAULTS),
    )
    _run(config, given(ctx, options))


def signals(*numbers: signal.Signals) -> "queue.SimpleQueue[int]":
    """Where these signals arrive from now on. Call it in the main thread.

    A handler runs between any two steps of the main thread, so it may take no lock that the main thread can hold:
    Event.set has one, which Event.wait holds for a moment, and then neither goes on. SimpleQueue.put has none.
    """
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in numbers:
        signal.signal(number, lambda got, _frame: arrived.put(got))
    return arrived


def _run(config: Config, flags: Given) -> None:
    """Serve and watch until SIGTERM or Ctrl-C; then return within about a second."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    stop = threading.Event()
    asked_to_stop = signals(signal.SIGTERM, signal.SIGINT)

    # The one place where the vLLM flags of the command line meet what the engines tell.
    def facts_of(made: Iterable[Window], told: Mapping[str, EngineFacts]) -> Mapping[str, EngineFacts]:
        return engine_facts(made, told, flags)

    board = Board(interval_seconds=config.interval_seconds)
    agent = Agent(config, facts_of=facts_of, board=board)
    server = Server(board, host=config.host, port=config.port)
    server.start()
    click.echo(f"watching {', '.join(config.targets)}; the report is at {server.url}", err=True)
    rounds = threading.Thread(target=agent.run, args=(stop,), name="rounds", daemon=True)
    rounds.start()
    asked_to_stop.get()
    stop.set()
    server.stop()
    rounds.join(STOP_SECONDS)
