"""The alert rules in a real Prometheus, from a served page to a receiver, and on VictoriaMetrics."""

import urllib.parse
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml
from parts import alertmanager, eventually, get_json, prometheus, serving, victoria_metrics, webhook
from prometheus_releases import Program, found

from kvwatch.generate import rules
from kvwatch.thresholds import DEFAULTS

pytestmark = pytest.mark.real

THRASH = Path(__file__).parent / "data" / "captures" / "thrash"
QUICK = replace(DEFAULTS, alert_range_seconds=5, alert_for_seconds=1, alert_critical_for_seconds=1)


def replay(pages: Iterator[bytes]) -> type[BaseHTTPRequestHandler]:
    """A server that gives the next page at every request, and the last one for ever."""
    last: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = next(pages, None) or last[0]
            last[:] = [body]
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Silent: the test's output is its own."""

    return Handler


@pytest.mark.parametrize("server", found("prometheus"), ids=str)
def test_a_thrashing_engine_reaches_the_receiver_through_prometheus_and_alertmanager(
    server: Program, tmp_path: Path
) -> None:
    (tmp_path / "rules.yaml").write_text(rules.to_yaml(rules.rule_file(QUICK)))
    pages = iter([page.read_bytes() for page in sorted(THRASH.glob("*.prom"))])
    with webhook() as received, serving(replay(pages)) as engine:
        route = {"receiver": "all", "group_wait": "0s", "group_interval": "1s", "group_by": ["alertname"]}
        receivers = [{"name": "all", "webhook_configs": [{"url": received.url}]}]
        with alertmanager(tmp_path, yaml.safe_dump({"route": route, "receivers": receivers})) as manager:
            config = {
                "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
                "rule_files": [str(tmp_path / "rules.yaml")],
                "scrape_configs": [{"job_name": "vllm", "static_configs": [_target(engine)]}],
                "alerting": {"alertmanagers": [{"static_configs": [_target(manager)]}]},
            }
            with prometheus(tmp_path, yaml.safe_dump(config), path=server.path) as url:
                alert = eventually(lambda: _critical(received.alerts("firing")), within_seconds=60)[0]
                assert "VLLMPreemptionsSustained" == alert["labels"]["alertname"]
                assert "preemptions_sustained" == alert["labels"]["check"]
                assert alert["annotations"]["summary"].startswith("tiny-llama engine 0 on 127.0.0.1:")
                assert alert["annotations"]["runbook_url"].endswith("/docs/checks/preemptions_sustained.md")
                for group in get_json(f"{url}/api/v1/rules")["data"]["groups"]:
                    assert [] == [rule["lastError"] for rule in group["rules"] if rule["health"] == "err"]


def test_victoria_metrics_takes_every_expression(tmp_path: Path) -> None:
    content = rules.rule_file()
    with victoria_metrics(tmp_path, yaml.safe_dump({"scrape_configs": []})) as url:
        for rule in [rule for group in content["groups"] for rule in group["rules"]]:
            answer = get_json(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': rule['expr']})}")
            assert "success" == answer["status"], rule


def _target(url: str) -> dict[str, list[str]]:
    return {"targets": [url.removeprefix("http://")]}


def _critical(alerts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [alert for alert in alerts if alert["labels"]["severity"] == "critical"]
