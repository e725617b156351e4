"""`kvwatch generate`: alert rules, dashboards and reference pages, written or compared with what is there."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from kvwatch.errors import SettingError, SourceError
from kvwatch.files import bounded_text
from kvwatch.thresholds import DEFAULTS, Thresholds

RULES_FILE = "alerts/kvwatch.rules.yaml"
DASHBOARDS_FOLDER = "dashboards"
DOCS_FOLDER = "docs"
HELP_WIDTH = 100
MAX_FILE_BYTES = 16 * 1024 * 1024  # the largest that this command writes has 130 KB

_check = click.option("--check", is_flag=True, help="Write nothing; name the files that are stale and exit 1.")
_changes = click.option(
    "--threshold",
    "changes",
    multiple=True,
    metavar="NAME=VALUE",
    help="Another value for a threshold, for example kv_cache_saturated_ratio=0.98.",
)


@click.group("generate")
def command() -> None:
    """Write what follows from the checks and thresholds: alert rules, dashboards and reference pages."""


@command.command("rules")
@_check
@click.option(
    "--output",
    "-o",
    default=RULES_FILE,
    show_default=True,
    metavar="FILE",
    help="File to write; - for standard output.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(("prometheus", "prometheusrule")),
    default="prometheus",
    show_default=True,
    help="A rule file of Prometheus, or a PrometheusRule resource of the Prometheus operator.",
)
@_changes
@click.pass_context
def rules_command(ctx: click.Context, *, check: bool, output: str, kind: str, changes: tuple[str, ...]) -> None:
    """Write recording and alert rules for Prometheus."""
    from kvwatch.generate import rules

    make = rules.rule_file if kind == "prometheus" else rules.prometheus_rule
    text = rules.to_yaml(make(thresholds(changes)))
    if output == "-" and not check:
        click.echo(text, nl=False)
        return
    _settle(ctx, {Path(output): text}, gone=(), check=check)


@command.command("dashboards")
@_check
@click.option(
    "--output", "-o", default=DASHBOARDS_FOLDER, show_default=True, metavar="DIR", help="Folder to write into."
)
@_changes
@click.pass_context
def dashboards_command(ctx: click.Context, *, check: bool, output: str, changes: tuple[str, ...]) -> None:
    """Write the Grafana dashboards: fleet, engine, incident timeline."""
    from kvwatch.generate.dashboards import dashboards

    folder = Path(output)
    files = {folder / name: text for name, text in dashboards(thresholds(changes)).items()}
    _settle(ctx, files, gone=(), check=check)


@command.command("reference")
@_check
@click.option("--output", "-o", default=DOCS_FOLDER, show_default=True, metavar="DIR", help="Folder to write into.")
@click.pass_context
def reference_command(ctx: click.Context, *, check: bool, output: str) -> None:
    """Write the pages about checks, thresholds, metrics and commands."""
    from kvwatch.generate import reference

    folder = Path(output)
    files = {folder / path: text for path, text in reference.reference_files(help_texts()).items()}
    written = {path.parent for path in files}
    gone = [
        path
        for parent in sorted(written)
        for path in sorted(parent.glob("*.md"))
        if path not in files and _read(path).startswith(reference.MARK)
    ]
    _settle(ctx, files, gone=gone, check=check)


def thresholds(changes: tuple[str, ...]) -> Thresholds:
    """`NAME=VALUE` texts -> Thresholds. Raises SettingError for what is no threshold or no number."""
    kinds = {field.name: type(getattr(DEFAULTS, field.name)) for field in fields(Thresholds)}
    values: dict[str, Any] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in kinds:
            raise SettingError(f"--threshold {change}: there is no threshold {name!r}; there are: {', '.join(kinds)}")
        try:
            values[name] = kinds[name](value)
        except ValueError as error:
            raise SettingError(f"--threshold {change}: {value!r} is not a number") from error
        if not 0 <= values[name] < 1e9:
            raise SettingError(f"--threshold {change}: {value} is not a number from 0 upwards")
    return replace(DEFAULTS, **values)


def help_texts() -> dict[str, str]:
    """Command with all its words -> its --help, for every command and subcommand."""
    from kvwatch.cli import COMMANDS, cli

    texts: dict[str, str] = {}

    def add(command: click.Command, words: str, parent: click.Context | None) -> None:
        context = click.Context(command, info_name=words.rpartition(" ")[2], parent=parent)
        context.terminal_width = context.max_content_width = HELP_WIDTH
        texts[words] = command.get_help(context)
        if not isinstance(command, click.Group):
            return
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None:
                add(child, f"{words} {name}", context)

    context = click.Context(cli, info_name="kvwatch", **cli.context_settings)
    context.terminal_width = HELP_WIDTH
    texts["kvwatch"] = cli.get_help(context)
    for name, _ in COMMANDS:
        if importlib.util.find_spec(f"kvwatch.cli.{name}"):
            child = cli.get_command(context, name)
            if child is not None:
                add(child, f"kvwatch {name}", context)
    return texts


def _settle(ctx: click.Context, files: Mapping[Path, str], *, gone: Sequence[Path], check: bool) -> None:
    """Write what differs and remove what is gone; with `check`, name both and leave with 1."""
    stale = [path for path, text in files.items() if _read(path) != text]
    if check:
        for path in (*stale, *gone):
            click.echo(f"stale: {path}")
        if not stale and not gone:
            click.echo(f"{len(files)} files are fresh" if len(files) > 1 else "the file is fresh", err=True)
        ctx.exit(1 if stale or gone else 0)
    try:
        for path in stale:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
            click.echo(f"wrote {path}", err=True)
        for path in gone:
            path.unlink()
            click.echo(f"removed {path}", err=True)
    except OSError as error:
        raise SettingError(f"{error.filename}: {error.strerror}; give another --output") from error


def _read(path: Path) -> str:
    """The file's text; empty where there is none."""
    try:
        return bounded_text(path, limit_bytes=MAX_FILE_BYTES)
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError, SourceError) as error:
        raise SettingError(f"{path}: cannot be read ({error}); give another --output") from error
