"""`kvwatch explain`: the runbook page of a check."""

import difflib
import textwrap

import click

from kvwatch.checks import ALL
from kvwatch.cli.options import terminal_width
from kvwatch.errors import SettingError


@click.command("explain")
@click.argument("check", required=False)
def command(check: str | None) -> None:
    """Print the runbook page of CHECK; without it, list the checks."""
    if check is None:
        click.echo(_list(terminal_width()))
        return
    checks = {entry.id: entry for entry in ALL}
    if check not in checks:
        near = difflib.get_close_matches(check.lower().replace("-", "_"), checks, n=1)
        if near:
            raise SettingError(f"there is no check {check!r}; did you mean {near[0]}? `kvwatch explain` lists them")
        raise SettingError(f"there is no check {check!r}; the checks are: {', '.join(checks)}")
    from kvwatch.generate.reference import check_page

    click.echo(check_page(checks[check]), nl=False)


def _list(width: int) -> str:
    """Every check with what it is about, the second column wrapped."""
    indent = max(len(entry.id) for entry in ALL) + 2
    return "\n".join(
        textwrap.fill(
            entry.summary,
            width,
            initial_indent=f"{entry.id:<{indent}}",
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
        )
        for entry in ALL
    )
