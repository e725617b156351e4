"""`kvwatch explain`: the runbook page of a check."""

import click

from kvwatch.checks import ALL
from kvwatch.errors import SettingError


@click.command("explain")
@click.argument("check", required=False)
def command(check: str | None) -> None:
    """Print the runbook page of CHECK; without it, list the checks."""
    if check is None:
        width = max(len(entry.id) for entry in ALL)
        click.echo("\n".join(f"{entry.id:<{width}}  {entry.summary}" for entry in ALL))
        return
    pages = {entry.id: entry.docs for entry in ALL}
    if check not in pages:
        raise SettingError(f"there is no check {check!r}; the checks are: {', '.join(pages)}")
    click.echo(f"# {check}\n\n{pages[check].strip()}")
