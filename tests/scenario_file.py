"""Scenario files: series in promtool's notation, judged by kvwatch's checks and by promtool with the alert rules.

    # Why this scenario exists: what a wrong rule would do with it.
    interval_seconds: 15
    series:
      'vllm:kv_cache_usage_perc{engine="0",model_name="m"}': '0.5x9 0.98x20'
    facts: {max_num_seqs: 64}                 # optional: what the operator told kvwatch
    budget: {model: NAME, kv_cache_memory_bytes: N, …}   # optional: model and flags to compare with
    agent: true                               # optional: an agent watches, and promtool gets what it exposes as well
    window_seconds: 86400                     # optional: how long kvwatch looked, instead of alert_range_seconds
    expect:
      kv_cache_saturated: warning             # every engine, or by engine: {"0": ok, "1": warning}

A check that is not listed must be silent: ok or unknown in Python, no alert in promtool.

The interval is half the range of a rate at most. A rate needs two samples, and from Prometheus 3 on a range leaves out
the sample at its beginning: with an interval as long as the range, only Prometheus 2 has a rate.
"""

import contextlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvwatch import checks
from kvwatch.budget import Budget, predict
from kvwatch.capacity import EngineFacts
from kvwatch.checks.check import Check, Fleet, engine_view
from kvwatch.engine import EngineConfig
from kvwatch.errors import ExpositionError
from kvwatch.exposition import read_samples
from kvwatch.finding import Finding, Status
from kvwatch.model import read_model
from kvwatch.render.prometheus import exposition
from kvwatch.report import report
from kvwatch.snapshot import EngineKey, Snapshot, snapshots
from kvwatch.sources.model_files import load_model
from kvwatch.thresholds import DEFAULTS, Thresholds
from kvwatch.window import windows

FOLDER = Path(__file__).parent / "scenarios"
FIRING = (Status.WARNING, Status.CRITICAL)

