"""The alert rules: what they are made of, when they fire, and what their annotations say."""

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import scenario_file
import yaml
from click.testing import CliRunner
from parts import alertmanager, binary, eventually, get_json
from prometheus_releases import Program

from kvwatch import checks
from kvwatch.checks.check import reported
from kvwatch.cli.generate import command, thresholds
from kvwatch.errors import SettingError
from kvwatch.exposition import read_samples
from kvwatch.finding import Status
from kvwatch.generate import rules
from kvwatch.recording import duration, joined, selectors, signals
from kvwatch.thresholds import DEFAULTS
from kvwatch.vllm_metrics import KV_CACHE_USAGE, SERIES

ROOT = Path(__file__).parent.parent
RULES = rules.rule_file()
RECORDED = RULES["groups"][0]["rules"]
ALERTS = RULES["groups"][1]["rules"]


def rule_id(rule: dict[str, Any]) -> str:
    return str(rule.get("record") or f"{rule['alert']}-{rule['labels']['severity']}")


every_rule = pytest.mark.parametrize("rule", [*RECORDED, *ALERTS], ids=rule_id)
GROUPS = [rules.RECORDING_GROUP, rules.ALERT_GROUP]
OVER_A_RANGE = {
    "rate",
    "increase",
    "min_over_time",
    "max_over_time",
    "avg_over_time",
    "last_over_time",
    "deriv",
    "changes",
}


def nodes(expr: Any) -> Iterator[Any]:
    """An expression and all its parts, outermost first."""
    yield expr
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        part = getattr(expr, name, None)
        if part is not None:
            yield from nodes(part)
    for part in getattr(expr, "args", None) or ():
        yield from nodes(part)


def names(expr: str) -> set[str]:
    """Names of the series an expression reads."""
    read = [n for n in nodes(promql_parser.parse(expr)) if isinstance(n, promql_parser.VectorSelector)]
    return {str(selector.name) for selector in read}


# What they are made of ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["prometheus", "prometheusrule"])
def test_promtool_finds_nothing_to_complain_about(kind: str, promtool: Program, tmp_path: Path) -> None:
    text = CliRunner().invoke(command, ["rules", "--output", "-", "--format", kind]).stdout
    content = yaml.safe_load(text)
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(content if kind == "prometheus" else content["spec"]))
    done = promtool.run("check", "rules", "--lint=all", "--lint-fatal", file)
    assert 0 == done.returncode, done.stdout + done.stderr


def test_the_resource_of_the_operator_holds_the_same_groups() -> None:
    resource = rules.prometheus_rule()
    assert ("monitoring.coreos.com/v1", "PrometheusRule") == (resource["apiVersion"], resource["kind"])
    assert RULES == resource["spec"]


@every_rule
def test_every_expression_parses(rule: dict[str, Any]) -> None:
    assert promql_parser.parse(rule["expr"]).prettify()


@every_rule
def test_a_counter_is_read_through_a_rate_and_a_gauge_is_not(rule: dict[str, Any]) -> None:
    tree = promql_parser.parse(rule["expr"])
    calls = [n for n in nodes(tree) if isinstance(n, promql_parser.Call) and n.func.name in {"rate", "increase"}]
    rated = {call.args[0].vector_selector.name for call in calls}
    counters = {name for name in names(rule["expr"]) if name.endswith(("_total", "_sum", "_count", "_bucket"))}
    if rule.get("record", "").endswith(":lifetime"):  # what is usual, to compare a rate with
        assert rated == set()
        return
    assert rated == counters


@every_rule
def test_every_series_a_rule_reads_exists(rule: dict[str, Any]) -> None:
    above = [r["record"] for r in RECORDED]
    if "record" in rule:
        above = above[: above.index(rule["record"])]
    for name in names(rule["expr"]):
        assert name in above or name in SERIES or name == "up" or name.startswith("kvwatch_"), name


