"""The result on stdout."""

import os
import sys

import click


def write_result(text: str) -> None:
    """Print the result; an empty one prints no line.

    A reader that has seen enough, such as `head`, does not change the exit code.
    """
    try:
        click.echo(text, nl=bool(text))
    except BrokenPipeError:
        discard_stdout()


def discard_stdout() -> None:
    """Send what is still buffered to nowhere, so that the interpreter does not complain of it when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
