"""The command line: thin shells over the core, and the one place where errors become text and exit codes.

Exit codes: 0 clean, 1 found at or above --fail-on, 2 broken (bad input, nothing to read), 130 interrupted.
"""

import importlib
import io
import sys
from typing import Any

import click

from kvwatch import __version__
from kvwatch.cli.not_empty import TEXT
from kvwatch.cli.output import discard, open_what_is_closed
from kvwatch.errors import KvwatchError, printable

# Command -> what --help says. The module is kvwatch.cli.<command>; it is imported when the command runs.
COMMANDS: tuple[tuple[str, str], ...] = (
    ("budget", "KV-cache budget of a model with vLLM flags on a GPU: blocks, tokens, concurrency"),
    ("check", "Judge engines: what is wrong, with the evidence"),
    ("recommend", "Judge engines and say what to change, with numbers: now, and at the next rollout"),
    ("simulate", "Play a workload through vLLM's scheduler under other settings"),
    ("record", "Save a server's metrics pages for later or for a colleague"),
    ("agent", "Watch engines all day: metrics, report, alerts"),
    ("generate", "Write alert rules, dashboards and reference pages"),
    ("lint", "Find mistakes in your own dashboards and alert rules"),
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
        if not isinstance(command, click.Command):
            return None
        _name_variables(command, cmd_name)
        _refuse_empty_text(command)
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(COMMANDS)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KvwatchError as error:
            click.echo(f"Error: {printable(str(error))}", err=True)
            ctx.exit(2)
        except BrokenPipeError:  # whoever read the result has seen enough of it; click would exit with 1, a finding
            discard(sys.stdout)
            ctx.exit(0)


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


def _refuse_empty_text(command: click.Command) -> None:
    """Options without a type of their own take text that is not empty. A SOURCE says for itself what it takes."""
    for child in (command, *getattr(command, "commands", {}).values()):
        for option in child.params:
            if isinstance(option, click.Option) and option.type is click.STRING:
                option.type = TEXT


def _name_variables(command: click.Command, name: str) -> None:
    """Environment variables named as the flags are: --window of `check` is KVWATCH_CHECK_WINDOW."""
    for option in command.params:
        if isinstance(option, click.Option) and option.envvar is None:
            flag = max(option.opts, key=len).lstrip("-")
            option.envvar = f"KVWATCH_{name}_{flag}".replace("-", "_").upper()


def main() -> None:
    """The entry point."""
    open_what_is_closed()
    try:
        code = _run()
    except OSError:  # nothing can be said on stderr; the exit code says it
        discard(sys.stderr)
        code = 2
    sys.exit(code)


def _run() -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a model name the terminal cannot show must not end the command
    try:
        outcome = cli(standalone_mode=False)  # an exit code where a command left with one
        sys.stdout.flush()
        code = outcome if isinstance(outcome, int) else 0
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        code = 130
    except OSError as error:
        click.echo(f"Error: the result cannot be written: {error.strerror or error}", err=True)
        code = 2
        discard(sys.stdout)
    return code