def test_every_recording_rule_has_the_form_level_metric_operation() -> None:
    operation = r"(last|seen|info|lifetime|(min|max|avg|deriv|changes|rate|increase|ratio|mean|forecast)\d+[smh])"
    for rule in RECORDED:
        assert re.fullmatch(rf"engine:vllm_[a-z_]+:{operation}", rule["record"])


def test_no_rule_names_an_engine_or_a_model() -> None:
    text = json.dumps(RULES)
    assert set() == set(re.findall(r'\b(?:engine|model_name|job|instance)=~?\\"[^"\\]+', text))


def test_the_new_name_stands_before_the_old_one() -> None:
    found = selectors(KV_CACHE_USAGE)
    assert "vllm:kv_cache_usage_perc" == found[0]
    assert found.index("ray_vllm_kv_cache_usage_perc") < found.index("vllm:gpu_cache_usage_perc")


def test_a_bare_name_counts_only_where_a_model_is_named() -> None:
    assert 'kv_cache_usage_perc{model_name!=""}' in joined(KV_CACHE_USAGE, "{}").split("\nor ")


def test_a_duration_is_written_in_the_largest_whole_unit() -> None:
    assert ["5m", "90s", "1h", "0s"] == [duration(300), duration(90), duration(3600), duration(0)]


@pytest.mark.parametrize("rule", ALERTS, ids=rule_id)
def test_an_alert_waits_holds_on_and_leads_to_its_page(rule: dict[str, Any]) -> None:
    check = scenario_file.check_named(rule["labels"]["check"])
    assert check.alert_name == rule["alert"]
    assert rule["labels"]["severity"] in {"warning", "critical"}
    assert rule["for"] != "0s"
    assert rule["keep_firing_for"] != "0s"
    assert check.runbook == rule["annotations"]["runbook_url"]
    assert (ROOT / "docs" / "checks" / f"{check.id}.md").is_file()
    assert re.search(r"\$labels\.(engine|target)", rule["annotations"]["summary"])


def test_every_check_has_an_alert() -> None:
    assert {check.alert_name for check in checks.ALL} == {rule["alert"] for rule in ALERTS}


def test_what_an_agent_reports_is_compared_with_the_code_of_the_status() -> None:
    assert 'kvwatch_check_status{check="x"} == 2' == reported("x", Status.CRITICAL)


# When they fire -----------------------------------------------------------------------------------------------------


def judged(promtool: Program, folder: Path, group: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
    (folder / "rules.yaml").write_text(rules.to_yaml(RULES))
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "group_eval_order": GROUPS,
        "tests": [{"interval": "15s", **group}],
    }
    return promtool.judge(folder, test)


def fires(alert: str, minute: int, *severities: str) -> dict[str, Any]:
    return {
        "expr": f'group by (severity) (ALERTS{{alertname="{alert}",alertstate="firing"}})',
        "eval_time": f"{minute}m",
        "exp_samples": [{"labels": f'{{severity="{severity}"}}', "value": 1} for severity in severities],
    }


def series(**values: str) -> list[dict[str, str]]:
    labels = '{engine="0",instance="pod-1:8000",job="vllm",model_name="m"}'
    return [{"series": f"vllm:{name}{labels}", "values": notation} for name, notation in values.items()]


def test_an_alert_waits_until_its_condition_has_lasted(promtool: Program, tmp_path: Path) -> None:
    group = {
        "input_series": series(kv_cache_usage_perc="0.99x120", num_requests_waiting="0x40 4x80"),
        # the queue starts after minute 10, fills the range of 5 minutes at 15, and holds for 5 more
        "promql_expr_test": [
            *(fires("VLLMKVCacheSaturated", minute) for minute in (9, 14, 19)),
            fires("VLLMKVCacheSaturated", 21, "warning"),
        ],
    }
    done = judged(promtool, tmp_path, group)
    assert 0 == done.returncode, done.stderr


