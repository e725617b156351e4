"""The Grafana dashboards: valid for Grafana, true to the metrics, and full of data on real servers."""

import contextlib
import json
import math
import re
import sys
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import jsonschema
import promql_parser
import pytest
import yaml
from click.testing import CliRunner
from parts import eventually, free_port, get_json, prometheus, running, serving, victoria_metrics
from test_live_budget import TINY

from kvwatch.checks import ALL
from kvwatch.checks.check import Check
from kvwatch.cli.generate import command
from kvwatch.generate import queries
from kvwatch.render.prometheus import CAPACITY, CHECK_STATUS, EVIDENCE, RECOMMENDED, SCRAPE_SUCCESS
from kvwatch.thresholds import DEFAULTS
from kvwatch.vllm_metrics import (
    KV_BLOCK_IDLE_BEFORE_EVICT,
    KV_BLOCK_LIFETIME,
    KV_BLOCK_REUSE_GAP,
    PREFIXES,
    PROCESS_START_TIME,
    SERIES,
)

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests/data"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "dashboards").glob("*.json"))}
SCHEMA = json.loads((DATA / "grafana/dashboard-11.6.0.schema.json").read_text())
PROMETHEUS_ANNOTATION_FIELDS = {"expr", "titleFormat", "textFormat"}  # of the data source's, not of Grafana's schema

ORDER = ["kvwatch-fleet.json", "kvwatch-engine.json", "kvwatch-incident.json"]

