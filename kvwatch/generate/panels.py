"""Panels with the house's look, made with Grafana's own SDK (grafana-foundation-sdk, schema of Grafana 11).

The SDK checks neither ids nor places: `Sheet` numbers the panels and lays them out in rows of 24 columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from kvwatch.checks.check import Check
from kvwatch.finding import Status

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
COLUMNS = 24
AXIS_WIDTH = 75  # pixels; the same everywhere, so that times of panels one above the other align
NARROW_COLUMN = 75  # pixels; the table of engines fits on a screen of 1280
GREEN, ORANGE, RED, GREY = "green", "orange", "red", "#808080"

TOKENS_PER_SECOND = "suffix:tok/s"
PER_SECOND = "suffix:/s"
RATIO = "percentunit"
SECONDS = "s"
COUNT = "short"
# Without one, Grafana draws the axis of a line at zero up to 100.
AT_LEAST = {PER_SECOND: 0.1, COUNT: 1, SECONDS: 0.1, TOKENS_PER_SECOND: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One expression. `legend` names its series, or its column in a table."""

    expr: str
    legend: str = ""
    instant: bool = False


Panel = timeseries.Panel | stat.Panel | table.Panel | statetimeline.Panel | bargauge.Panel
AnyPanel = TypeVar("AnyPanel", timeseries.Panel, stat.Panel, table.Panel, statetimeline.Panel, bargauge.Panel)


def steps(*at: tuple[str, float | None]) -> dashboard.ThresholdsConfig:
    """Colours from a value on; the first colour has None for its value."""
    found = [models.Threshold(color=color, value=value) for color, value in at]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(found)


def graph(
    title: str,
    queries: Sequence[Query],
    *,
    unit: str,
    about: str,
    checks: Sequence[Check] = (),
    limits: dashboard.ThresholdsConfig | None = None,
    bottom: float | None = 0,
    top: float | None = None,
    at_least: float | None = None,
    none: str = "No data",
) -> timeseries.Panel:
    """Lines over time; `limits` draws dashed lines where colours change. The axis reaches `at_least`."""
    panel = (
        timeseries.Panel()
        .unit(unit)
        .no_value(none)
        .axis_width(AXIS_WIDTH)
        .line_width(1.5)
        .fill_opacity(8)
        .show_points(kinds.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(kinds.LegendDisplayMode.LIST)
            .placement(kinds.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING))
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
    )
    if limits is not None:
        dashed = common.GraphThresholdsStyleConfig().mode(kinds.GraphThresholdsStyleMode.DASHED)
        panel.thresholds(limits).thresholds_style(dashed)
    if bottom is not None:
        panel.min(bottom)
    if top is not None:
        panel.max(top)
    if at_least is not None or unit in AT_LEAST:
        panel.axis_soft_max(at_least if at_least is not None else AT_LEAST[unit])
    return _described(panel, title, queries, about, checks)


def figure(
    title: str,
    query: str,
    *,
    unit: str,
    about: str,
    checks: Sequence[Check] = (),
    limits: dashboard.ThresholdsConfig | None = None,
    legend: str = "",
    decimals: int | None = None,
    none: str = "no data",
    mappings: Sequence[models.ValueMapping] = (),
) -> stat.Panel:
    """The latest value, large; with a legend, one for each series. `none` says that there is none: that is not zero."""
    panel = (
        stat.Panel()
        .unit(unit)
        .no_value(none)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
        .graph_mode(kinds.BigValueGraphMode.NONE)
        .color_mode(kinds.BigValueColorMode.VALUE if limits is None else kinds.BigValueColorMode.BACKGROUND_SOLID)
        .text_mode(kinds.BigValueTextMode.AUTO if legend else kinds.BigValueTextMode.VALUE)
        .thresholds(limits or steps(("text", None)))
    )
    if decimals is not None:
        panel.decimals(decimals)
    if mappings:
        panel.mappings(list(mappings))
    return _described(panel, title, [Query(expr=query, legend=legend, instant=True)], about, checks)


def states(
    title: str,
    queries: Sequence[Query],
    *,
    about: str,
    mappings: Sequence[models.ValueMapping],
    none: str,
    checks: Sequence[Check] = (),
) -> statetimeline.Panel:
    """A band per series, coloured by its value."""
    panel = (
        statetimeline.Panel()
        .mappings(list(mappings))
        .no_value(none)
        .show_value(kinds.VisibilityMode.NEVER)
        .row_height(0.8)
        .fill_opacity(85)
        .line_width(0)
        .merge_values(True)
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
        .thresholds(steps((GREY, None)))
        .legend(common.VizLegendOptions().show_legend(False).placement(kinds.LegendPlacement.BOTTOM))
    )
    return _described(panel, title, queries, about, checks)


