"""Panels with the house's look, made with Grafana's own SDK (grafana-foundation-sdk, schema of Grafana 11).

The SDK checks neither ids nor places: `Sheet` numbers the panels and lays them out in rows of 24 columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

from kvwatch.checks.check import RUNBOOK_URL, Check
from kvwatch.finding import Status

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
COLUMNS = 24
AXIS_WIDTH = 75  # pixels; the same everywhere, so that times of panels one above the other align
NARROW_COLUMN = 75  # pixels; the table of engines fits on a screen of 1280
LEGEND_WIDTH = 250  # pixels
BANDS = 12  # in one panel at a time, where no other number is given
MARGIN = "\N{NO-BREAK SPACE}" * 2  # Grafana measures a band's name without its letter spacing, and cuts the rest off
GREEN, ORANGE, RED, GREY = "green", "orange", "red", "#808080"

TOKENS_PER_SECOND = "suffix:tok/s"
PER_SECOND = "suffix:/s"
RATIO = "percentunit"
SECONDS = "s"
COUNT = "short"
NUMBER = "none"  # to the last digit, as a flag wants it
BYTES = "bytes"
DECIMALS = {RATIO: 1, SECONDS: 1, COUNT: 0, TOKENS_PER_SECOND: 0, PER_SECOND: 2}
LONE = "Value"
FILLED = {"type": "color-background", "mode": "basic"}
# Without one, Grafana draws the axis of a line at zero up to 100.
AT_LEAST = {PER_SECOND: 0.1, COUNT: 1, SECONDS: 0.1, TOKENS_PER_SECOND: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One expression. `legend` names its series, or its column in a table."""

    expr: str
    legend: str = ""
    instant: bool = False


Panel = timeseries.Panel | stat.Panel | table.Panel | statetimeline.Panel | bargauge.Panel
Timed = TypeVar("Timed", timeseries.Panel, statetimeline.Panel)
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
    """Lines over time; `limits` draws dashed lines where colours change. The axis reaches `at_least`, and without a
    `bottom` as far below zero.
    """
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
    soft = at_least if at_least is not None else AT_LEAST.get(unit)
    if soft is not None:
        panel.axis_soft_max(soft)
    if soft is not None and bottom is None:
        panel.axis_soft_min(-soft)
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
    """The latest value, large; with a legend, one for each series. `none` says that there is none, in grey: that is not
    zero, and without a mapping of its own Grafana gives it the first colour of `limits`.
    """
    panel = (
        stat.Panel()
        .unit(unit)
        .no_value(none)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False))
        .graph_mode(kinds.BigValueGraphMode.NONE)
        .color_mode(kinds.BigValueColorMode.VALUE if limits is None else kinds.BigValueColorMode.BACKGROUND_SOLID)
        .text_mode(kinds.BigValueTextMode.AUTO if legend else kinds.BigValueTextMode.VALUE)
        .thresholds(limits or steps(("text", None)))
        .mappings([*mappings, missing(none)])
    )
    if decimals is not None:
        panel.decimals(decimals)
    return _described(panel, title, [Query(expr=query, legend=legend, instant=True)], about, checks)


def states(
    title: str,
    queries: Sequence[Query],
    *,
    about: str,
    mappings: Sequence[models.ValueMapping],
    none: str,
    most: int = BANDS,
) -> statetimeline.Panel:
    """A band per series, coloured by its value; `most` of them at a time. Grafana gives their names two fifths of the
    width and cuts them off on the left: what tells most stands at the end of a legend.

    With colours "from thresholds" Grafana merges all values between two thresholds into one state and shows no mapping
    (grafana/grafana#41075).
    """
    panel = (
        statetimeline.Panel()
        .mappings(list(mappings))
        .no_value(none)
        .show_value(kinds.VisibilityMode.NEVER)
        .row_height(0.8)
        .fill_opacity(85)
        .line_width(0)
        .merge_values(True)
        .per_page(most)
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.FIXED).fixed_color(GREY))
        .legend(common.VizLegendOptions().show_legend(False).placement(kinds.LegendPlacement.BOTTOM))
    )
    shown = [replace(query, legend=MARGIN + query.legend) for query in queries]
    return _described(panel, title, shown, about, checks=())


def beside(panel: Timed) -> Timed:
    """Move the legend of a wide panel to its right, always as wide, so that panels one above the other end alike."""
    return panel.legend(
        common.VizLegendOptions()
        .display_mode(kinds.LegendDisplayMode.LIST)
        .placement(kinds.LegendPlacement.RIGHT)
        .width(LEGEND_WIDTH)
        .show_legend(True)
    )