every_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=list(DASHBOARDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One query of a dashboard, with "All" chosen everywhere."""

    where: str
    expr: str
    instant: bool


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def filled_in(expr: str, rate_interval: str = "10s") -> str:
    """The query as Grafana sends it."""
    expr = expr.replace("$__rate_interval", rate_interval)
    return re.sub(r"\$(job|model_name|instance|engine|pod|target)\b", ".*", expr)


def asked(dashboard: dict[str, Any]) -> Iterator[Asked]:
    for panel in panels(dashboard):
        for target in panel["targets"]:
            where = f"{dashboard['uid']}: {panel['title']}: {target['refId']}"
            yield Asked(where=where, expr=filled_in(target["expr"]), instant=target.get("instant", False))
    for annotation in dashboard["annotations"]["list"]:
        where = f"{dashboard['uid']}: annotation {annotation['name']}"
        yield Asked(where=where, expr=filled_in(annotation["expr"]), instant=False)


ASKED = [query for dashboard in DASHBOARDS.values() for query in asked(dashboard)]


def nodes(expr: Any) -> Iterator[Any]:
    """An expression and all its parts, outermost first."""
    yield expr
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        part = getattr(expr, name, None)
        if part is not None:
            yield from nodes(part)
    for part in getattr(expr, "args", None) or ():
        yield from nodes(part)


def metric_names(expr: str) -> set[str]:
    """Names of the series an expression reads; a selector without a name is left out."""
    read = [n for n in nodes(promql_parser.parse(expr)) if isinstance(n, promql_parser.VectorSelector)]
    return {selector.name for selector in read if selector.name}


def test_the_committed_dashboards_are_what_the_code_makes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="Grafana's SDK needs Python 3.11")
    from kvwatch.generate.dashboards import dashboards

    assert dashboards() == {path.name: path.read_text() for path in (ROOT / "dashboards").glob("*.json")}


@every_dashboard
def test_a_dashboard_is_valid_for_grafana(dashboard: dict[str, Any]) -> None:
    content = json.loads(json.dumps(dashboard))
    for annotation in content["annotations"]["list"]:
        for field in PROMETHEUS_ANNOTATION_FIELDS:
            del annotation[field]
    jsonschema.Draft7Validator(SCHEMA).validate(content)
    assert dashboard["schemaVersion"] == 41


def test_the_schema_finds_a_field_that_grafana_does_not_know() -> None:
    content = json.loads(json.dumps(DASHBOARDS["kvwatch-fleet"]))
    content["panels"][0]["titel"] = "a typing error"
    assert not jsonschema.Draft7Validator(SCHEMA).is_valid(content)


@every_dashboard
def test_panels_have_ids_of_their_own_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert ids == sorted(set(ids))
    cells: Counter[tuple[int, int]] = Counter()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells.update(
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
    height = max(y for _, y in cells) + 1
    assert cells == Counter({(x, y): 1 for x in range(24) for y in range(height)})


@every_dashboard
def test_a_dashboard_lets_one_choose_where_to_look(dashboard: dict[str, Any]) -> None:
    variables = {v["name"]: v for v in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "model_name", "instance", "engine", "pod", "target"]
    one = {"instance", "pod"} if dashboard["uid"] == "kvwatch-engine" else set()
    for name in set(variables) - {"datasource"} - one:
        assert (variables[name]["allValue"], variables[name]["includeAll"], variables[name]["multi"]) == (
            ".*",
            True,
            True,
        )
    for name in one:
        assert not variables[name]["includeAll"]
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels(dashboard))
    assert all(t["datasource"]["uid"] == "${datasource}" for panel in panels(dashboard) for t in panel["targets"])


@every_dashboard
def test_every_panel_says_what_it_shows_and_in_which_unit(dashboard: dict[str, Any]) -> None:
    for panel in panels(dashboard):
        assert panel["title"]
        assert panel["description"]
        if panel["type"] in {"timeseries", "stat"}:
            assert panel["fieldConfig"]["defaults"]["unit"]


@every_dashboard
def test_columns_are_named_where_they_are_sorted_or_formatted(dashboard: dict[str, Any]) -> None:
    for panel in panels(dashboard):
        if panel["type"] != "table":
            continue
        [organize] = [one["options"] for one in panel["transformations"] if one["id"] == "organize"]
        named = {*organize["renameByName"].values(), *organize["indexByName"]}
        overrides = {one["matcher"]["options"] for one in panel["fieldConfig"]["overrides"]}
        assert overrides | {one["displayName"] for one in panel["options"]["sortBy"]} <= named
        assert len(organize["renameByName"]) >= len(panel["targets"])


def test_every_check_has_a_panel_with_a_link_to_its_runbook() -> None:
    links = [link for d in DASHBOARDS.values() for panel in panels(d) for link in panel.get("links", ())]
    runbooks = {check.runbook for check in ALL}
    assert {link["url"] for link in links} == runbooks
    assert [url for url in runbooks if not (ROOT / "docs/checks" / url.rpartition("/")[2]).exists()] == []


@pytest.mark.parametrize("check", ALL, ids=lambda check: check.id)
@every_dashboard
def test_a_check_that_is_shown_by_name_links_to_its_runbook(dashboard: dict[str, Any], check: Check) -> None:
    text = json.dumps([panel["fieldConfig"] for panel in panels(dashboard)])
    urls = {url for url in re.findall(r'"url": "([^"]+)"', text) if ".check}" in url}
    assert {re.sub(r"\$\{__(data\.fields|field\.labels)\.check\}", check.id, url) for url in urls} == {check.runbook}


@every_dashboard
def test_bands_are_coloured_by_what_their_values_mean(dashboard: dict[str, Any]) -> None:
    # With colours from thresholds Grafana merges values into the states between thresholds: no mapping is shown.
    modes = {p["fieldConfig"]["defaults"]["color"]["mode"] for p in panels(dashboard) if p["type"] == "state-timeline"}
    assert modes == {"fixed"}


@every_dashboard
def test_a_figure_that_is_not_known_is_grey_and_says_so(dashboard: dict[str, Any]) -> None:
    # Grafana gives a missing value the colour of the lowest threshold, which may be green.
    for panel in panels(dashboard):
        if panel["type"] != "stat":
            continue
        defaults = panel["fieldConfig"]["defaults"]
        [missing] = [one["options"] for one in defaults["mappings"] if one["type"] == "special"]
        assert missing["match"] == "null+nan"
        assert (missing["result"]["color"], missing["result"]["text"]) == ("#808080", defaults["noValue"])


@every_dashboard
def test_what_the_agent_leaves_as_it_is_differs_from_what_is_not_known(dashboard: dict[str, Any]) -> None:
    proposals = [p for p in panels(dashboard) if any("kvwatch_recommended_" in t["expr"] for t in p["targets"])]
    for panel in proposals:
        config = json.dumps(panel["fieldConfig"], sort_keys=True)
        assert '{"-1": {"color": "#808080", "index": 0, "text": "none"}}' in config
        assert panel["fieldConfig"]["defaults"]["noValue"] == "no agent"


def test_the_pictures_show_every_dashboard_dark_and_light_at_two_widths() -> None:
    page = (ROOT / "docs/dashboards.md").read_text()
    names = [uid.removeprefix("kvwatch-") for uid in DASHBOARDS]
    pictures = {f"dashboard-{n}-{theme}-{w}.png" for n in names for theme in ("dark", "light") for w in (1280, 1920)}
    pictures |= {"dashboard-engine-top.png"}
    assert pictures == {path.name for path in (ROOT / "docs/images").iterdir()}
    assert [name for name in sorted(pictures) if f"(images/{name})" not in page] == []
    assert [name for name in sorted(pictures) if (ROOT / "docs/images" / name).stat().st_size > 300_000] == []


def test_every_setting_that_is_ever_proposed_is_shown() -> None:
    shown = {name for query in ASKED for name in metric_names(query.expr) if name.startswith("kvwatch_recommended_")}
    assert shown == {name for name, _ in RECOMMENDED.values()}


def test_colours_change_where_the_checks_do() -> None:
    values = {
        step["value"]
        for d in DASHBOARDS.values()
        for panel in panels(d)
        for step in panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", ())
    }
    of_checks = {
        DEFAULTS.kv_cache_saturated_ratio,
        DEFAULTS.preemptions_per_request_warning,
        DEFAULTS.preemptions_per_request_critical,
        DEFAULTS.queue_time_warning_seconds,
        -DEFAULTS.capacity_deviation_ratio,
    }
    assert values - {None} == of_checks | {1}


@pytest.mark.parametrize("query", ASKED, ids=lambda query: query.where)
def test_a_query_parses_and_reads_metrics_that_exist(query: Asked) -> None:
    of_blocks = {
        f"{prefix}{metric.name}{part}"
        for metric in (KV_BLOCK_LIFETIME, KV_BLOCK_IDLE_BEFORE_EVICT, KV_BLOCK_REUSE_GAP)
        for prefix in PREFIXES
        for part in ("_bucket", "_sum", "_count")
    }
    of_the_agent = {name for table in (CAPACITY, EVIDENCE, RECOMMENDED) for name, _ in table.values()}
    known = {*SERIES, *of_blocks, *of_the_agent, CHECK_STATUS, SCRAPE_SUCCESS, PROCESS_START_TIME, "ALERTS", "up"}
    assert metric_names(query.expr) - known == set()
    assert "$" not in query.expr


def test_generate_writes_the_dashboards_and_check_names_what_is_stale(tmp_path: Path) -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="Grafana's SDK needs Python 3.11")

    def generate(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(command, ["dashboards", "--output", str(tmp_path), *arguments])
        return result.exit_code, result.stdout

    names = [path.name for path in sorted((ROOT / "dashboards").glob("*.json"))]
    assert generate("--check") == (1, "".join(f"stale: {tmp_path / name}\n" for name in sorted(names, key=ORDER.index)))
    assert generate() == (0, "")
    assert generate("--check") == (0, "")
    assert [(tmp_path / name).read_text() for name in names] == [
        (ROOT / "dashboards" / name).read_text() for name in names
    ]
    (tmp_path / names[0]).write_text("{}")
    assert generate("--check") == (1, f"stale: {tmp_path / names[0]}\n")


def test_no_query_reads_a_recording_rule() -> None:
    assert [query.where for query in ASKED if re.search(r"\bengine:vllm_", query.expr)] == []


# --- on real servers ------------------------------------------------------------------------------------------------

SPEED = 2.0
# Pages of other servers and versions; nothing changes on them, so rates over them are 0.
STILL = {
    "two-engines": "vllm-0.32.0-all-families.prom",
    "v0.6": "v0.6_v0engine_aibrix_qwen25coder15b.prom",
    "both-names": "v0.10.0_glm45_both_names.prom",
    "nim": "nim_llama31_8b.prom",
}
GOES_DOWN = "v0.6"
UP_SECONDS = 8.0
NO_RULES = "VictoriaMetrics evaluates no alert rules; vmalert does"
# Query -> why it has no data here.
EMPTY = {
    "kvwatch-engine: Idle before eviction, reuse gap: B": "no block is used twice while a capture lasts",
}
EMPTY_ON_VICTORIA_METRICS = {
    **EMPTY,
    "kvwatch-fleet: Alerts firing: A": NO_RULES,
    **{f"{uid}: annotation {name}": NO_RULES for uid in DASHBOARDS for name in ("Critical alerts", "Warnings")},
    "kvwatch-incident: Alerts, restarts and outages: A": NO_RULES,
}


def playing(folder: Path, *, again: bool = False, up_seconds: float = math.inf) -> type[BaseHTTPRequestHandler]:
    """A server that shows a capture at SPEED from its first scrape on; `again`: from the start when it is over. After
    `up_seconds` it answers 503.
    """
    pages = sorted(folder.glob("*.prom"))
    first = int(pages[0].stem)
    offsets = [(int(page.stem) - first) / 1000 / SPEED for page in pages]
    started: list[float] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            started[:] = started or [time.monotonic()]
            elapsed = time.monotonic() - started[0]
            self.send_response(200 if elapsed < up_seconds else 503)
            if again:
                elapsed %= offsets[-1] + 1
            shown = max(place for place, offset in enumerate(offsets) if offset <= elapsed)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(pages[shown].read_bytes())

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

    return Handler


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    prometheus: str
    victoria_metrics: str
    started_seconds: float
    thrashing_seconds: float  # when instant queries are asked for

    def result(self, base: str, query: Asked) -> list[Any]:
        parameters: dict[str, str | float] = {"query": query.expr}
        if query.instant:
            path = "query"
            parameters["time"] = self.thrashing_seconds
        else:
            path = "query_range"
            parameters |= {"start": self.started_seconds, "end": time.time(), "step": 1}
        answer = get_json(f"{base}/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
        assert answer["status"] == "success"
        result = answer["data"]["result"]
        assert isinstance(result, list)
        return result


def instant(base: str, expr: str) -> Any:
    return get_json(f"{base}/api/v1/query?{urllib.parse.urlencode({'query': expr})}")["data"]["result"]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Prometheus and VictoriaMetrics that have scraped all captures and the agent that watched them."""
    folder = tmp_path_factory.mktemp("dashboards")
    with contextlib.ExitStack() as stack:
        moving = {
            name: stack.enter_context(serving(playing(DATA / "captures" / name, again=name == "healthy")))
            for name in ("healthy", "thrash", "prefix")
        }
        still = {}
        for name, file in STILL.items():
            target = folder / name
            target.mkdir()
            (target / "0.prom").write_bytes((DATA / "exposition" / file).read_bytes())
            up_seconds = UP_SECONDS if name == GOES_DOWN else math.inf
            still[name] = stack.enter_context(serving(playing(target, up_seconds=up_seconds)))
        agent = f"127.0.0.1:{free_port()}"
        model = folder / "config.json"
        model.write_text(json.dumps(TINY))
        watch = [sys.executable, "-m", "kvwatch", "agent", "--listen", agent, "--interval", "1s", "--window", "10s"]
        watch += ["--model", str(model)]
        for url in (*moving.values(), still[GOES_DOWN]):
            watch += ["--target", url]
        stack.enter_context(running(watch, log=folder / "agent.log", ready_url=f"http://{agent}/metrics"))
        config, rules = scrape_config({**moving, **still}, agent), folder / "rules.yml"
        rules.write_text(yaml.safe_dump(ONE_ALERT))
        started = time.time()
        victoria = stack.enter_context(victoria_metrics(folder, yaml.safe_dump(config)))
        config["global"]["evaluation_interval"] = "1s"
        found = stack.enter_context(prometheus(folder, yaml.safe_dump({**config, "rule_files": [str(rules)]})))
        for base, awaited in (
            (found, "count(kvwatch_recommended_gateway_max_in_flight)"),
            (victoria, "count(kvwatch_recommended_gateway_max_in_flight)"),
            (found, 'count(ALERTS{alertstate="firing"})'),
        ):
            eventually(partial(instant, base, awaited), within_seconds=60)
        thrashing = time.time()
        # The captures last 20 to 38 seconds at their own speed; the healthy one begins anew when it is over.
        restarted = 'resets(vllm:generation_tokens_total{job="healthy"}[1m]) > 0'
        for base in (found, victoria):
            eventually(partial(instant, base, restarted), within_seconds=60)
        yield Servers(prometheus=found, victoria_metrics=victoria, started_seconds=started, thrashing_seconds=thrashing)


ONE_ALERT = {
    "groups": [
        {
            "name": "test",
            "rules": [
                {
                    "alert": "VLLMPreemptionsSustained",
                    "expr": "rate(vllm:num_preemptions_total[10s]) > 0",
                    "labels": {"severity": severity},
                }
                for severity in ("warning", "critical")
            ],
        }
    ]
}


def scrape_config(targets: dict[str, str], agent: str) -> dict[str, Any]:
    addresses = {name: url.removeprefix("http://") for name, url in targets.items()}
    return {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [address]}]}
            for job, address in {**addresses, "kvwatch": agent}.items()
        ],
    }