def test_a_queue_that_breaks_off_now_and_then_is_one_alert(promtool: Program, tmp_path: Path) -> None:
    queue = " ".join(["5x46 0"] * 7)  # every 12 minutes one scrape without a queue
    group = {
        "input_series": series(kv_cache_usage_perc="0.99x340", num_requests_waiting=queue),
        "promql_expr_test": [fires("VLLMKVCacheSaturated", minute, "warning") for minute in range(11, 80)],
    }
    done = judged(promtool, tmp_path, group)
    assert 0 == done.returncode, done.stderr


def test_usage_that_swings_around_the_threshold_for_an_hour_never_alarms(promtool: Program, tmp_path: Path) -> None:
    usage = " ".join(["0.97x11 0.92x11"] * 11)  # three minutes above, three below
    group = {
        "input_series": series(kv_cache_usage_perc=usage, num_requests_waiting="5x260"),
        "promql_expr_test": [fires("VLLMKVCacheSaturated", minute) for minute in range(65)],
    }
    done = judged(promtool, tmp_path, group)
    assert 0 == done.returncode, done.stderr


def test_an_alert_ends_after_its_condition(promtool: Program, tmp_path: Path) -> None:
    group = {
        "input_series": series(kv_cache_usage_perc="0.99x240", num_requests_waiting="4x80 0x160"),
        "promql_expr_test": [
            fires("VLLMKVCacheSaturated", 20, "warning"),
            fires("VLLMKVCacheSaturated", 34, "warning"),
            fires("VLLMKVCacheSaturated", 37),
        ],
    }
    done = judged(promtool, tmp_path, group)
    assert 0 == done.returncode, done.stderr


def test_a_critical_alert_ends_sooner_than_its_warning(promtool: Program, tmp_path: Path) -> None:
    group = {  # at minute 24 the range of five minutes holds fewer preemptions than is critical, at 25 none
        "input_series": series(num_preemptions_total="0+6x80 480x120", request_success_total="0+15x201"),
        "promql_expr_test": [
            fires("VLLMPreemptionsSustained", 27, "critical", "warning"),
            fires("VLLMPreemptionsSustained", 31, "warning"),
            fires("VLLMPreemptionsSustained", 42),
        ],
    }
    done = judged(promtool, tmp_path, group)
    assert 0 == done.returncode, done.stderr


def test_a_target_that_lost_its_metrics_is_remembered_for_an_hour(promtool: Program, tmp_path: Path) -> None:
    quiet, other = ('engine="0",instance="quiet",job="vllm"', 'engine="0",instance="other",job="vllm"')
    group = {
        "input_series": [
            {"series": f"vllm:kv_cache_usage_perc{{{quiet}}}", "values": "0x40 stale"},
            {"series": f"vllm:kv_cache_usage_perc{{{other}}}", "values": "0x400"},  # else no engine is scraped at all
            {"series": 'up{instance="quiet",job="vllm"}', "values": "1x400"},
        ],
        "promql_expr_test": [
            {
                "expr": 'group by (instance) (ALERTS{alertname="VLLMMetricsMissing",alertstate="firing",metric=""})',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": '{instance="quiet"}', "value": 1}] if fires_then else [],
            }
            # lost at minute 10, remembered until 70, and the alert stays for 15 minutes
            for minute, fires_then in ((60, True), (80, True), (90, False))
        ],
    }
    done = judged(promtool, tmp_path, group)
    assert 0 == done.returncode, done.stderr


