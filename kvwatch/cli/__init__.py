"""The command line: thin shells over the core, and the one place where errors become text and exit codes.

Exit codes: 0 clean, 1 found at or above --fail-on, 2 broken (bad input, nothing to read), 130 interrupted.
"""

import importlib
import sys
from typing import Any

import click

from kvwatch import __version__
from kvwatch.errors import KvwatchError

# Command -> what --help says. The module is kvwatch.cli.<command>; it is imported when the command runs.
COMMANDS: tuple[tuple[str, str], ...] = (
    ("budget", "KV-cache budget of a model with vLLM flags on a GPU: blocks, tokens, concurrency"),
    ("check", "Judge engines: what is wrong, with the evidence"),
    ("recommend", "Judge engines and say what to change, with numbers: now, and at the next rollout"),
    ("simulate", "Play a workload through vLLM's scheduler under other settings"),
    ("record", "Save a server's metrics pages for later or for a colleague"),
    ("agent", "Watch engines all day: metrics, report, alerts"),
    ("generate", "Write the alert rules and reference pages"),
    ("explain", "Print the runbook page of a check"),
    ("demo", "Everything on this machine, on a recorded engine: no GPU, no vLLM"),
)


class LazyGroup(click.Group):
    """Imports a command's module only when that command is asked for, and turns KvwatchError into exit code 2."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return [name for name, _ in COMMANDS]

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in dict(COMMANDS):
            return None
        command = importlib.import_module(f"kvwatch.cli.{cmd_name}").command
        return command if isinstance(command, click.Command) else None

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(COMMANDS)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KvwatchError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(2)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "KVWATCH", "max_content_width": 100},
)
@click.version_option(__version__, prog_name="kvwatch")
def cli() -> None:
    """KV-cache budget, diagnosis and settings for vLLM.

    stdout is the result, stderr is talk. Exit code 0: clean, 1: found something, 2: broken.
    Every option can be given as an environment variable, for example KVWATCH_CHECK_WINDOW=30s.
    """


def main() -> None:
    """The entry point."""
    try:
        outcome = cli(standalone_mode=False)  # an exit code where a command left with one
        sys.exit(outcome if isinstance(outcome, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        sys.exit(130)
