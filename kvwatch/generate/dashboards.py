"""Grafana dashboards as JSON: fleet, engine, incident timeline.

Everything follows from the metrics, checks and thresholds; nothing here depends on live data. Grafana's SDK is needed
here and nowhere else, so it is no dependency of kvwatch but of those who generate.
"""

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvwatch.checks import ALL
from kvwatch.checks.check import Check
from kvwatch.errors import SettingError
from kvwatch.thresholds import DEFAULTS, Thresholds

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders.dashboard import Dashboard

SDK = "grafana-foundation-sdk==1769699379!11.6.0"
SCHEMA_VERSION = 41
"""Of Grafana 11.6; later Grafana migrates it when it loads the dashboard."""


def dashboards(limits: Thresholds = DEFAULTS, *, checks: Iterable[Check] = ALL) -> dict[str, str]:
    """File name -> JSON of each dashboard. Raises SettingError where the SDK is missing."""
    try:
        from kvwatch.generate.engine_page import engine_page  # noqa: PLC0415 -- the SDK takes half a second to load
        from kvwatch.generate.fleet import fleet  # noqa: PLC0415
        from kvwatch.generate.incident import incident  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        if missing.name is None or not missing.name.startswith("grafana_foundation_sdk"):
            raise
        raise SettingError(
            f"dashboards are made with Grafana's SDK: pip install '{SDK}' (Python 3.11 or later)"
        ) from None
    known = {check.id: check for check in checks}
    builders: tuple[Callable[[Thresholds, dict[str, Check]], Dashboard], ...] = (fleet, engine_page, incident)
    return dict(_as_file(build(limits, known)) for build in builders)


def _as_file(builder: "Dashboard") -> tuple[str, str]:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder  # noqa: PLC0415

    content: dict[str, Any] = json.loads(JSONEncoder().encode(builder.build()))
    content["schemaVersion"] = SCHEMA_VERSION
    for variable in content["templating"]["list"]:
        for of_intervals in ("auto", "auto_min", "auto_count"):
            variable.pop(of_intervals, None)  # the SDK writes the defaults of interval variables for all kinds
    for annotation in content["annotations"]["list"]:
        # Fields of the Prometheus data source, which the SDK does not know.
        annotation |= {
            "titleFormat": annotation["name"],
            "textFormat": "{{alertname}} {{model_name}} {{instance}} {{target}}",
        }
    return f"{content['uid']}.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n"