def rows(
    title: str,
    queries: Sequence[Query],
    *,
    about: str,
    hidden: Sequence[str] = (),
    order: Sequence[str] = (),
    renamed: Mapping[str, str] | None = None,
    sort: Sequence[str] = (),
    checks: Sequence[Check] = (),
    none: str = "no data",
) -> table.Panel:
    """A table: one row per set of labels, one column per query. `sort` names columns, the largest first."""
    columns = {_value_column(queries, place): query.legend for place, query in enumerate(queries)}
    panel = (
        table.Panel()
        .no_value(none)
        .cell_height(kinds.TableCellHeight.SM)
        .show_header(True)
        .min_width(NARROW_COLUMN)
        .sort_by([common.TableSortByFieldState().display_name(name).desc(True) for name in sort])
        .transformations(
            [
                models.DataTransformerConfig(id_val="merge", options={}),
                models.DataTransformerConfig(
                    id_val="organize",
                    options={
                        "excludeByName": dict.fromkeys(("Time", *hidden), True),
                        "indexByName": {name: place for place, name in enumerate((*order, *columns))},
                        "renameByName": {**columns, **(renamed or {})},
                    },
                ),
            ]
        )
    )
    return _described(panel, title, queries, about, checks, style=PromQueryFormat.TABLE)


def column(panel: table.Panel, name: str, *, unit: str, limits: dashboard.ThresholdsConfig | None = None) -> None:
    """Unit of a column, and colours for its cells."""
    wanted: list[tuple[str, Any]] = [("unit", unit), ("decimals", 1 if unit == RATIO else 2 if unit != COUNT else 0)]
    if limits is not None:
        wanted += [
            ("custom.cellOptions", {"type": "color-background", "mode": "basic"}),
            ("thresholds", limits.build()),
        ]
    panel.override_by_name(name, [models.DynamicConfigValue(id_val=key, value=what) for key, what in wanted])


def opens(panel: table.Panel, name: str, url: str, title: str) -> None:
    """Make the cells of a column links."""
    links = [{"title": title, "url": url}]
    panel.override_by_name(name, [models.DynamicConfigValue(id_val="links", value=links)])


def values(*of: tuple[float, str, str]) -> models.ValueMapping:
    """Text and colour for single values."""
    found = {
        f"{value:g}": models.ValueMappingResult(text=text, color=color, index=place)
        for place, (value, text, color) in enumerate(of)
    }
    return models.ValueMap(options=found)


def words(of: Mapping[str, str]) -> models.ValueMapping:
    """Text for text."""
    found = {name: models.ValueMappingResult(text=text, index=place) for place, (name, text) in enumerate(of.items())}
    return models.ValueMap(options=found)


VERDICTS = values(
    (Status.OK.code, "ok", GREEN),
    (Status.WARNING.code, "warning", ORANGE),
    (Status.CRITICAL.code, "critical", RED),
    (Status.UNKNOWN.code, "unknown", GREY),
)
"""How the codes of kvwatch_check_status are shown."""


class Sheet:
    """Collects panels row by row, numbers them and gives them their places."""

    def __init__(self, builder: dashboard.Dashboard) -> None:
        self._builder = builder
        self._last_id = 0
        self._y = 0

    def heading(self, title: str) -> None:
        place = models.GridPos(x=0, y=self._y, w=COLUMNS, h=1)
        self._builder.with_row(dashboard.Row(title).id(self._next_id()).grid_pos(place))
        self._y += 1

    def line(self, height: int, *panels: Panel, widths: Sequence[int] = ()) -> None:
        """Panels side by side, of equal width unless said otherwise."""
        each = tuple(widths) or (COLUMNS // len(panels),) * len(panels)
        x = 0
        for panel, width in zip(panels, each, strict=True):
            place = models.GridPos(x=x, y=self._y, w=width, h=height)
            self._builder.with_panel(panel.id(self._next_id()).grid_pos(place))
            x += width
        self._y += height

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id


def _described(
    panel: AnyPanel,
    title: str,
    queries: Sequence[Query],
    about: str,
    checks: Sequence[Check],
    *,
    style: PromQueryFormat = PromQueryFormat.TIME_SERIES,
) -> AnyPanel:
    """What all panels have: title, description, data source, queries, and links to the runbooks."""
    panel.title(title).description(about).datasource(SOURCE)
    for place, query in enumerate(queries):
        target = prometheus.Dataquery().expr(query.expr).ref_id(_letter(place)).format(style).datasource(SOURCE)
        target.legend_format(query.legend if style is not PromQueryFormat.TABLE else "__auto")
        if query.instant or style is PromQueryFormat.TABLE:
            target.instant()
        else:
            target.range()
        panel.with_target(target)
    return panel.links([runbook(check) for check in checks])


def runbook(check: Check) -> dashboard.DashboardLink:
    title = f"Runbook: {check.id.replace('_', ' ')}"
    return dashboard.DashboardLink(title).type(models.DashboardLinkType.LINK).url(check.runbook).target_blank(True)


def _letter(place: int) -> str:
    return chr(ord("A") + place)


def _value_column(queries: Sequence[Query], place: int) -> str:
    """Grafana calls the value of a lone query `Value`, and of several `Value #A`, `Value #B`."""
    return "Value" if len(queries) == 1 else f"Value #{_letter(place)}"
