"""What vLLM's releases expose, by name, and what a selector in somebody's query reads of it.

Source: data/vllm_metric_names.json, made by tools/metric_names.py from the sources of the releases 0.6.6 to 0.33.0.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvwatch.promql import (
    COMPARISONS,
    aggregation,
    function,
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
from kvwatch.versions import Version, parse_version
from kvwatch.vllm_metrics import PREFIXES

# Functions and aggregations whose result is on the scale of their argument.
SAME_SCALE = frozenset(
    {
        *("avg_over_time", "max_over_time", "min_over_time", "last_over_time", "quantile_over_time", "first_over_time"),
        *("abs", "clamp", "clamp_max", "clamp_min", "label_join", "label_replace", "sort", "sort_desc", "scalar"),
        *("avg", "max", "min", "quantile", "topk", "bottomk", "limitk"),
    }
)
PARTS_OF_A_HISTOGRAM = ("_bucket", "_sum", "_count")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """One metric of vLLM: its type, the releases that have it, and what to write in its place elsewhere.

    `hidden_from`: the first release that shows it only under --show-hidden-metrics-for-version. `labels`: its own,
    besides those that all have. `ratio`: it runs from 0 to 1.
    """

    name: str
    type: str
    first: Version
    last: Version
    hidden_from: Version | None = None
    instead: str | None = None
    labels: tuple[str, ...] = ()
    ratio: bool = False

    def is_in(self, version: Version) -> bool:
        """Minor releases count: one patch release of each was read."""
        return self.first[:2] <= version[:2] <= self.last[:2]

    def is_hidden_in(self, version: Version) -> bool:
        return self.hidden_from is not None and version[:2] >= self.hidden_from[:2]

    def shown_in(self, version: Version) -> bool:
        return self.is_in(version) and not self.is_hidden_in(version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All metrics of vLLM by name without prefix; names under its prefix that others expose, with whose they are."""

    last_release: Version
    metrics: Mapping[str, Known]
    elsewhere: Mapping[str, str]


def catalogue(content: Mapping[str, Any]) -> Catalogue:
    """The content of data/vllm_metric_names.json."""
    metrics = {
        name: Known(
            name=name,
            type=entry["type"],
            first=parse_version(entry["first"]),
            last=parse_version(entry["last"]),
            hidden_from=parse_version(entry["hidden_from"]) if "hidden_from" in entry else None,
            instead=entry.get("instead"),
            labels=tuple(entry.get("labels", ())),
            ratio=entry.get("ratio", False),
        )
        for name, entry in content["metrics"].items()
    }
    return Catalogue(
        last_release=parse_version(content["last_release"]), metrics=metrics, elsewhere=content["elsewhere"]
    )


class Reader:
    """Looks selectors up in the catalogue for one version."""

    def __init__(self, known: Catalogue, version: Version) -> None:
        self.known = known
        self.version = version

    def spoken_of(self, selector: Any) -> tuple[str, str] | None:
        """Prefix and rest of a selector's name, if it claims to be vLLM's; None for others and for recording rules."""
        name = metric_name(selector)
        # The router of production-stack exposes metrics of the same names, one for each server.
        if name is None or any(label == "server" for label, _, _ in matchers(selector)):
            return None
        prefix = next((one for one in PREFIXES if one and name.startswith(one)), None)
        if prefix is None or ":" in name[len(prefix) :]:
            return None
        return prefix, name[len(prefix) :]

    def metric(self, selector: Any) -> Known | None:
        """What a selector reads, whatever the version; None where it is not vLLM's or not known."""
        spoken = self.spoken_of(selector)
        return None if spoken is None else self.named(spoken[1])

    def named(self, name: str) -> Known | None:
        """A metric by the name of one of its series, without prefix."""
        found = self.known.metrics.get(name)
        if found is not None and found.type != "histogram":
            return found
        base = next((name.removesuffix(part) for part in PARTS_OF_A_HISTOGRAM if name.endswith(part)), None)
        found = self.known.metrics.get(base) if base else None
        if found is not None and found.type == "histogram":
            return found
        if name.endswith("_created"):
            base = name.removesuffix("_created")
            return self.known.metrics.get(f"{base}_total") or self.known.metrics.get(base)
        return next((metric for pattern, metric in self._patterns() if pattern.fullmatch(name)), None)

    def is_counter(self, selector: Any) -> bool:
        """Whether a selector reads something that only grows: a counter, or a part of a histogram."""
        metric, spoken = self.metric(selector), self.spoken_of(selector)
        grows = metric is not None and metric.type in {"counter", "histogram"}
        return grows and spoken is not None and not spoken[1].endswith("_created")

    def has_data(self, node: Any) -> bool:
        """Whether every vLLM metric below this node is there in this version, and there is one."""
        read = [one for one in selectors(node) if self.spoken_of(one) is not None]
        return bool(read) and all((m := self.metric(one)) is not None and m.shown_in(self.version) for one in read)

    def scale(self, node: Any) -> float | None:
        """The largest value of what is a share: 1, or 100 after `* 100`; None for all other things."""
        if kind(node) == "VectorSelector":
            metric = self.metric(node)
            return 1.0 if metric is not None and metric.ratio else None
        if kind(node) in {"MatrixSelector", "ParenExpr", "SubqueryExpr"}:
            return self.scale(parts(node)[0])
        if kind(node) == "BinaryExpr":
            return self._scale_of_two(node)
        if function(node) in SAME_SCALE or aggregation(node) in SAME_SCALE:
            return next((found for part in parts(node) if (found := self.scale(part)) is not None), None)
        return None

    def _scale_of_two(self, node: Any) -> float | None:
        left, right = self.scale(node.lhs), self.scale(node.rhs)
        how = operator(node)
        if how in {"or", "and", "unless"} or (how in COMPARISONS and not returns_bool(node)):
            return left if left is not None else right if how == "or" else None
        if how == "*":
            factor = number(node.rhs) if left is not None else number(node.lhs)
            scale = left if left is not None else right
            return scale * factor if scale is not None and factor else None
        if how == "/" and left is not None:
            divisor = number(node.rhs)
            return left / divisor if divisor else None
        if how == "/" and _is_hit_ratio(node):
            return _factor(node.lhs)
        if how == "-" and right is not None and number(node.lhs) == right:
            return right
        return None

    def _patterns(self) -> Iterator[tuple[re.Pattern[str], Known]]:
        for name, metric in self.known.metrics.items():
            if "{" in name:
                yield re.compile(re.sub(r"\{\w+\}", r"\\w+", name)), metric


def _is_hit_ratio(node: Any) -> bool:
    """Whether hits of a cache are divided by its look-ups."""
    above, below = ({metric_name(one) or "" for one in selectors(side)} for side in (node.lhs, node.rhs))
    hits = {name.removesuffix("_hits_total") for name in above if name.endswith("_hits_total")}
    looked_up = {name.removesuffix("_queries_total") for name in below if name.endswith("_queries_total")}
    return bool(hits) and hits == looked_up and len(above) == len(hits) == len(below)


def _factor(node: Any) -> float:
    """The product of the numbers that a node is multiplied with."""
    sides = [side for one in nodes(node) if operator(one) == "*" for side in (one.lhs, one.rhs)]
    return math.prod(value for side in sides if (value := number(side)) is not None)
