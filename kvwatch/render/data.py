"""Report -> plain mappings and lists, and these -> JSON or YAML. `schema_version` and `kind` come first."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from kvwatch.report import EngineReport, Report

SCHEMA_VERSION = 1


def plain(value: Any) -> Any:
    """Dataclasses, enums, tuples and mappings -> what JSON knows. Infinity and NaN become null."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return value


def report_data(report: Report) -> dict[str, Any]:
    """The `kind: report` document."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "report",
        "window_seconds": round(report.window_seconds, 3),
        "worst": report.worst.value,
        "engines": [_engine(engine) for engine in report.engines],
        "notes": list(report.notes),
    }


def _engine(engine: EngineReport) -> dict[str, Any]:
    capacity = plain(engine.capacity)
    capacity["source"] = dict(engine.capacity.source)
    return {
        "engine": engine.key.engine,
        "model_name": engine.key.model_name,
        "target": engine.key.target,
        "vllm_version": engine.vllm_version,
        "vllm_version_source": engine.vllm_version_source or None,
        "at_seconds": engine.at_seconds,
        "window_seconds": round(engine.window_seconds, 3),
        "restarts": engine.restarts,
        "worst": engine.worst.value,
        "observed": plain(engine.observed),
        "capacity": capacity,
        "budget": _budget(engine),
        "findings": plain(engine.findings),
        "recommendations": plain(engine.recommendations),
        "options": plain(engine.options),
        "simulation": _simulation(engine),
        "withheld": plain(engine.withheld),
    }


def _simulation(engine: EngineReport) -> dict[str, Any] | None:
    if engine.simulation is None:
        return None
    document: dict[str, Any] = plain(engine.simulation)
    document["inputs"] = [{"name": n, "value": plain(v), "origin": o} for n, v, o in engine.simulation.inputs]
    return document


def _budget(engine: EngineReport) -> dict[str, Any] | None:
    """The budget as `kvwatch budget` gives it, None where no model was given."""
    if engine.budget is None:
        return None
    from kvwatch.budget import costs_of  # noqa: PLC0415 -- loaded already where there is a budget
    from kvwatch.render.budget_data import budget_data  # noqa: PLC0415 -- the same

    return dict(plain(budget_data(costs_of(engine.budget.plan), engine.budget)))


def to_json(document: Mapping[str, Any]) -> str:
    import json  # noqa: PLC0415 -- text output does not need it

    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)


def to_yaml(document: Mapping[str, Any]) -> str:
    import yaml  # noqa: PLC0415 -- loaded only where YAML is asked for

    return str(yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True)).rstrip("\n")
