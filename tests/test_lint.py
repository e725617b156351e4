"""`kvwatch lint`: what it finds, and what it must not find."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.cli.lint import command, shipped_catalogue
from kvwatch.errors import SettingError, SourceError
from kvwatch.lint import Expression, Show, judge
from kvwatch.promql import MadeOfVariables, NotPromQL, parse, without_variables
from kvwatch.versions import parse_version
from kvwatch.vllm_metrics import ALL, PREFIXES
from kvwatch.vllm_names import Reader

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests/data/lint"
KNOWN = shipped_catalogue()


def faults(text: str, version: str = "0.32.0", *, show: Show | None = None, where: str = "") -> list[tuple[str, str]]:
    """(rule, instead) of each fault."""
    expression = Expression(file="f", where=where, text=text, show=show)
    return [(f.rule, f.instead) for f in judge(expression, parse(text), KNOWN, parse_version(version))]


def rules(text: str, version: str = "0.32.0", *, show: Show | None = None, where: str = "") -> list[str]:
    return [rule for rule, _ in faults(text, version, show=show, where=where)]


def lint(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(command, [str(one) for one in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


# --- nothing to find ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["alerts", "dashboards"])
def test_kvwatch_finds_nothing_in_its_own_output(folder: str) -> None:
    code, out, _ = lint(ROOT / folder)
    assert (code, out.rpartition(": ")[2]) == (0, "no fault\n")


@pytest.mark.parametrize("path", sorted((DATA / "vllm-0.32.0").iterdir()), ids=lambda path: path.name)
def test_nothing_is_found_in_what_vllm_ships_for_the_same_version(path: Path) -> None:
    code, out, _ = lint(path, "--vllm-version", "0.32.0", "--output", "json")
    found = json.loads(out)
    assert (code, found["faults"]) == (0, [])
    assert found["expressions"] >= 15


def test_the_dashboards_of_vllm_have_faults_on_a_version_they_are_not_for() -> None:
    code, out, _ = lint(DATA / "vllm-0.32.0/grafana.json", "--vllm-version", "0.9.2", "--output", "json")
    found = json.loads(out)
    assert code == 1
    assert {fault["rule"] for fault in found["faults"]} == {"metric_absent"}
    assert "vllm:time_per_output_token_seconds" in {fault["instead"] for fault in found["faults"]}


@pytest.mark.parametrize(
    "text",
    [
        "max(vllm:kv_cache_usage_perc) > 0.95",
        "vllm:kv_cache_usage_perc * 100 > 95",
        "100 * vllm:kv_cache_usage_perc >= 0",
        "vllm:kv_cache_usage_perc > 0.95 and rate(vllm:num_preemptions_total[10m]) > 0",
        "sum(vllm:kv_cache_usage_perc) / count(vllm:kv_cache_usage_perc)",
        "(sum(vllm:kv_cache_usage_perc)) / (count(vllm:kv_cache_usage_perc) > 0)",
        "sum by (instance, engine) (vllm:kv_cache_usage_perc)",
        "sum without (job) (vllm:kv_cache_usage_perc)",
        "sum(vllm:kv_cache_usage_perc > bool 0.95)",
        "count(vllm:kv_cache_usage_perc > 0.95) > 3",
        "vllm:gpu_cache_usage_perc or vllm:kv_cache_usage_perc",
        "rate(vllm:gpu_prefix_cache_hits_total[5m]) or rate(vllm:prefix_cache_hits_total[5m])",
        "sum(rate(vllm:prefix_cache_hits_total[5m])) / (sum(rate(vllm:prefix_cache_queries_total[5m])) > 0)",
        "100 * rate(vllm:prefix_cache_hits_total[15m]) / rate(vllm:prefix_cache_queries_total[15m]) < 30",
        "rate(vllm:prefix_cache_hits_total[15m]) / rate(vllm:prompt_tokens_total[15m]) > 2",
        "sum(increase(vllm:num_preemptions_total[1h])) > 0",
        "resets(vllm:generation_tokens_total[5m]) > 0",
        "histogram_quantile(0.99, sum by (le, engine) (rate(vllm:time_to_first_token_seconds_bucket[5m])))",
        "histogram_quantile(0.99, sum without (instance) (rate(vllm:time_to_first_token_seconds_bucket[5m])))",
        "rate(vllm:iteration_tokens_total_count[5m])",
        "vllm:num_preemptions_created",
        "sum(vllm:healthy_pods_total) > 0",
        'vllm:gpu_prefix_cache_hit_rate{server="http://a"}',
        "vllm:ttft_seconds:p95 > 2",
        "rate(vllm_gateway_upstream_seconds_total[5m])",
        'vllm:kv_cache_usage_perc{engine=~"$engine"}',
        'rate(vllm:request_success_total{finished_reason="abort",pod=~"a.*",model="m"}[5m])',
        "up == 0",
    ],
)
def test_a_right_query_is_left_alone(text: str) -> None:
    assert rules(text) == []


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "version", "fault"),
    [
        ("vllm:gpu_cache_usage_perc", "0.32.0", ("metric_absent", "vllm:kv_cache_usage_perc")),
        ("vllm:gpu_cache_usage_perc", "0.11.2", ("metric_hidden", "vllm:kv_cache_usage_perc")),
        ("vllm:kv_cache_usage_perc", "0.8.5", ("metric_absent", "vllm:gpu_cache_usage_perc")),
        ("ray_vllm:gpu_cache_usage_perc", "0.32.0", ("metric_absent", "vllm:kv_cache_usage_perc")),
        ("vllm_gpu_cache_usage_perc", "0.32.0", ("metric_absent", "vllm:kv_cache_usage_perc")),
        ('{__name__="vllm:gpu_cache_usage_perc"}', "0.32.0", ("metric_absent", "vllm:kv_cache_usage_perc")),
        ("vllm:gpu_cache_usage_factor", "0.32.0", ("metric_unknown", "perhaps vllm:kv_cache_usage_perc")),
        ("vllm_kv_cache_usage_percent", "0.32.0", ("metric_unknown", "perhaps vllm_kv_cache_usage_perc")),
        ("rate(vllm:num_preemptions[5m])", "0.32.0", ("counter_without_total", "vllm:num_preemptions_total")),
        (
            "vllm:time_to_first_token_seconds",
            "0.32.0",
            (
                "histogram_without_part",
                "{0}_bucket, {0}_sum or {0}_count".format("vllm:time_to_first_token_seconds"),
            ),
        ),
        (
            "rate(vllm:admission_rejections_total[5m])",
            "0.31.0",
            ("metric_absent", "nothing: vLLM 0.31.0 has no such figure"),
        ),
        ("absent(vllm:gpu_cache_usage_perc)", "0.32.0", ("metric_absent", "vllm:kv_cache_usage_perc")),
        ("vllm:gpu_cache_usage_perc or vector(0)", "0.32.0", ("metric_absent", "vllm:kv_cache_usage_perc")),
    ],
)
def test_a_name_that_the_version_lacks_comes_with_the_one_to_write(
    text: str, version: str, fault: tuple[str, str]
) -> None:
    assert faults(text, version) == [fault]


def test_spellings_of_one_figure_that_are_all_absent_are_one_fault() -> None:
    text = "vllm:gpu_cache_usage_perc or vllm_gpu_cache_usage_perc or ray_vllm:gpu_cache_usage_perc"
    assert rules(text) == ["metric_absent"]


def test_the_names_follow_from_the_list_of_all_releases() -> None:
    path = ROOT / "tools/metric_names.py"
    spec = importlib.util.spec_from_file_location("metric_names", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "kvwatch/data/vllm_metric_names.json").read_text() == module.as_json()


def test_lint_knows_every_metric_that_kvwatch_reads() -> None:
    reader = Reader(KNOWN, KNOWN.last_release)
    names = {name for metric in ALL for name in (metric.name, *metric.former)}
    parts = {
        name: f"{name}_count" if any(m.name == name and m.kind == "histogram" for m in ALL) else name for name in names
    }
    former = {name for metric in ALL if metric.kind == "histogram" for name in metric.former}
    unknown = {name for name in names - former if reader.named(parts[name]) is None}
    assert unknown == set(KNOWN.elsewhere) & names == {"num_request_max"}


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("vllm:kv_cache_usage_perc > 90", ("percent_of_ratio", "compare with 0.9")),
        ("90 < max by (engine) (vllm:kv_cache_usage_perc)", ("percent_of_ratio", "compare with 0.9")),
        ("avg_over_time(vllm:kv_cache_usage_perc[5m]) >= 85", ("percent_of_ratio", "compare with 0.85")),
        ("(1 - vllm:kv_cache_usage_perc) < 10", ("percent_of_ratio", "compare with 0.1")),
        ("vllm:kv_cache_usage_perc * 100 > 0.9", ("percent_of_ratio", "compare with 90, or leave out `* 100`")),
        (
            "sum(rate(vllm:prefix_cache_hits_total[15m])) / sum(rate(vllm:prefix_cache_queries_total[15m])) < 30",
            ("percent_of_ratio", "compare with 0.3"),
        ),
        ("sum(vllm:kv_cache_usage_perc)", ("sum_of_ratios", "max (the fullest engine) or avg in place of sum")),
        (
            "sum by (model_name) (vllm:kv_cache_usage_perc) / 2",
            ("sum_of_ratios", "max (the fullest engine) or avg in place of sum"),
        ),
        (
            "rate(vllm:num_requests_waiting[5m])",
            (
                "rate_of_gauge",
                "avg_over_time(vllm:num_requests_waiting[5m]), or deriv(vllm:num_requests_waiting[5m]) for its slope",
            ),
        ),
        (
            "histogram_quantile(0.9, vllm:time_to_first_token_seconds_bucket)",
            ("quantile_of_raw_histogram", "histogram_quantile(q, sum by (le, …) (rate(…_bucket[5m])))"),
        ),
        (
            "histogram_quantile(0.9, sum by (engine) (rate(vllm:time_to_first_token_seconds_bucket[5m])))",
            ("le_dropped", "sum by (le, …) (rate(…_bucket[5m]))"),
        ),
        (
            "histogram_quantile(0.9, sum(rate(vllm:time_to_first_token_seconds_bucket[5m])))",
            ("le_dropped", "sum by (le, …) (rate(…_bucket[5m]))"),
        ),
        (
            'vllm:num_requests_running{engine="0"}',
            ("hard_coded_engine", "no matcher on engine, and `by (engine)` or max over all of them"),
        ),
        (
            'sum(rate(vllm:request_success_total{finish_reason!="stop"}[5m]))',
            ("label_misspelt", "finished_reason"),
        ),
        (
            "vllm:num_preemptions_total > 0",
            (
                "lifetime_threshold",
                "rate(vllm:num_preemptions_total[5m]) or increase(vllm:num_preemptions_total[5m])",
            ),
        ),
        (
            "sum by (pod) (vllm:num_preemptions_total) > 10",
            (
                "lifetime_threshold",
                "rate(vllm:num_preemptions_total[5m]) or increase(vllm:num_preemptions_total[5m])",
            ),
        ),
        (
            "vllm:prefix_cache_hits_total / (vllm:prefix_cache_queries_total > 0)",
            ("lifetime_ratio", "rate(vllm:prefix_cache_hits_total[5m]) / rate(vllm:prefix_cache_queries_total[5m])"),
        ),
        (
            "sum(vllm:e2e_request_latency_seconds_sum) / sum(vllm:e2e_request_latency_seconds_count)",
            (
                "lifetime_ratio",
                "rate(vllm:e2e_request_latency_seconds_sum[5m]) / rate(vllm:e2e_request_latency_seconds_count[5m])",
            ),
        ),
    ],
)
def test_a_mistake_is_named_with_what_to_write_instead(text: str, fault: tuple[str, str]) -> None:
    assert faults(text) == [fault]


def test_a_unit_that_does_not_fit_the_scale_is_a_mistake() -> None:
    assert rules("vllm:kv_cache_usage_perc", show="percent") == ["percent_of_ratio"]
    assert rules("vllm:kv_cache_usage_perc * 100", show="percentunit") == ["percent_of_ratio"]
    assert rules("vllm:kv_cache_usage_perc * 100", show="percent") == []
    assert rules("vllm:kv_cache_usage_perc", show="percentunit") == []


def test_a_rule_that_says_lifetime_may_take_lifetime_ratios() -> None:
    text = "vllm:prefix_cache_hits_total / vllm:prefix_cache_queries_total"
    assert rules(text, where="record engine:hit_ratio:lifetime") == []


def test_several_mistakes_of_one_query_are_all_named() -> None:
    text = 'sum(vllm:gpu_cache_usage_perc{engine="0"}) > 90'
    assert rules(text) == ["metric_absent", "sum_of_ratios", "hard_coded_engine"]


# --- variables ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "replaced"),
    [
        ("rate(a[$__rate_interval])", "rate(a[5m])"),
        ("rate(a[${interval}])", "rate(a[5m])"),
        ("rate(a[[[interval]]])", "rate(a[5m])"),
        ("max_over_time(a[1h:$step])", "max_over_time(a[1h:5m])"),
        ("a offset $shift", "a offset 5m"),
        ('a{x="$x", y=~"${y:regex}"}', 'a{x="variable", y=~"variable"}'),
        ("histogram_quantile($q, a)", "histogram_quantile(1, a)"),
        ("sum by ($group) (a)", "sum by (variable) (a)"),
        ("sum by (le, ${group}) (a)", "sum by (le, variable) (a)"),
        ("${how}(a)", "sum(a)"),
        ('label_replace(a, "b", "$1", "c", "(.*)")', 'label_replace(a, "b", "variable", "c", "(.*)")'),
    ],
)
def test_a_variable_of_grafana_becomes_something_that_fits(text: str, replaced: str) -> None:
    assert without_variables(text) == replaced
    promql_parser.parse(replaced)


def test_a_name_made_of_variables_is_not_judged() -> None:
    for text in ("vllm:$metric", "${prefix}_requests", "vllm:[[metric]]_total"):
        with pytest.raises(MadeOfVariables):
            without_variables(text)


def test_what_prometheus_refuses_is_no_promql() -> None:
    with pytest.raises(NotPromQL, match="rate"):
        parse("rate(vllm:num_preemptions_total)")


@given(st.text(alphabet="ab$_{}[]()\"'`:5m ,=~\\", max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        parse(text)
    except (NotPromQL, MadeOfVariables):
        return


@given(
    st.sampled_from(
        sorted(name for name, metric in KNOWN.metrics.items() if "{" not in name and metric.type != "histogram")
    ),
    st.sampled_from([prefix for prefix in PREFIXES if prefix]),
    st.tuples(st.integers(0, 0), st.integers(6, 33), st.integers(0, 3)),
)
def test_a_name_is_a_fault_exactly_where_the_version_does_not_show_it(
    name: str, prefix: str, version: tuple[int, int, int]
) -> None:
    found = rules(prefix + name, ".".join(map(str, version)))
    assert (found == []) == KNOWN.metrics[name].shown_in(version)


# --- files ----------------------------------------------------------------------------------------------------------


def found_in(*paths: Path, version: str = "0.32.0") -> list[tuple[str, str]]:
    """(where, rule) of each fault."""
    code, out, _ = lint(*paths, "--vllm-version", version, "--output", "json")
    document = json.loads(out)
    assert (document["kind"], document["vllm_version"]) == ("lint", version)
    assert code == (1 if document["faults"] else 0)
    return [(fault["where"], fault["rule"]) for fault in document["faults"]]


def test_every_mistake_of_a_rule_file_is_found_with_its_alert() -> None:
    assert found_in(DATA / "rules.yaml") == [
        ("group kv-cache, alert KVCacheHigh", "percent_of_ratio"),
        ("group kv-cache, alert Preemptions", "counter_without_total"),
        ("group kv-cache, alert PreemptionsEver", "lifetime_threshold"),
        ("group kv-cache, alert SlowFirstToken", "quantile_of_raw_histogram"),
    ]


def test_resources_that_hold_rules_or_dashboards_are_read() -> None:
    assert found_in(DATA / "prometheusrule.yaml") == [
        ("group vllm, alert KVCacheHigh", "metric_absent"),
        ("panel 'Swapped' (id 1), query A", "metric_absent"),
    ]


def test_every_mistake_of_a_dashboard_is_found_with_its_panel() -> None:
    assert found_in(DATA / "old-dashboard.json") == [
        ("variable model", "metric_absent"),
        ("annotation 'Preempted'", "lifetime_threshold"),
        ("panel 'KV cache' (id 1), query A", "percent_of_ratio"),
        ("panel 'Prefix cache' (id 2), query A", "lifetime_ratio"),
        ("panel 'Time per output token' (id 4), query A", "metric_absent"),
        ("panel 'Time per output token' (id 4), query B", "le_dropped"),
        ("panel 'All engines' (id 5), query A", "sum_of_ratios"),
        ("panel 'All engines' (id 5), query B", "rate_of_gauge"),
        ("panel 'All engines' (id 5), query C", "hard_coded_engine"),
    ]


def test_the_text_says_where_what_why_and_what_instead() -> None:
    code, out, err = lint(DATA / "old-dashboard.json", "--vllm-version", "0.32.0")
    assert code == 1
    assert (
        f"{DATA}/old-dashboard.json: variable model\n"
        "  vllm:gpu_cache_usage_perc\n"
        "  - metric_absent: vLLM 0.32.0 does not have vllm:gpu_cache_usage_perc (it is in 0.6.6 to 0.11.2), "
        "so the query gives no data\n"
        "    Instead: vllm:kv_cache_usage_perc\n"
    ) in out
    assert out.endswith("\n9 queries of vLLM's metrics read against vLLM 0.32.0: 9 faults\n")
    assert err == (
        f"{DATA}/old-dashboard.json: panel 'All engines' (id 5), query D: not judged: 'vllm:$metric': "
        "a name is made of a variable\n"
    )


def test_a_dashboard_of_schema_version_2_is_read(tmp_path: Path) -> None:
    query = {"kind": "PanelQuery", "spec": {"query": {"kind": "prometheus", "spec": {"expr": "vllm:tokens_total"}}}}
    panel = {
        "kind": "Panel",
        "spec": {"id": 7, "title": "Tokens", "data": {"spec": {"queries": [query]}}, "vizConfig": {"kind": "stat"}},
    }
    path = tmp_path / "v2.json"
    path.write_text(json.dumps({"kind": "Dashboard", "spec": {"elements": {"panel-7": panel}}}))
    assert found_in(path) == [("panel 'Tokens' (id 7)", "metric_absent")]


def test_a_dashboard_resource_of_the_grafana_operator_is_read(tmp_path: Path) -> None:
    board = {"panels": [{"id": 1, "title": "T", "gridPos": {}, "targets": [{"expr": "vllm:tokens_total"}]}]}
    path = tmp_path / "grafanadashboard.yaml"
    path.write_text(json.dumps({"kind": "GrafanaDashboard", "spec": {"json": json.dumps(board)}}))
    assert found_in(path) == [("panel 'T' (id 1)", "metric_absent")]


def test_a_broken_expression_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("groups: [{name: g, rules: [{alert: A, expr: rate(vllm:num_preemptions_total) > 0}]}]")
    assert found_in(path) == [("group g, alert A", "not_promql")]


def test_a_version_newer_than_all_known_is_judged_by_the_newest_and_says_so() -> None:
    code, _, err = lint(DATA / "vllm-0.32.0/grafana.json", "--vllm-version", "1.7.0")
    assert code == 0
    assert err == "vLLM 1.7.0 is newer than the newest known, 0.33.0; names are those of 0.33.0\n"


def test_a_file_without_queries_of_vllm_is_mentioned(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("groups: [{name: g, rules: [{alert: A, expr: up == 0}]}]")
    code, out, err = lint(path)
    assert (code, err) == (0, f"{path}: no query of vLLM's metrics\n")
    assert out == "0 queries of vLLM's metrics read against vLLM 0.33.0: no fault\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"panels": [', "not JSON"),
        ("groups: [", "neither JSON nor YAML"),
        ("groups: 2001-99-99", "neither JSON nor YAML: month must be in 1..12"),
        ("groups: !!bool maybe", "neither JSON nor YAML: a tag does not fit its value"),
        ("groups: []\ngroups: []", "neither JSON nor YAML: the key 'groups' is there twice"),
        ("{{- if .Values.rules }}\ngroups: []", "lint the output of helm template"),
        ("groups:\n  {{ toYaml .Values.groups }}", "lint the output of helm template"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(content)
    with pytest.raises(SourceError, match=message):
        lint(path)


def test_a_missing_file_and_an_empty_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be read"):
        lint(tmp_path / "none.yaml")
    with pytest.raises(SourceError, match=r"a folder without \.json, \.yaml, \.yml files"):
        lint(tmp_path)


def test_what_is_no_version_is_an_error() -> None:
    with pytest.raises(SettingError, match="is not a version"):
        lint(DATA / "rules.yaml", "--vllm-version", "newest")


def test_without_promql_parser_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "promql_parser", None)
    with pytest.raises(SettingError, match=r"pip install promql-parser"):
        lint(DATA / "rules.yaml")


JUNK: list[Any] = [None, 1, "text", [], [1], {}, {"groups": 1}, {"groups": [None]}, {"panels": [None]}, {"spec": 1}]


@pytest.mark.parametrize("content", [*JUNK, {"groups": [{"rules": [None, {"expr": None}]}]}, {"data": None}], ids=repr)
def test_documents_of_any_shape_are_read(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "any.yaml"
    path.write_text(json.dumps(content))
    assert lint(path)[0] == 0
