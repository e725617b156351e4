"""Values of options that say something: what is empty is a variable that was not set."""

from typing import Any

import click


class Text(click.types.StringParamType):
    """Text that is not empty."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        _refuse_empty(self, value, param, ctx)
        return super().convert(value, param, ctx)


class PathName(click.Path):
    """A path that is not empty: Path("") is the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        _refuse_empty(self, value, param, ctx)
        return super().convert(value, param, ctx)


def _refuse_empty(
    kind: "Text | PathName", value: Any, param: click.Parameter | None, ctx: click.Context | None
) -> None:
    if isinstance(value, str) and not value.strip():
        wanted = getattr(param, "help", None) or "a value"
        kind.fail(f"the value is empty; give: {wanted.partition('. ')[0].rstrip('.')}", param, ctx)


TEXT = Text()
