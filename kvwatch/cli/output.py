"""The result on stdout."""

import os
import sys
from typing import TextIO

import click


def write_result(text: str) -> None:
    """Print the result; an empty one prints no line.

    A reader that has seen enough, such as `head`, does not change the exit code.
    """
    try:
        click.echo(text, nl=bool(text))
    except BrokenPipeError:
        discard(sys.stdout)


def discard(stream: TextIO) -> None:
    """Send what is still buffered to nowhere, so that the interpreter does not complain of it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def open_what_is_closed() -> None:
    """`>&-` leaves Python without a stream: what is written to stdout is then an error, what is said on stderr lost."""
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