def dashed(panel: timeseries.Panel, named: str) -> timeseries.Panel:
    """Dash the lines whose names match: limits, not what happened."""
    return panel.override_by_regexp(
        named,
        [
            models.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [8, 6]}),
            models.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
        ],
    )


def rows(
    title: str,
    queries: Sequence[Query],
    *,
    about: str,
    hidden: Sequence[str] = (),
    order: Sequence[str] = (),
    renamed: Mapping[str, str] | None = None,
    numbers: Sequence[str] = (),
    sort: Sequence[str] = (),
    checks: Sequence[Check] = (),
    none: str = "no data",
) -> table.Panel:
    """A table: one row per set of labels, one column per query. `order` has labels, and `LONE` for the value of an only
    query; `sort` names columns, the largest first; labels in `numbers` become numbers, to which a unit can be given.
    """
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
                *_numbers(numbers),
                models.DataTransformerConfig(
                    id_val="organize",
                    options={
                        "excludeByName": dict.fromkeys(("Time", *hidden), True),
                        "indexByName": {name: place for place, name in enumerate(dict.fromkeys((*order, *columns)))},
                        "renameByName": {**columns, **(renamed or {})},
                    },
                ),
            ]
        )
    )
    return _described(panel, title, queries, about, checks, style=PromQueryFormat.TABLE)


def _numbers(labels: Sequence[str]) -> list[models.DataTransformerConfig]:
    conversions = [{"targetField": label, "destinationType": "number"} for label in labels]
    return [models.DataTransformerConfig(id_val="convertFieldType", options={"conversions": conversions})] * bool(
        labels
    )


def column(
    panel: table.Panel,
    name: str,
    *,
    unit: str,
    limits: dashboard.ThresholdsConfig | None = None,
    mappings: Sequence[models.ValueMapping] = (),
    filled: bool = True,
) -> None:
    """Unit of a column, texts for its values, and their colours, which fill the cells."""
    wanted: list[tuple[str, Any]] = [("unit", unit), ("decimals", DECIMALS.get(unit))]
    if limits is not None:
        wanted += [("thresholds", limits.build())]
    if mappings:
        wanted += [("mappings", list(mappings))]
    if filled and (limits is not None or mappings):
        wanted += [("custom.cellOptions", FILLED)]
    panel.override_by_name(
        name, [models.DynamicConfigValue(id_val=key, value=what) for key, what in wanted if what is not None]
    )


def opens(panel: table.Panel, name: str, url: str, title: str, *, blank: bool = False) -> None:
    """Make the cells of a column links."""
    links = [{"title": title, "url": url, "targetBlank": blank}]
    panel.override_by_name(name, [models.DynamicConfigValue(id_val="links", value=links)])


def wide(panel: table.Panel, name: str, pixels: int) -> None:
    """Width of a column; the others share what is left."""
    panel.override_by_name(name, [models.DynamicConfigValue(id_val="custom.width", value=pixels)])


def values(*of: tuple[float, str, str]) -> models.ValueMapping:
    """Text and colour for single values."""
    found = {
        f"{value:g}": models.ValueMappingResult(text=text, color=color, index=place)
        for place, (value, text, color) in enumerate(of)
    }
    return models.ValueMap(options=found)


def missing(text: str) -> models.ValueMapping:
    """Text for no value at all, and for NaN."""
    result = models.ValueMappingResult(text=text, color=GREY, index=0)
    return models.SpecialValueMap(
        options=models.DashboardSpecialValueMapOptions(match=models.SpecialValueMatch.NULL_AND_NAN, result=result)
    )


def words(of: Mapping[str, str]) -> models.ValueMapping:
    """Text for text."""
    found = {name: models.ValueMappingResult(text=text, index=place) for place, (name, text) in enumerate(of.items())}
    return models.ValueMap(options=found)


CODES = (
    (Status.OK.code, "ok", GREEN),
    (Status.WARNING.code, "warning", ORANGE),
    (Status.CRITICAL.code, "critical", RED),
    (Status.UNKNOWN.code, "unknown", GREY),
)
VERDICTS = values(*CODES)
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
    return link(f"Runbook: {check.id.replace('_', ' ')}", check.runbook)


def runbook_of(variable: str) -> str:
    """The address of the runbook of the check that a variable of Grafana names."""
    return RUNBOOK_URL.format(check=variable)


def link(title: str, url: str) -> dashboard.DashboardLink:
    return dashboard.DashboardLink(title).type(models.DashboardLinkType.LINK).url(url).target_blank(True)


def _letter(place: int) -> str:
    return chr(ord("A") + place)


def _value_column(queries: Sequence[Query], place: int) -> str:
    """Grafana calls the value of a lone query `Value`, and of several `Value #A`, `Value #B`."""
    return LONE if len(queries) == 1 else f"Value #{_letter(place)}"
