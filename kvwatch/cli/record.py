"""`kvwatch record`: save a server's pages as a capture."""

import time
from pathlib import Path

import click

from kvwatch.cli.not_empty import PathName
from kvwatch.cli.options import DURATION, HEADER, Progress, headers_from
from kvwatch.errors import KvwatchError, SettingError, SourceError, printable
from kvwatch.exposition import decode, read_samples
from kvwatch.snapshot import snapshots
from kvwatch.sources import parse
from kvwatch.sources.capture import SUFFIX
from kvwatch.sources.scrape import Page, Scraper


@click.command("record")
@click.argument("source")
@click.option("--output", "-o", "folder", type=PathName(path_type=Path), required=True, help="Folder for the pages.")
@click.option("--interval", type=DURATION, default="2s", show_default=True, help="Time between two pages.")
@click.option("--duration", type=DURATION, default="5m", show_default=True, help="How long to record.")
@click.option(
    "--header",
    "headers",
    type=HEADER,
    multiple=True,
    metavar="'NAME: VALUE'",
    help="Send this header with every scrape.",
)
@click.pass_context
def command(
    ctx: click.Context, source: str, folder: Path, interval: float, duration: float, headers: tuple[str, ...]
) -> None:
    """Save the metrics pages of SOURCE (http://HOST:8000) as <unix_ms>.prom files, readable by `kvwatch check FOLDER`.

    The folder holds what the engine's page says: model name, settings, counters. It holds no prompt and no answer.
    """
    parsed = parse(source)
    if parsed.kind != "url":
        raise SettingError(f"{source}: only a server can be recorded; give http://HOST:PORT")
    if interval <= 0:
        raise SettingError("--interval must be above 0, for example 2s")
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pages = sum(1 for path in folder.iterdir() if path.suffix == SUFFIX)
    except OSError as error:
        raise SettingError(f"--output {folder}: {error.strerror}; give a folder that can be written") from error
    if pages:
        raise SettingError(
            f"--output {folder}: it holds {pages} pages already, and two recordings in one folder read as one; "
            "give a new folder"
        )
    scraper = Scraper(parsed.where, headers=headers_from(headers))
    saved, failed = _record(scraper, folder, interval, duration, Progress(source))
    if not saved:
        if is_new:
            folder.rmdir()  # an empty one would be taken for a recording
        raise SourceError(failed or f"{source}: nothing was saved")
    click.echo(f"{saved} pages in {folder}")
    click.echo(f"kvwatch check {folder}", err=True)
    if failed:
        click.echo(f"Error: some pages are missing; the last reason: {printable(failed)}", err=True)
        ctx.exit(2)


def _record(
    scraper: Scraper, folder: Path, interval: float, duration: float, progress: Progress
) -> tuple[int, str | None]:
    """Save pages until the time is over or Ctrl-C. What was saved stays; the first failure ends it if nothing was."""
    started = time.monotonic()
    saved, failed, number = 0, None, 0
    try:
        while number * interval <= duration:
            while (wait := started + number * interval - time.monotonic()) > 0:
                progress(time.monotonic() - started, duration)
                time.sleep(min(0.2, wait))
            try:
                _save(scraper.page(), folder)
                saved += 1
            except KvwatchError as error:
                failed = str(error)
                if not saved:
                    break
            # the missed pages of a slow server are not made up for
            number = max(number, int((time.monotonic() - started) / interval)) + 1
    except KeyboardInterrupt:
        click.echo("stopped; the pages so far are saved", err=True)
    progress(duration, duration)
    return saved, failed


def _save(page: Page, folder: Path) -> None:
    """Write a page that shows an engine, whole or not at all."""
    text = decode(page.body)
    snapshots(read_samples(text), at_seconds=page.at_seconds)
    path = folder / f"{int(page.at_seconds * 1000)}{SUFFIX}"
    part = path.with_suffix(".part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise SourceError(f"{path}: {error.strerror}; free some space or give another folder") from error
