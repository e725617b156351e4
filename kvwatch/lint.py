"""What is wrong with somebody's own queries of vLLM: names that a version does not have, and mistakes that give no
error but no data, or wrong data, or an alarm that never fires or never ends.

Only what reads vLLM's metrics is judged. The mistakes are those seen in published dashboards and alert rules.
"""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kvwatch.promql import (
    COMPARISONS,
    aggregation,
    function,
    grouping,
    kind,
    matchers,
    metric_name,
    nodes,
    number,
    operator,
    parts,
    returns_bool,
    selectors,
)
from kvwatch.versions import Version, version_text
from kvwatch.vllm_names import Catalogue, Reader

RATES = frozenset({"rate", "irate", "increase", "delta", "idelta", "deriv"})
COUNTER_FUNCTIONS = frozenset({"rate", "irate", "increase"})
INSTANCE_LABELS = frozenset({"instance", "pod"})

Show = Literal["percent", "percentunit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """One query, and where it stands. `show` is how a panel prints its values."""

    file: str
    where: str
    text: str
    show: Show | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One mistake: which, why it matters, and what to write instead."""

    file: str
    where: str
    expression: str
    rule: str
    why: str
    instead: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    rule: str
    why: str
    instead: str


def judge(expression: Expression, tree: Any, known: Catalogue, version: Version) -> tuple[Fault, ...]:
    """All mistakes of one expression, each once, in the order of the rules."""
    reader = Reader(known, min(version, known.last_release))
    found: dict[_Found, None] = {}
    for rule in _RULES:
        if rule is _lifetime_ratios and "lifetime" in expression.where.lower():
            continue  # its name says that this is what is meant
        found.update(dict.fromkeys(rule(reader, tree)))
    found.update(dict.fromkeys(_shown_on_the_wrong_scale(reader, tree, expression.show)))
    return tuple(
        Fault(
            file=expression.file,
            where=expression.where,
            expression=expression.text,
            rule=one.rule,
            why=one.why,
            instead=one.instead,
        )
        for one in found
    )


# --- the rules ------------------------------------------------------------------------------------------------------


def _names(reader: Reader, tree: Any) -> Iterator[_Found]:
    """Names that this version does not have. In a chain of `or` one that it has excuses the others."""
    if operator(tree) == "or":
        links = list(_links(tree))
        if any(reader.has_data(link) for link in links):
            return
        # The members are spellings of one figure, so one of them stands for all.
        yield from next(filter(None, (list(_names(reader, link)) for link in links)), [])
        return
    if kind(tree) == "VectorSelector":
        yield from _name(reader, tree)
        return
    for part in parts(tree):
        yield from _names(reader, part)


def _links(tree: Any) -> Iterator[Any]:
    """The members of a chain of `or`."""
    if operator(tree) == "or":
        yield from _links(tree.lhs)
        yield from _links(tree.rhs)
    else:
        yield tree


def _name(reader: Reader, selector: Any) -> Iterator[_Found]:
    spoken = reader.spoken_of(selector)
    if spoken is None or spoken[1] in reader.known.elsewhere:
        return
    prefix, name = spoken
    shown, release = prefix + name, version_text(reader.version)
    metric = reader.named(name)
    if metric is None:
        found = _unknown(reader, prefix, name)
        # Without its colon the prefix is anybody's: a name unlike all of vLLM's is taken for somebody else's.
        if ":" in prefix or found.rule != "metric_unknown" or _near(reader, name, alike=0.85):
            yield found
    elif not metric.is_in(reader.version):
        there = f"it is in {version_text(metric.first)} to {version_text(metric.last)}"
        yield _Found(
            rule="metric_absent",
            why=f"vLLM {release} does not have {shown} ({there}), so the query gives no data",
            instead=metric.instead or f"nothing: vLLM {release} has no such figure",
        )
    elif metric.hidden_from is not None and metric.is_hidden_in(reader.version):
        since = version_text(metric.hidden_from)
        yield _Found(
            rule="metric_hidden",
            why=f"vLLM has {shown} since {since} only under --show-hidden-metrics-for-version, and drops it after "
            f"{version_text(metric.last)}",
            instead=metric.instead or "nothing: there is no such figure any more",
        )


def _unknown(reader: Reader, prefix: str, name: str) -> _Found:
    """A name of no version: a counter without `_total`, a histogram without its part, or something made up."""
    shown = prefix + name
    if f"{name}_total" in reader.known.metrics:
        why = f"counters end in _total on a metrics page, so {shown} gives no data"
        return _Found(rule="counter_without_total", why=why, instead=f"{shown}_total")
    if name in reader.known.metrics:
        why = f"{shown} is a histogram; its series are named {name}_bucket, {name}_sum and {name}_count"
        return _Found(rule="histogram_without_part", why=why, instead=f"{shown}_bucket, {shown}_sum or {shown}_count")
    near = _near(reader, name)
    last = version_text(reader.known.last_release)
    first = version_text(min(metric.first for metric in reader.known.metrics.values()))
    return _Found(
        rule="metric_unknown",
        why=f"no vLLM from {first} to {last} has {shown}, so the query gives no data",
        instead=f"perhaps {prefix}{near}" if near else "docs/reference/metrics.md lists what there is",
    )


def _near(reader: Reader, name: str, alike: float = 0.6) -> str | None:
    """The name most like this one that the version has."""
    shown = [metric.name for metric in reader.known.metrics.values() if metric.shown_in(reader.version)]
    return next(iter(difflib.get_close_matches(name, shown, n=1, cutoff=alike)), None)


def _rates_of_gauges(reader: Reader, tree: Any) -> Iterator[_Found]:
    for node in nodes(tree):
        if function(node) not in COUNTER_FUNCTIONS:
            continue
        for selector in selectors(node):
            metric = reader.metric(selector)
            if metric is not None and metric.type == "gauge":
                shown = metric_name(selector)
                yield _Found(
                    rule="rate_of_gauge",
                    why=f"{shown} is a gauge: {function(node)} takes every fall for a restart and gives nonsense",
                    instead=f"avg_over_time({shown}[5m]), or deriv({shown}[5m]) for its slope",
                )


def _percent_and_ratio(reader: Reader, tree: Any) -> Iterator[_Found]:
    for node in nodes(tree):
        if operator(node) not in COMPARISONS:
            continue
        for side, other in ((node.lhs, node.rhs), (node.rhs, node.lhs)):
            scale, limit = reader.scale(side), number(other)
            if scale is None or limit is None:
                continue
            if scale == 1.0 and limit > 1:
                yield _Found(
                    rule="percent_of_ratio",
                    why=f"the value runs from 0 to 1 and is never above {limit:g}",
                    instead=f"compare with {limit / 100:g}",
                )
            elif scale == 100.0 and 0 < limit < 1:
                yield _Found(
                    rule="percent_of_ratio",
                    why=f"the value runs from 0 to 100, so {limit:g} means {limit:g} %",
                    instead=f"compare with {limit * 100:g}, or leave out `* 100`",
                )


def _shown_on_the_wrong_scale(reader: Reader, tree: Any, show: Show | None) -> Iterator[_Found]:
    scale = reader.scale(tree)
    if (scale, show) == (1.0, "percent"):
        yield _Found(
            rule="percent_of_ratio",
            why="the value runs from 0 to 1 and the panel's unit is Percent (0-100): a full cache reads 1 %",
            instead="the unit Percent (0.0-1.0), percentunit",
        )
    elif (scale, show) == (100.0, "percentunit"):
        yield _Found(
            rule="percent_of_ratio",
            why="the value runs from 0 to 100 and the panel's unit is Percent (0.0-1.0): a full cache reads 10000 %",
            instead="leave out `* 100`, or the unit Percent (0-100), percent",
        )


def _quantiles(_reader: Reader, tree: Any) -> Iterator[_Found]:
    for node in nodes(tree):
        if function(node) != "histogram_quantile" or not any(_is_bucket(one) for one in selectors(node.args[1])):
            continue
        if any(_is_bucket(one) for one in _without_rates(node.args[1])):
            yield _Found(
                rule="quantile_of_raw_histogram",
                why="the buckets count since the engine started, so the quantile is of its whole life and hardly moves",
                instead="histogram_quantile(q, sum by (le, …) (rate(…_bucket[5m])))",
            )
        if any(_drops_le(one) for one in nodes(node.args[1])):
            yield _Found(
                rule="le_dropped",
                why="the aggregation drops the label le, without which histogram_quantile gives no data",
                instead="sum by (le, …) (rate(…_bucket[5m]))",
            )


def _is_bucket(selector: Any) -> bool:
    return (metric_name(selector) or "").endswith("_bucket")


def _without_rates(tree: Any) -> Iterator[Any]:
    """Selectors that stand in no rate."""
    if function(tree) in RATES:
        return
    if kind(tree) == "VectorSelector":
        yield tree
    for part in parts(tree):
        yield from _without_rates(part)


def _drops_le(node: Any) -> bool:
    if aggregation(node) not in {"sum", "avg", "max", "min"}:
        return False
    how, labels = grouping(node) or ("by", frozenset())
    return ("le" in labels) != (how == "by")


def _sums_of_ratios(reader: Reader, tree: Any) -> Iterator[_Found]:
    means = {id(node.lhs) for node in nodes(tree) if operator(node) == "/" and _counts(node.rhs)}
    means |= {
        id(part) for node in nodes(tree) if kind(node) == "ParenExpr" and id(node) in means for part in parts(node)
    }
    for node in nodes(tree):
        if aggregation(node) == "sum" and reader.scale(node.expr) is not None and id(node) not in means:
            if _keeps_engines_apart(node):
                continue
            yield _Found(
                rule="sum_of_ratios",
                why="a sum of shares is no share: two engines at 70 % make 140 %",
                instead="max (the fullest engine) or avg in place of sum",
            )


def _counts(node: Any) -> bool:
    return any(aggregation(one) == "count" for one in nodes(node))


def _keeps_engines_apart(node: Any) -> bool:
    how, labels = grouping(node) or ("by", frozenset())
    if how == "without":
        return not labels & {"engine", *INSTANCE_LABELS}
    return "engine" in labels and bool(labels & INSTANCE_LABELS)


def _one_engine_only(reader: Reader, tree: Any) -> Iterator[_Found]:
    for selector in selectors(tree):
        if reader.spoken_of(selector) is None:
            continue
        for label, how, value in matchers(selector):
            if label == "engine" and how in {"Equal", "Re"} and value.isdigit():
                yield _Found(
                    rule="hard_coded_engine",
                    why=f'engine="{value}" leaves out the other engines of a data-parallel server',
                    instead="no matcher on engine, and `by (engine)` or max over all of them",
                )


def _misspelt_labels(reader: Reader, tree: Any) -> Iterator[_Found]:
    """Labels that are nearly a metric's own. Others may be the scrape configuration's."""
    for selector in selectors(tree):
        metric = reader.metric(selector)
        own = () if metric is None else metric.labels
        for label, _, _ in matchers(selector):
            near = difflib.get_close_matches(label, own, n=1, cutoff=0.8)
            if near and label not in own:
                yield _Found(
                    rule="label_misspelt",
                    why=f"{metric_name(selector)} has no label {label}, so the matcher sees an empty value everywhere",
                    instead=near[0],
                )


def _lifetime_thresholds(reader: Reader, tree: Any) -> Iterator[_Found]:
    guards = {id(inner) for node in nodes(tree) if operator(node) == "/" for inner in _unwrapped(node.rhs)}
    for node in nodes(tree):
        if operator(node) not in COMPARISONS or id(node) in guards:
            continue
        for side, other in ((node.lhs, node.rhs), (node.rhs, node.lhs)):
            counter = _raw_counter(reader, side)
            if counter is not None and number(other) is not None:
                yield _Found(
                    rule="lifetime_threshold",
                    why=f"{counter} counts since the engine started: once above {number(other):g} it stays there until "
                    "the next restart",
                    instead=f"rate({counter}[5m]) or increase({counter}[5m])",
                )


def _lifetime_ratios(reader: Reader, tree: Any) -> Iterator[_Found]:
    for node in nodes(tree):
        if operator(node) != "/":
            continue
        above, below = _raw_counter(reader, node.lhs), _raw_counter(reader, node.rhs)
        if above is not None and below is not None:
            yield _Found(
                rule="lifetime_ratio",
                why="both count since the engine started, so the quotient is of its whole life and hardly moves",
                instead=f"rate({above}[5m]) / rate({below}[5m])",
            )


def _unwrapped(node: Any) -> Iterator[Any]:
    """A node and what its parentheses hold."""
    yield node
    if kind(node) == "ParenExpr":
        yield from _unwrapped(node.expr)


def _raw_counter(reader: Reader, node: Any) -> str | None:
    """The counter whose value since the start is what this node gives; None where a rate or a gauge is in it."""
    if kind(node) == "VectorSelector":
        return metric_name(node) if reader.is_counter(node) else None
    if kind(node) == "ParenExpr" or aggregation(node) in {"sum", "avg", "max", "min"}:
        return _raw_counter(reader, node.expr)
    if function(node) in {"label_replace", "label_join", "clamp_min"}:
        return _raw_counter(reader, node.args[0])
    if operator(node) == "or" or (operator(node) in COMPARISONS and not returns_bool(node)):
        return _raw_counter(reader, node.lhs)
    return None


_RULES: tuple[Callable[[Reader, Any], Iterator[_Found]], ...] = (
    _names,
    _rates_of_gauges,
    _percent_and_ratio,
    _sums_of_ratios,
    _quantiles,
    _one_engine_only,
    _misspelt_labels,
    _lifetime_thresholds,
    _lifetime_ratios,
)