@pytest.mark.real
@pytest.mark.slow
def test_every_query_has_data_on_prometheus(servers: Servers) -> None:
    empty = {query.where for query in ASKED if not servers.result(servers.prometheus, query)}
    assert empty == set(EMPTY)


@pytest.mark.real
@pytest.mark.slow
def test_every_generation_of_names_is_drawn(servers: Servers) -> None:
    [query] = [query for query in ASKED if query.where == "kvwatch-fleet: KV cache held: A"]
    for base in (servers.prometheus, servers.victoria_metrics):
        jobs = Counter(series["metric"]["job"] for series in servers.result(base, query))
        assert jobs == {"healthy": 1, "thrash": 1, "prefix": 1, "two-engines": 2, "v0.6": 1, "both-names": 1, "nim": 1}


@pytest.mark.real
@pytest.mark.slow
def test_every_query_has_data_on_victoria_metrics(servers: Servers) -> None:
    empty = {query.where for query in ASKED if not servers.result(servers.victoria_metrics, query)}
    assert empty == set(EMPTY_ON_VICTORIA_METRICS)


def now(base: str, where: str) -> Any:
    [query] = [query for query in ASKED if query.where == where]
    return instant(base, query.expr)


@pytest.mark.real
@pytest.mark.slow
def test_an_engine_that_is_down_is_counted_and_its_verdict_says_so(servers: Servers) -> None:
    for base in (servers.prometheus, servers.victoria_metrics):
        assert [series["value"][1] for series in now(base, "kvwatch-fleet: Down: A")] == ["1"]
        states = {
            series["metric"]["job"]: series["value"][1]
            for series in now(base, "kvwatch-fleet: Engines, worst first: A")
        }
        assert {job for job, state in states.items() if state == "1"} == {GOES_DOWN}
        verdicts = [series["value"][1] for series in now(base, "kvwatch-fleet: Verdict by engine: A")]
        assert Counter(verdicts)[str(queries.UNREADABLE)] == 1
        assert len(verdicts) == 4


@pytest.mark.real
@pytest.mark.slow
def test_a_setting_that_is_not_proposed_is_told_from_one_that_is_not_known(servers: Servers) -> None:
    for base in (servers.prometheus, servers.victoria_metrics):
        for place in "ABCDEFG":
            proposed = [series["value"][1] for series in now(base, f"kvwatch-engine: Proposed settings: {place}")]
            assert len(proposed) == 4
            assert str(queries.NOTHING) in proposed  # at least of the engine that is well
