"""Every rule on real servers that scrape recorded engines: what is recorded has data, and what fires is right."""

import contextlib
import json
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from parts import eventually, get_json, prometheus, serving, victoria_metrics, vmalert, webhook
from prometheus_releases import Program, found
from test_dashboards import DATA, playing

from kvwatch.generate import rules
from kvwatch.thresholds import DEFAULTS

pytestmark = [pytest.mark.real, pytest.mark.slow]

QUICK = replace(DEFAULTS, alert_range_seconds=10, alert_for_seconds=1, alert_critical_for_seconds=1)
RULES = rules.rule_file(QUICK)
STILL = {"two-engines": "vllm-0.32.0-all-families.prom", "nim": "nim_llama31_8b.prom"}
CAPTURES = ("healthy", "thrash", "prefix")

# (job, series) -> why it has no data. NIM's page has few metrics and shows only what nothing else has, its cap.
EMPTY = {
    **dict.fromkeys(
        [(job, "engine:vllm_max_num_seqs:last") for job in (*CAPTURES, "two-engines")],
        "vLLM does not expose max_num_seqs; NIM does",
    ),
    ("two-engines", "engine:vllm_prefix_cache_hit_ratio:ratio10s"): "nothing is looked up on a page that stands still",
    ("two-engines", "engine:vllm_prefix_cache_hit_ratio:lifetime"): "no prefix was ever looked up there",
}
# 0/0, which is NaN: Prometheus stores it, VictoriaMetrics does not.
EMPTY_ON_VICTORIA_METRICS = {
    **EMPTY,
    ("two-engines", "engine:vllm_preemptions_per_request:ratio10s"): "nothing finishes on a page that stands still",
    ("two-engines", "engine:vllm_queue_time_seconds:mean10s"): "nothing is admitted on a page that stands still",
}
FIRES = {
    ("thrash", "VLLMPreemptionsSustained", "critical"),
    ("thrash", "VLLMPreemptionsSustained", "warning"),
    ("thrash", "VLLMKVCacheSaturated", "warning"),
    ("thrash", "VLLMRequestsQueueing", "warning"),
}

Server = Callable[[Path, dict[str, Any]], contextlib.AbstractContextManager[str]]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A scrape configuration of recorded engines: three that repeat their capture, and pages that stand still."""
    with contextlib.ExitStack() as stack:
        folders = {name: DATA / "captures" / name for name in CAPTURES}
        for name, file in STILL.items():
            folders[name] = tmp_path_factory.mktemp(name)
            (folders[name] / "0.prom").write_bytes((DATA / "exposition" / file).read_bytes())
        engines = {name: stack.enter_context(serving(playing(folder, again=True))) for name, folder in folders.items()}
        yield {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": [url.removeprefix("http://")]}]}
                for name, url in engines.items()
            ],
        }


def without_data(base: str) -> set[tuple[str, str]]:
    """(job, series) that never had data, though others of the job or of the series had."""
    names = [rule["record"] for rule in RULES["groups"][0]["rules"]]
    had = {
        (one["metric"]["job"], name)
        for name in names
        for one in instant(base, f'count by (job) (last_over_time({{__name__="{name}"}}[5m]))')
    }
    return {
        (job, name)
        for job in (*CAPTURES, *STILL)
        for name in names
        if job != "nim" or name == "engine:vllm_max_num_seqs:last"
    } - had


def fired(base: str) -> set[tuple[str, str, str]]:
    """(job, alert, severity) of the captures' alerts."""
    alerts = instant(base, 'last_over_time(ALERTS{alertstate="firing",job=~"healthy|thrash|prefix"}[5m])')
    return {(a["metric"]["job"], a["metric"]["alertname"], a["metric"]["severity"]) for a in alerts}


def instant(base: str, expr: str) -> Any:
    return get_json(f"{base}/api/v1/query?{urllib.parse.urlencode({'query': expr})}")["data"]["result"]


def judged(base: str, empty: set[tuple[str, str]]) -> None:
    eventually(lambda: without_data(base) <= empty and fired(base) >= FIRES, within_seconds=180)
    assert empty == without_data(base)
    assert FIRES == fired(base)


@pytest.mark.parametrize("server", found("prometheus"), ids=str)
def test_on_prometheus_every_rule_has_data_and_only_the_thrashing_engine_alarms(
    server: Program, scraped: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "rules.yaml").write_text(rules.to_yaml(RULES))
    config = {
        "global": {**scraped["global"], "evaluation_interval": "1s"},
        "scrape_configs": scraped["scrape_configs"],
        "rule_files": [str(tmp_path / "rules.yaml")],
    }
    with prometheus(tmp_path, yaml.safe_dump(config), path=server.path) as base:
        judged(base, set(EMPTY))
        groups = get_json(f"{base}/api/v1/rules")["data"]["groups"]
        assert {} == {
            rule["name"]: rule["lastError"] for group in groups for rule in group["rules"] if "lastError" in rule
        }


def test_on_victoria_metrics_every_rule_has_data_and_only_the_thrashing_engine_alarms(
    scraped: dict[str, Any], tmp_path: Path
) -> None:
    older = json.loads(json.dumps(RULES))
    for rule in older["groups"][1]["rules"]:
        del rule["keep_firing_for"]  # unknown to the vmalert of Debian 12, 1.79
    (tmp_path / "rules.yaml").write_text(rules.to_yaml(older))
    with (
        victoria_metrics(tmp_path, yaml.safe_dump(scraped)) as base,
        webhook() as notified,
        vmalert(tmp_path, tmp_path / "rules.yaml", base, notifier=notified.url),
    ):
        judged(base, set(EMPTY_ON_VICTORIA_METRICS))
