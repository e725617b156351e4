"""Every scenario judged twice: by the checks and, through promtool, by the alert rules."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import scenario_file
from prometheus_releases import Program
from scenario_file import FIRING, Scenario

from kvwatch import checks
from kvwatch.exposition import read_samples
from kvwatch.finding import Status
from kvwatch.generate import rules
from kvwatch.thresholds import DEFAULTS, Thresholds

SCENARIOS = {scenario.name: scenario for scenario in scenario_file.load_all()}
GROUPS = (rules.RECORDING_GROUP, rules.ALERT_GROUP)


def rule_file(folder: Path, limits: Thresholds = DEFAULTS) -> Path:
    file = folder / "rules.yaml"
    file.write_text(rules.to_yaml(rules.rule_file(limits)))
    return file


def disagreements(scenario: Scenario, limits: Thresholds = DEFAULTS) -> list[str]:
    """Findings that are not what the scenario expects."""
    wrong = []
    for key, found in scenario_file.findings(scenario, limits).items():
        for finding in found:
            expected = scenario.expected(finding.check, key.engine)
            agrees = finding.status is expected if expected else finding.status not in FIRING
            if not agrees:
                wrong.append(f"{key}: {finding.check} is {finding.status.value}: {finding.summary}")
    return wrong


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_checks_find_what_a_scenario_expects(name: str) -> None:
    assert [] == disagreements(SCENARIOS[name])


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_alerts_that_fire_are_those_a_scenario_expects(name: str, promtool: Program, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    done = promtool.judge(tmp_path, scenario_file.promtool_test(scenario, rule_file(tmp_path), GROUPS))
    assert 0 == done.returncode, done.stderr


def once_a_minute(scenario: Scenario) -> Scenario:
    """The same course, scraped every 60 s: the shortest range, of a stalled engine, then holds two samples."""
    every = 60 // scenario.interval_seconds
    series = {
        name: " ".join("_" if value is None else repr(value) for value in scenario_file.expand(notation)[::every])
        for name, notation in scenario.series.items()
    }
    return replace(scenario, interval_seconds=60, series=series)


@pytest.mark.parametrize("name", ["full_and_queueing", "many_preemptions", "worker_hangs"])
def test_an_engine_scraped_once_a_minute_is_judged_the_same(name: str, promtool: Program, tmp_path: Path) -> None:
    scenario = once_a_minute(SCENARIOS[name])
    assert [] == disagreements(scenario)
    done = promtool.judge(tmp_path, scenario_file.promtool_test(scenario, rule_file(tmp_path), GROUPS))
    assert 0 == done.returncode, done.stderr


@dataclass(frozen=True)
class Mutation:
    """A wrong threshold, and the scenario that must notice it. `python` and `promql` say on which side."""

    change: dict[str, float]
    scenario: str
    python: bool = True
    promql: bool = True

    def __str__(self) -> str:
        changes = "-".join(f"{name}={value:g}" for name, value in self.change.items())
        return f"{changes}-{self.scenario}"


MUTATIONS = (
    Mutation({"kv_cache_saturated_ratio": 0.97}, "barely_full_and_queueing"),
    Mutation({"kv_cache_saturated_ratio": 0.93}, "nearly_full_and_queueing"),
    Mutation({"preemptions_minimum": 6}, "five_preemptions"),
    Mutation({"preemptions_minimum": 2}, "two_preemptions"),
    Mutation({"preemptions_per_request_warning": 0.03}, "some_preemptions"),
    Mutation({"preemptions_per_request_warning": 0.015}, "few_preemptions"),
    Mutation({"preemptions_per_request_critical": 0.15}, "many_preemptions"),
    Mutation({"preemptions_per_request_critical": 0.07}, "less_than_many_preemptions"),
    Mutation({"queue_time_warning_seconds": 1.3}, "queue_of_a_second_and_more"),
    Mutation({"queue_time_warning_seconds": 0.7}, "queue_below_a_second"),
    Mutation({"kv_cache_has_room_ratio": 0.86}, "batch_at_its_cap_with_little_room"),
    Mutation({"kv_cache_has_room_ratio": 0.94}, "batch_pinned_by_the_pool"),
    Mutation({"capacity_deviation_ratio": 0.07}, "pool_barely_below_its_budget"),
    Mutation({"capacity_deviation_ratio": 0.03}, "pool_nearly_its_budget"),
    Mutation({"filling_horizon_seconds": 60}, "pool_fills_while_the_batch_stands_still"),
    Mutation({"filling_horizon_seconds": 36000}, "pool_fills_slowly"),
    Mutation({"filling_horizon_seconds": 900}, "pool_swings", promql=False),  # the alert waits longer than it lasts
    Mutation({"filling_from_ratio": 0.945}, "pool_fills_while_the_batch_stands_still"),
    Mutation({"filling_from_ratio": 0.5}, "pool_fills_fast_from_half"),
    Mutation({"monopoly_share_ratio": 0.35}, "three_requests_hold_the_pool"),
    Mutation({"monopoly_share_ratio": 0.2}, "four_requests_hold_the_pool"),
    Mutation({"monopoly_pool_ratio": 0.6}, "one_request_holds_half_the_pool"),
    Mutation({"monopoly_pool_ratio": 0.4}, "one_request_holds_less_than_half"),
    Mutation({"underused_ratio": 0.25}, "pool_hardly_used_all_day"),
    Mutation({"underused_ratio": 0.4}, "pool_used_once_a_day"),
    Mutation({"underused_seconds": 172800}, "pool_hardly_used_all_day"),
    Mutation({"prefix_hit_lost_ratio": 0.4}, "hits_halved"),
    Mutation({"prefix_hit_lost_ratio": 0.7}, "hits_somewhat_down"),
    Mutation({"prefix_hit_usual_ratio": 0.4}, "hits_of_a_modest_cache"),
    Mutation({"prefix_hit_usual_ratio": 0.2}, "hits_were_always_few"),
    Mutation({"prefix_lookups_minimum_tokens": 15000}, "enough_lookups"),
    Mutation({"prefix_lookups_minimum_tokens": 6000}, "few_lookups"),
    Mutation({"rejected_ratio_warning": 0.02}, "one_in_a_hundred_refused"),
    Mutation({"rejected_ratio_warning": 0.005}, "few_refused"),
    Mutation({"rejections_minimum": 7}, "five_refused"),
    Mutation({"rejections_minimum": 2}, "two_refused"),
    Mutation({"imbalance_ratio": 0.4}, "load_on_one_engine"),
    Mutation({"imbalance_ratio": 0.2}, "load_somewhat_uneven"),
    Mutation({"stall_seconds": 600}, "worker_hangs"),
    Mutation({"stall_seconds": 20}, "long_prefill", promql=False),  # its alert also waits, alert_critical_for_seconds
    Mutation({"hold_seconds": 10}, "full_with_a_queue_that_blinks_fast", promql=False),
    Mutation({"pinned_seconds": 30}, "batch_at_its_cap", promql=False),  # promtool looks over alert_range_seconds
    Mutation({"alert_range_seconds": 45, "alert_for_seconds": 0}, "queue_blinks_every_two_minutes", python=False),
    Mutation({"alert_for_seconds": 3600}, "full_and_queueing", python=False),
    Mutation({"alert_critical_for_seconds": 3600}, "worker_hangs", python=False),
)


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.python], ids=str)
def test_a_changed_threshold_is_noticed_by_the_checks(mutation: Mutation) -> None:
    changed = replace(DEFAULTS, **mutation.change)  # type: ignore[arg-type]
    assert disagreements(SCENARIOS[mutation.scenario], changed)


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.promql], ids=str)
def test_a_changed_threshold_is_noticed_by_the_alerts(mutation: Mutation, promtool: Program, tmp_path: Path) -> None:
    changed = replace(DEFAULTS, **mutation.change)  # type: ignore[arg-type]
    test = scenario_file.promtool_test(SCENARIOS[mutation.scenario], rule_file(tmp_path, changed), GROUPS)
    done = promtool.judge(tmp_path, test)
    assert 1 == done.returncode
    assert "FAILED" in done.stderr


CAPTURES = Path(__file__).parent / "data" / "captures"
SHORT = replace(  # a recording of 38 seconds, judged at its end
    DEFAULTS,
    alert_range_seconds=30,
    alert_for_seconds=0,
    alert_critical_for_seconds=0,
    alert_keep_firing_seconds=0,
    alert_critical_keep_firing_seconds=0,
)


def recorded(name: str) -> Scenario:
    """A capture of a real engine, one page every two seconds, as a scenario."""
    pages = [read_samples(page.read_text()) for page in sorted((CAPTURES / name).glob("*.prom"))]
    columns: dict[str, list[str]] = {}
    for step, page in enumerate(pages):
        for sample in page:
            labels = ",".join(f"{key}={json.dumps(value)}" for key, value in sorted(sample.labels.items()))
            columns.setdefault(f"{sample.name}{{{labels}}}", ["_"] * len(pages))[step] = repr(sample.value)
    series = {key: " ".join(values) for key, values in columns.items()}
    return Scenario(name=name, reason="recorded", interval_seconds=2, series=series, expect={})


@pytest.mark.parametrize(
    ("name", "alarms"),
    [
        ("healthy", set()),
        ("prefix", set()),
        ("thrash", {"preemptions_sustained", "kv_cache_saturated", "requests_queueing"}),
    ],
)
def test_a_recorded_engine_is_judged_alike_by_both(
    name: str, alarms: set[str], promtool: Program, tmp_path: Path
) -> None:
    scenario = recorded(name)
    (found,) = scenario_file.findings(scenario, SHORT).values()
    assert alarms == {finding.check for finding in found if finding.status in FIRING} - {"concurrency_oversubscribed"}
    expected = [{"labels": f'{{check="{check}"}}', "value": 1} for check in sorted(alarms)]
    test = scenario_file.promtool_test(scenario, rule_file(tmp_path, SHORT), GROUPS)
    test["evaluation_interval"] = "2s"
    query = {"expr": 'group by (check) (ALERTS{alertstate="firing"})', "eval_time": "38s", "exp_samples": expected}
    test["tests"][0]["promql_expr_test"] = [query]
    done = promtool.judge(tmp_path, test)
    assert 0 == done.returncode, done.stderr


def test_every_check_has_one_scenario_that_fires_and_two_that_do_not() -> None:
    for check in checks.ALL:
        statuses = [str(scenario.expect.get(check.id)) for scenario in SCENARIOS.values()]
        firing = [s for s in statuses if "warning" in s or "critical" in s]
        silent = [s for s in statuses if "ok" in s]
        assert len(firing) >= 1, check.id
        assert len(silent) >= 2, check.id


def test_every_severity_of_a_check_fires_in_some_scenario() -> None:
    for check in checks.ALL:
        expected = " ".join(str(scenario.expect.get(check.id)) for scenario in SCENARIOS.values())
        for rule in check.alert(DEFAULTS):
            if "kvwatch_scrape_success" not in rule.expr:  # no page, no scenario: tests/test_rules.py
                assert rule.severity.value in expected, check.id


def test_a_scenario_names_only_checks_and_statuses_that_exist() -> None:
    known = {check.id for check in checks.ALL}
    statuses = {status.value for status in Status}
    for scenario in SCENARIOS.values():
        assert set(scenario.expect) <= known, scenario.name
        for status in scenario.expect.values():
            for one in status.values() if isinstance(status, dict) else [status]:
                assert one in statuses, scenario.name


@pytest.mark.parametrize(
    ("notation", "values"),
    [
        ("1x2", [1, 1, 1]),
        ("1+2x3", [1, 3, 5, 7]),
        ("9-2.5x2 -1", [9, 6.5, 4, -1]),
        ("0.5 _ 1e3 _x2 2", [0.5, None, 1000, None, None, 2]),
        ("1 stale 2", [1, None, 2]),
    ],
)
def test_the_notation_means_what_promtool_takes_it_for(
    notation: str, values: list[float | None], promtool: Program, tmp_path: Path
) -> None:
    assert values == scenario_file.expand(notation)
    present = [(step, value) for step, value in enumerate(values) if value is not None]
    samples = [
        # a range of a second before the step holds the sample of that step only
        {
            "expr": "last_over_time(x[1s])",
            "eval_time": f"{step}m",
            "exp_samples": [] if value is None else [{"labels": "x", "value": value}],
        }
        for step, value in enumerate(values)
    ]
    count = {
        "expr": "count_over_time(x[1h])",
        "eval_time": f"{len(values)}m",
        "exp_samples": [{"labels": "{}", "value": len(present)}],
    }
    group = {
        "interval": "1m",
        "input_series": [{"series": "x", "values": notation}],
        "promql_expr_test": [*samples, count],
    }
    done = promtool.judge(tmp_path, {"rule_files": [], "tests": [group]})
    assert 0 == done.returncode, done.stderr
