"""Documents -> the queries in them: Grafana dashboards of any schema, rule files, and the resources that wrap both.

A document is what JSON or YAML gave. Read are dashboards (plain, as the API exports them, or of schema version 2), rule
files of Prometheus, PrometheusRule and VMRule, dashboards of Perses, and any of these inside ConfigMap and
GrafanaDashboard.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from kvwatch.lint import Expression, Show

_LABEL_VALUES = re.compile(r"\s*label_values\((.*),\s*\w+\s*\)\s*", re.DOTALL)
_QUERY_RESULT = re.compile(r"\s*query_result\((.*)\)\s*", re.DOTALL)
_TEXTS = (".json", ".yaml", ".yml")

Read = Callable[[str], list[Any]]
"""Text of JSON or YAML -> its documents."""


def expressions(file: str, document: Any, read: Read) -> Iterator[Expression]:
    """Every query of a document, with where it stands."""
    if not isinstance(document, Mapping):
        return
    if document.get("kind") == "ConfigMap":
        for name, text in (document.get("data") or {}).items():
            if str(name).endswith(_TEXTS) and isinstance(text, str):
                for inner in read(text):
                    yield from expressions(f"{file}: {name}", inner, read)
        return
    if document.get("kind") == "GrafanaDashboard" and isinstance(_spec(document).get("json"), str):
        for inner in read(_spec(document)["json"]):
            yield from expressions(file, inner, read)
        return
    groups = document.get("groups") or _spec(document).get("groups")
    if isinstance(groups, list) and any(isinstance(group, Mapping) and "rules" in group for group in groups):
        yield from _rules(file, groups)
    else:
        yield from _queries(file, document, where="")


def recorded(document: Any) -> Iterator[str]:
    """Names of the series that the rules of a document record."""
    if isinstance(document, Mapping):
        if isinstance(document.get("record"), str):
            yield document["record"]
        for value in document.values():
            yield from recorded(value)
    elif isinstance(document, list):
        for value in document:
            yield from recorded(value)


def _rules(file: str, groups: list[Any]) -> Iterator[Expression]:
    for group in groups:
        for rule in (group.get("rules") or ()) if isinstance(group, Mapping) else ():
            if not isinstance(rule, Mapping) or "expr" not in rule:
                continue
            what = f"alert {rule['alert']}" if "alert" in rule else f"record {rule.get('record')}"
            where = f"group {group.get('name')}, {what}"
            yield Expression(file=file, where=where, text=str(rule["expr"]))


def _queries(file: str, value: Any, *, where: str, show: Show | None = None) -> Iterator[Expression]:
    """Every `expr` below a value; titles and names met on the way say where it is."""
    if isinstance(value, list):
        for item in value:
            yield from _queries(file, item, where=where, show=show)
    if not isinstance(value, Mapping):
        return
    where, show = _place(value, where), _shown(value, show)
    if isinstance(value.get("expr"), str) and not _elsewhere(value):
        query = value.get("refId")
        yield Expression(file=file, where=f"{where}, query {query}" if query else where, text=value["expr"], show=show)
    if str(value.get("kind")).startswith("Prometheus") and isinstance(_spec(value).get("query"), str):
        yield Expression(file=file, where=where, text=_spec(value)["query"], show=show)
    if value.get("type") == "query" and "name" in value:
        yield from _variable(file, value)
        return
    for key, item in value.items():
        if key != "expr":
            yield from _queries(file, item, where=where, show=show)


def _variable(file: str, value: Mapping[str, Any]) -> Iterator[Expression]:
    """The metric of which a template variable lists label values."""
    query = value.get("query")
    text = query.get("query") if isinstance(query, Mapping) else query
    found = isinstance(text, str) and (_LABEL_VALUES.fullmatch(text) or _QUERY_RESULT.fullmatch(text))
    if found:
        yield Expression(file=file, where=f"variable {value['name']}", text=found[1])


def _place(value: Mapping[str, Any], where: str) -> str:
    """Of a panel: its title and id; of an annotation: its name; of anything else: where it stands in."""
    title = value.get("title")
    if isinstance(title, str) and ("targets" in value or "gridPos" in value or "vizConfig" in value):
        number = f" (id {value['id']})" if "id" in value else ""
        return f"panel {title!r}{number}"
    if value.get("kind") == "Panel" and "display" in _spec(value):
        return f"panel {_spec(value)['display'].get('name')!r}"
    if isinstance(value.get("name"), str) and "iconColor" in value:
        return f"annotation {value['name']!r}"
    return where


def _shown(value: Mapping[str, Any], show: Show | None) -> Show | None:
    """How a panel prints its values. Panels that print several things have units of their own for some; they count as
    unknown.
    """
    config = value.get("fieldConfig")
    if not isinstance(config, Mapping):
        return show
    own_units = any(
        isinstance(change, Mapping) and change.get("id") == "unit"
        for override in config.get("overrides") or ()
        if isinstance(override, Mapping)
        for change in override.get("properties") or ()
    )
    unit = (config.get("defaults") or {}).get("unit")
    return cast("Show", unit) if unit in {"percent", "percentunit"} and not own_units else None


def _spec(value: Mapping[str, Any]) -> Mapping[str, Any]:
    spec = value.get("spec")
    return spec if isinstance(spec, Mapping) else {}


def _elsewhere(target: Mapping[str, Any]) -> bool:
    """Whether a query goes to something that is not Prometheus, such as Loki."""
    source = target.get("datasource")
    kind = source.get("type") if isinstance(source, Mapping) else None
    return kind in {"loki", "tempo", "elasticsearch", "influxdb", "graphite"}