def test_a_live_target_that_lost_its_metrics_is_missing_and_one_that_is_gone_is_not(
    promtool: Program, tmp_path: Path
) -> None:
    def engine(instance: str, usage: str) -> list[dict[str, str]]:
        labels = f'{{engine="0",instance="{instance}",job="vllm",model_name="m"}}'
        present = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
        return [{"series": f"vllm:{name}{labels}", "values": usage} for name in present]

    up = [
        {"series": 'up{instance="quiet",job="vllm"}', "values": "1x160"},
        {"series": 'up{instance="removed",job="vllm"}', "values": "1x40 stale"},
        {"series": 'up{instance="healthy",job="vllm"}', "values": "1x160"},
    ]
    group = {
        "input_series": [
            *engine("quiet", "0x40 stale"),
            *engine("removed", "0x40 stale"),
            *engine("healthy", "0x160"),
            *up,
        ],
        "promql_expr_test": [
            {
                "expr": 'group by (instance) (ALERTS{alertname="VLLMMetricsMissing",alertstate="firing"})',
                "eval_time": "30m",
                "exp_samples": [{"labels": '{instance="quiet"}', "value": 1}],
            }
        ],
    }
    done = judged(promtool, tmp_path, group)
    assert 0 == done.returncode, done.stderr


def test_a_prometheus_without_any_engine_says_so(promtool: Program, tmp_path: Path) -> None:
    group = {
        "input_series": [{"series": 'up{instance="a",job="node"}', "values": "1x80"}],
        "alert_rule_test": [
            {
                "eval_time": "10m",
                "alertname": "VLLMMetricsMissing",
                "exp_alerts": [
                    {
                        "exp_labels": {"severity": "warning", "check": "metrics_missing"},
                        "exp_annotations": {
                            "summary": "no vLLM engine is scraped",
                            "description": rules.description(scenario_file.check_named("metrics_missing")),
                            "runbook_url": scenario_file.check_named("metrics_missing").runbook,
                        },
                    }
                ],
            }
        ],
    }
    done = judged(promtool, tmp_path, group)
    assert 0 == done.returncode, done.stderr


def test_what_the_agent_reports_fires(promtool: Program, tmp_path: Path) -> None:
    labels = 'engine="0",instance="pod-1:9109",job="kvwatch",model_name="m"'
    status = {"concurrency_oversubscribed": 1, "context_exceeds_capacity": 2, "requests_queueing": 1}
    group = {
        "input_series": [
            *(
                {"series": f'kvwatch_check_status{{check="{check}",{labels}}}', "values": f"{code}x60"}
                for check, code in status.items()
            ),
            {"series": f"kvwatch_capacity_deviation_ratio{{{labels}}}", "values": "-0.2x60"},
            {"series": 'kvwatch_scrape_success{job="kvwatch",target="http://pod-1:8000"}', "values": "0x60"},
        ],
        "promql_expr_test": [
            fires("VLLMConcurrencyOversubscribed", 10, "warning"),
            fires("VLLMContextExceedsCapacity", 10, "critical"),
            fires("VLLMCapacityBelowBudget", 10, "warning"),
            fires("VLLMMetricsMissing", 10, "critical", "warning"),  # no target is read, and no vLLM is scraped
            fires("VLLMRequestsQueueing", 10),  # Prometheus judges that itself, from vLLM's metrics
        ],
    }
    done = judged(promtool, tmp_path, group)
    assert 0 == done.returncode, done.stderr


@pytest.mark.parametrize("ratio", ["-0.04", "0.3"])
def test_a_pool_near_or_above_its_budget_is_silent(ratio: str, promtool: Program, tmp_path: Path) -> None:
    labels = '{engine="0",instance="pod-1:9109",job="kvwatch",model_name="m"}'
    group = {
        "input_series": [{"series": f"kvwatch_capacity_deviation_ratio{labels}", "values": f"{ratio}x60"}],
        "promql_expr_test": [fires("VLLMCapacityBelowBudget", 10)],
    }
    done = judged(promtool, tmp_path, group)
    assert 0 == done.returncode, done.stderr


PAGES = {path.stem: path for path in sorted((ROOT / "tests" / "data" / "exposition").glob("*.prom"))}
INCOMPLETE = {  # pages of other servers, of a server without requests yet, and excerpts from bug reports
    "dp2_engines",
    "nim_llama31_8b",
    "triton_backend_readme",
    "v0.10.0_glm45_both_names",
    "v0.8_num_gpu_blocks_none",
    "waiting_by_reason",
}