_NUMBER = r"-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|Inf|NaN)"
_ITEM = re.compile(rf"(?P<start>{_NUMBER}|_|stale)(?:(?P<step>[+-]{_NUMBER.removeprefix('-?')}))?(?:x(?P<times>\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    reason: str
    interval_seconds: int
    series: Mapping[str, str]
    expect: Mapping[str, Any]
    facts: EngineFacts = field(default_factory=EngineFacts)
    agent: bool = False
    window_seconds: float | None = None

    @property
    def steps(self) -> int:
        return max(len(expand(notation)) for notation in self.series.values())

    @property
    def end_seconds(self) -> int:
        return (self.steps - 1) * self.interval_seconds

    def expected(self, check: str, engine: str) -> Status | None:
        """What one engine must show; None where the check must be silent, whether ok or unknown."""
        status = self.expect.get(check)
        if isinstance(status, Mapping):
            status = status.get(engine)
        return None if status is None else Status(status)


def load(path: Path) -> Scenario:
    text = path.read_text()
    reason, _, _ = text.partition("\n")
    assert reason.startswith("# "), f"{path.name} must start with its reason as a comment"
    content = yaml.safe_load(text)
    interval_seconds = content["interval_seconds"]
    assert 2 * interval_seconds <= DEFAULTS.alert_range_seconds, f"{path.name}: {interval_seconds} s leave no rate"
    lengths = {series: len(expand(notation)) for series, notation in content["series"].items()}
    assert len(set(lengths.values())) == 1, f"{path.name}: series must have equal lengths (stale or _ fills): {lengths}"
    return Scenario(
        name=path.stem,
        reason=reason.removeprefix("# "),
        interval_seconds=interval_seconds,
        series=content["series"],
        expect=content["expect"],
        facts=EngineFacts(**content.get("facts", {}), budget=_budget(content.get("budget"))),
        agent=content.get("agent", False),
        window_seconds=content.get("window_seconds"),
    )


def _budget(given: Mapping[str, Any] | None) -> Budget | None:
    if given is None:
        return None
    model = load_model(given["model"])
    flags = {name: value for name, value in given.items() if name != "model"}
    return predict(read_model(model.config, name=model.name), EngineConfig(**flags))


def load_all() -> tuple[Scenario, ...]:
    return tuple(load(path) for path in sorted(FOLDER.glob("*.yaml")))


def expand(notation: str) -> list[float | None]:
    """promtool's series notation -> one value per step; None where there is no sample.

    `1x4` is five samples of 1, `1+2x3` is 1 3 5 7, `_x4` four missing ones, `stale` marks the end of a series.
    """
    values: list[float | None] = []
    for item in notation.split():
        match = _ITEM.fullmatch(item)
        assert match, f"{item!r} is not promtool's notation"
        start, step, times = match["start"], match["step"], int(match["times"] or 0)
        if start in {"_", "stale"}:
            values += [None] * max(1, times)
        else:
            values += [float(start) + float(step or 0) * i for i in range(times + 1)]
    return values


# The Python side ----------------------------------------------------------------------------------------------------


def pages(scenario: Scenario) -> Iterable[tuple[float, str]]:
    """(seconds, /metrics page) of every step. A page without samples is one that could not be fetched."""
    columns = {series: expand(notation) for series, notation in scenario.series.items()}
    for step in range(scenario.steps):
        lines = [
            f"{series} {_text(values[step])}\n"
            for series, values in columns.items()
            if step < len(values) and values[step] is not None
        ]
        yield step * scenario.interval_seconds, "".join(lines)


def findings(scenario: Scenario, limits: Thresholds = DEFAULTS) -> dict[EngineKey, tuple[Finding, ...]]:
    """What kvwatch says of every engine at the end, over the range that the alert rules look at."""
    recent = [window.last(scenario.window_seconds or limits.alert_range_seconds) for window in windows(_seen(scenario))]
    judged = {}
    for window in recent:
        fleet = Fleet(other for other in recent if other.key.model_name == window.key.model_name)
        judged[window.key] = checks.evaluate_all(engine_view(window, scenario.facts, fleet=fleet), limits)
    return judged


def _seen(scenario: Scenario) -> list[Snapshot]:
    """The snapshots of all pages; none at a step without a page, as while a server restarts."""
    seen: list[Snapshot] = []
    for at_seconds, page in pages(scenario):
        with contextlib.suppress(ExpositionError):
            seen.extend(snapshots(read_samples(page), at_seconds=at_seconds))
    return seen


def _text(value: float | None) -> str:
    assert value is not None
    return "NaN" if math.isnan(value) else repr(value)


# The promtool side --------------------------------------------------------------------------------------------------


def promtool_test(scenario: Scenario, rules: Path, groups: Iterable[str]) -> dict[str, Any]:
    """A promtool unit test: exactly the expected alerts fire at the end, on the expected engines."""
    return {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m" if scenario.interval_seconds <= 60 else "5m",  # a day of minutes takes long
        "group_eval_order": list(groups),
        "tests": [
            {
                "interval": f"{scenario.interval_seconds}s",
                "input_series": input_series(scenario),
                "promql_expr_test": [
                    {
                        "expr": 'group by (alertname, engine, severity) (ALERTS{alertstate="firing"})',
                        "eval_time": f"{scenario.end_seconds}s",
                        "exp_samples": [
                            {"labels": f'{{alertname="{name}",engine="{engine}",severity="{severity}"}}', "value": 1}
                            for name, engine, severity in sorted(expected_alerts(scenario))
                        ],
                    }
                ],
            }
        ],
    }


def input_series(scenario: Scenario) -> list[dict[str, str]]:
    series = dict(scenario.series)
    if scenario.agent:
        series |= agent_series(scenario)
    return [{"series": name, "values": notation} for name, notation in series.items()]


def agent_series(scenario: Scenario) -> dict[str, str]:
    """What an agent beside the engines exposes, scraped once a minute."""
    columns: dict[str, list[str]] = {}
    seen = _seen(scenario)
    for step in range(scenario.steps):
        now = step * scenario.interval_seconds
        if now % 60:
            continue
        past = [one for one in seen if now - DEFAULTS.alert_range_seconds < one.at_seconds <= now]
        made = windows(past)
        judged = report(made, facts={window.key.target: scenario.facts for window in made})
        for family in text_string_to_metric_families(exposition(judged, at_seconds=now).decode()):
            for sample in family.samples:
                labels = {**sample.labels, "job": "kvwatch", "instance": "pod-1:9109"}
                name = sample.name + "{" + ",".join(f'{key}="{labels[key]}"' for key in sorted(labels)) + "}"
                columns.setdefault(name, ["_"] * scenario.steps)[step] = repr(sample.value)
    return {name: " ".join(column) for name, column in columns.items()}


def expected_alerts(scenario: Scenario) -> set[tuple[str, str, str]]:
    """(alert, engine, severity). A critical condition is a warning too, where the check has a rule for it."""
    return {
        (check.alert_name, key.engine, rule.severity.value)
        for key in findings(scenario)
        for check in checks.ALL
        for rule in check.alert(DEFAULTS)
        if _reaches(scenario.expected(check.id, key.engine), rule.severity)
    }


def _reaches(status: Status | None, severity: Status) -> bool:
    return status is not None and status in FIRING and status.rank >= severity.rank


def check_named(name: str) -> Check:
    return next(check for check in checks.ALL if check.id == name)
