"""`kvwatch demo`: the agent on a recorded engine, until the verdict and beyond."""

import logging
import shlex
import shutil
import signal
import sys
import threading
from pathlib import Path

import click

from kvwatch.agent import Agent
from kvwatch.checks import metrics_missing
from kvwatch.cli.engine_flags import NOTHING_GIVEN, engine_facts
from kvwatch.cli.options import terminal_width, wants_colour
from kvwatch.config import Config, listen_address
from kvwatch.demo import RecordedEngine, load_recording
from kvwatch.errors import SourceError
from kvwatch.finding import Finding, Status, overall
from kvwatch.render.text import report_text
from kvwatch.report import EngineReport, Report
from kvwatch.server import Board, Server

INTERVAL_SECONDS, WINDOW_SECONDS = 2.0, 60.0
# The load of the recording begins after 6 s, and what lasts is judged over 30 s (Thresholds.hold_seconds): before that
# the window holds a mixture of both, and a recommendation from it would be for neither.
RECOMMEND_AT_SECONDS = 38.0
PATIENCE_SECONDS = 60.0


@click.command("demo")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:0",
    show_default="a free port of 127.0.0.1",
    help="Where to serve the page.",
)
@click.option("--exit", "leave", is_flag=True, help="Stop after the recommendation instead of serving until Ctrl-C.")
def command(listen: str, leave: bool) -> None:
    """Run the agent on a recorded vLLM engine that is first fine and then preempts its requests again and again.

    Needs no GPU, no vLLM and no network beyond this machine. The verdict comes after about 20 seconds, what to change
    after 40, when the trouble has lasted long enough to be measured.
    """
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    host, port = listen_address(listen)
    engine = RecordedEngine(load_recording())
    config = Config(
        targets=(engine.url,), host=host, port=port, interval_seconds=INTERVAL_SECONDS, window_seconds=WINDOW_SECONDS
    )
    board = Board(interval_seconds=config.interval_seconds)
    agent = Agent(config, facts_of=lambda made, told: engine_facts(made, told, NOTHING_GIVEN), board=board)
    server = Server(board, host=host, port=port)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    engine.start()
    server.start()
    rounds = threading.Thread(target=agent.run, args=(stop,), name="rounds", daemon=True)
    rounds.start()
    click.echo(f"A recorded vLLM 0.32.0 with a pool of 256 blocks answers at {engine.url}", err=True)
    click.echo(f"kvwatch agent watches it; its page is {server.url}\n", err=True)
    try:
        if _play(board, engine, stop):
            click.echo("\nSimulating the load under other settings ...", err=True)
            _tell(agent.judge(simulate=True))
            if not leave:
                _tell_where(server.url, engine.url)
                stop.wait()
    finally:
        stop.set()
        rounds.join(1.0)
        server.stop()
        engine.stop()


def _play(board: Board, engine: RecordedEngine, stop: threading.Event) -> bool:
    """Tell every round, and the verdict once, until it can be said what to change. False where the user stopped it."""
    told, verdict = 0.0, False
    while not stop.wait(0.1):
        posted = board.latest
        if posted is not None and posted.at_seconds != told:
            told = posted.at_seconds
            click.echo(_line(engine.elapsed_seconds, posted.report.engines[0]), err=True)
            if not verdict and (found := _found(posted.report)):
                verdict = True
                click.echo(f"\n{found.status.value.upper()}  {found.check}: {found.summary}\n")
            if verdict and engine.elapsed_seconds >= RECOMMEND_AT_SECONDS:
                return True
        if engine.elapsed_seconds > PATIENCE_SECONDS:
            raise SourceError(f"no verdict after {PATIENCE_SECONDS:.0f} s; is this machine overloaded? Try again")
    return False


def _found(judged: Report) -> Finding | None:
    """What is critical about the recorded engine. A scrape that fails, as on an overloaded machine, is not it."""
    findings = judged.engines[0].findings
    return next((f for f in findings if f.status is Status.CRITICAL and f.check != metrics_missing.CHECK.id), None)


def _line(elapsed_seconds: float, engine: EngineReport) -> str:
    seen = engine.observed
    status = overall([finding.status for finding in engine.findings])
    words = [f"{elapsed_seconds:5.0f} s  {status.value:<8}"]
    if "running_requests" in seen:
        words.append(f"running {seen['running_requests']:3.0f}  waiting {seen['waiting_requests']:3.0f}")
        words.append(f"KV cache {seen['kv_cache_usage_ratio']:4.0%} held")
    if "preemptions_per_second" in seen:
        words.append(f"{seen['preemptions_per_second']:.2f} preemptions/s")
    return "  ".join(words)


def program() -> str:
    """What runs kvwatch in another terminal: its name where it is on PATH, else as this Python can run it."""
    if shutil.which("kvwatch"):
        return "kvwatch"
    beside = Path(sys.executable).with_name("kvwatch")
    return shlex.quote(str(beside)) if beside.exists() else f"{shlex.quote(sys.executable)} -m kvwatch"


def _tell(judged: Report) -> None:
    click.echo(report_text(judged, width=terminal_width(), colour=wants_colour(), recommendations_first=True))


def _tell_where(page_url: str, engine_url: str) -> None:
    click.echo(f"\nThe page:        {page_url}", err=True)
    click.echo(f"Its metrics:     {page_url}/metrics", err=True)
    click.echo(f"The same, once:  {program()} recommend {engine_url}", err=True)
    click.echo("Ctrl-C ends it.", err=True)