@pytest.mark.parametrize("name", PAGES)
def test_the_rules_evaluate_on_a_real_page(name: str, promtool: Program, tmp_path: Path) -> None:
    """A rule that gives one series twice is an error of its evaluation, which fails the test."""
    constant = {}
    for sample in read_samples(PAGES[name].read_text()):
        labels = {**sample.labels, "instance": "pod-1:8000", "job": "vllm"}
        text = ",".join(f"{key}={json.dumps(value)}" for key, value in sorted(labels.items()))
        constant[f"{sample.name}{{{text}}}"] = f"{sample.value!r}x60"
    group = {
        "input_series": [{"series": series, "values": values} for series, values in constant.items()],
        "promql_expr_test": [fires("VLLMMetricsMissing", 12, *(["warning"] if name in INCOMPLETE else []))],
    }
    done = judged(promtool, tmp_path, group)
    assert 0 == done.returncode, done.stderr


# What their annotations say -----------------------------------------------------------------------------------------

WHO = "m engine 0 on pod-1:8000"
SUMMARIES = {
    "full_and_queueing": ("VLLMKVCacheSaturated", f"the KV pool of {WHO} is 98.5% full and requests wait for it"),
    "many_preemptions": ("VLLMPreemptionsSustained", f"{WHO} preempts 0.12 times per finished request"),
    "thrashing_without_a_finish": ("VLLMPreemptionsSustained", f"{WHO} preempts +Inf times per finished request"),
    "deadlock": ("VLLMEngineStalled", f"{WHO} holds 2 requests and produces no token"),
    "batch_at_its_cap": (
        "VLLMSequenceCapReached",
        f"{WHO} runs 32 sequences and not more, although its KV pool has room",
    ),
    "compute_queue": ("VLLMRequestsQueueing", f"at least 30 requests wait on {WHO}, longer than interactive use bears"),
    "usage_dropped_by_relabelling": ("VLLMMetricsMissing", f"{WHO} does not expose vllm:kv_cache_usage_perc"),
    "context_does_not_fit": (
        "VLLMContextExceedsCapacity",
        f"a request of the maximum length does not fit into the KV pool of {WHO}",
    ),
}


@pytest.mark.parametrize("name", SUMMARIES)
def test_a_summary_says_which_engine_and_how_much(name: str, promtool: Program, tmp_path: Path) -> None:
    alert, summary = SUMMARIES[name]
    scenario = scenario_file.load(scenario_file.FOLDER / f"{name}.yaml")
    check = next(check for check in checks.ALL if check.alert_name == alert)
    labels = {"engine": "0", "instance": "pod-1:8000", "job": "vllm", "model_name": "m", "check": check.id}
    if alert == "VLLMMetricsMissing":
        labels["metric"] = "vllm:kv_cache_usage_perc"
    annotations = {"summary": summary, "description": rules.description(check), "runbook_url": check.runbook}
    group = {
        "interval": f"{scenario.interval_seconds}s",
        "input_series": scenario_file.input_series(scenario),
        "alert_rule_test": [
            {
                "eval_time": f"{scenario.end_seconds}s",
                "alertname": alert,
                "exp_alerts": [
                    {"exp_labels": {**labels, "severity": rule.severity.value}, "exp_annotations": annotations}
                    for rule in check.alert(DEFAULTS)
                    if "kvwatch_scrape_success" not in rule.expr
                ],
            }
        ],
    }
    done = judged(promtool, tmp_path, group)
    assert 0 == done.returncode, done.stderr


def test_a_description_is_the_first_paragraph_of_the_page() -> None:
    text = rules.description(scenario_file.check_named("engine_stalled"))
    assert text.startswith("Requests are running or waiting, yet for a minute no prompt token was counted")
    assert "\n" not in text


