"""Options and small things that several commands share."""

import os
import re
import shutil
import sys
from collections.abc import Callable
from typing import Any

import click

from kvwatch.cli.not_empty import Text
from kvwatch.errors import SettingError, shown

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_LONGEST_SECONDS = 365 * 86400.0
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic in click's newest releases only
    """`500ms`, `10s`, `5m`, `1h`, `1m30s`, or a plain number of seconds -> seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            seconds: float = value  # of a settings file, which may hold -5, .inf and .nan
        else:
            text = str(value).strip()
            parts = _DURATION.findall(text)
            if not parts or "".join(number + unit for number, unit in parts) != text:
                self.fail(f"{shown(value)} is not a duration; write 500ms, 10s, 5m or 1h", param, ctx)
            seconds = sum(float(number) * _UNIT_SECONDS[unit or None] for number, unit in parts)
        if not 0 <= seconds <= _LONGEST_SECONDS:
            self.fail(f"{shown(value)} is not between 0 and 8760h, which is a year", param, ctx)
        return float(seconds)


DURATION = Duration()
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.1
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")


class HeaderText(Text):
    """`Name: value`. In the environment, one header a line: a value may hold spaces."""

    name = "header"
    envvar_list_splitter = "\n"


HEADER = HeaderText()


def headers_from(texts: tuple[str, ...]) -> dict[str, str]:
    """`Name: value` -> mapping. Raises SettingError for anything else, without the value: it may be a token."""
    headers = {}
    for text in texts:
        name, colon, value = (part.strip() for part in text.partition(":"))
        if not colon or not _HEADER_NAME.fullmatch(name):
            raise SettingError("a --header is not 'Name: value'; write for example 'Authorization: Bearer TOKEN'")
        if not _HEADER_VALUE.fullmatch(value):
            raise SettingError(f"--header {name}: its value holds a line feed or another character that HTTP refuses")
        headers[name] = value
    return headers


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """SOURCE..., --window and --header."""
    return click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")(sampling_options(command))


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--window and --header: how a source is read."""
    command = click.option(
        "--header",
        "headers",
        type=HEADER,
        multiple=True,
        metavar="'NAME: VALUE'",
        help="Send this header with every scrape.",
    )(command)
    return click.option(
        "--window",
        "window_seconds",
        type=DURATION,
        default="10s",
        show_default=True,
        help="How long to sample a live server; of a history, the last 5m unless given. A capture folder is read "
        "whole, a file is one page.",
    )(command)


def output_option(*formats: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--output with these formats, the first being the default."""
    return click.option(
        "--output", "-o", type=click.Choice(formats), default=formats[0], show_default=True, help="Format on stdout."
    )


def terminal_width() -> int:
    """Columns to write, between 60 and 120; 80 where there is no terminal."""
    return max(60, min(120, shutil.get_terminal_size((80, 24)).columns))


def wants_colour() -> bool:
    """Only on a terminal, and never under NO_COLOR (https://no-color.org)."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


class Progress:
    """Says on stderr that a window is being sampled: a moving line on a terminal, one line elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._live = sys.stderr.isatty()
        self._said = False

    def __call__(self, elapsed_seconds: float, total_seconds: float) -> None:
        if total_seconds <= 0:
            return
        if self._live:
            done = elapsed_seconds >= total_seconds
            line = "" if done else f"sampling {self._what}: {elapsed_seconds:.0f} of {total_seconds:.0f} s"
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
        elif not self._said:
            self._said = True
            sys.stderr.write(f"sampling {self._what} for {total_seconds:.0f} s\n")
