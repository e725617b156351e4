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
    checks = {entry.id: entry for entry in ALL}
    if check not in checks:
        raise SettingError(f"there is no check {check!r}; the checks are: {', '.join(checks)}")
    from kvwatch.generate.reference import check_page

    click.echo(check_page(checks[check]), nl=False)