# The Alertmanager example -------------------------------------------------------------------------------------------

EXAMPLE = ROOT / "alerts" / "alertmanager.example.yaml"


def test_amtool_accepts_the_example() -> None:
    done = subprocess.run([binary("amtool"), "check-config", EXAMPLE], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr


def test_the_example_names_only_alerts_that_exist() -> None:
    known = {check.alert_name for check in checks.ALL}
    assert set(re.findall(r"VLLM[A-Za-z]+", EXAMPLE.read_text())) <= known


@pytest.mark.real
def test_thrashing_silences_the_full_pool_of_the_same_engine_only(tmp_path: Path) -> None:
    def alert(name: str, severity: str, engine: str) -> dict[str, Any]:
        return {"labels": {"alertname": name, "severity": severity, "engine": engine, "model_name": "m"}}

    sent = [
        alert("VLLMPreemptionsSustained", "critical", "0"),
        alert("VLLMPreemptionsSustained", "warning", "0"),
        alert("VLLMKVCacheSaturated", "warning", "0"),
        alert("VLLMKVCacheSaturated", "warning", "1"),
        alert("VLLMRequestsQueueing", "warning", "1"),
        alert("VLLMCapacityBelowBudget", "warning", "0"),
    ]
    with alertmanager(tmp_path, EXAMPLE.read_text()) as url:
        post = urllib.request.Request(
            f"{url}/api/v2/alerts", json.dumps(sent).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(post, timeout=5) as answer:
            assert 200 == answer.status
        wanted = {
            ("VLLMPreemptionsSustained", "critical", "0"),
            ("VLLMKVCacheSaturated", "warning", "1"),
            ("VLLMCapacityBelowBudget", "warning", "0"),
        }

        def heard() -> bool:
            active = get_json(f"{url}/api/v2/alerts?inhibited=false&active=true")
            labels = [alert["labels"] for alert in active]
            return {(one["alertname"], one["severity"], one["engine"]) for one in labels} == wanted

        assert eventually(heard)


# The command --------------------------------------------------------------------------------------------------------


def test_check_names_stale_files_and_exits_1(tmp_path: Path) -> None:
    file = tmp_path / "alerts" / "k.yaml"
    runner = CliRunner()
    stale = runner.invoke(command, ["rules", "--check", "--output", str(file)])
    assert (1, f"stale: {file}\n") == (stale.exit_code, stale.stdout)
    assert not file.exists()
    written = runner.invoke(command, ["rules", "--output", str(file)])
    assert (0, "", f"wrote {file}\n") == (written.exit_code, written.stdout, written.stderr)
    assert 0 == runner.invoke(command, ["rules", "--check", "--output", str(file)]).exit_code
    file.write_text(file.read_text().replace("0.95", "0.5"))
    assert 1 == runner.invoke(command, ["rules", "--check", "--output", str(file)]).exit_code


def test_a_threshold_can_be_changed_for_the_rules() -> None:
    changed = CliRunner().invoke(command, ["rules", "-o", "-", "--threshold", "kv_cache_saturated_ratio=0.98"])
    assert "engine:vllm_kv_cache_usage_ratio:avg5m >= 0.98" in changed.stdout
    assert replace(DEFAULTS, preemptions_minimum=5) == thresholds(("preemptions_minimum=5",))


@pytest.mark.parametrize("change", ["nothing=1", "hold_seconds=long", "stall_seconds=-1", "stall_seconds=nan"])
def test_a_threshold_that_does_not_exist_or_is_no_number_is_refused(change: str) -> None:
    with pytest.raises(SettingError, match=change.partition("=")[0]):
        thresholds((change,))


def test_a_changed_range_changes_the_names_that_alerts_read() -> None:
    longer = signals(replace(DEFAULTS, alert_range_seconds=600))
    assert "engine:vllm_requests_waiting:min10m" == str(longer.waiting_minimum)
