from dataclasses import replace

import pytest
from goldens import golden
from prometheus_client.parser import text_string_to_metric_families
from prometheus_releases import Program
from reports import AT_SECONDS, CHECKS, DOWN, FLEET, KEY, THRASHING, report_of

from kvwatch import __version__
from kvwatch.checks import ALL
from kvwatch.finding import Status
from kvwatch.render.prometheus import CAPACITY, EVIDENCE, RECOMMENDED, exposition
from kvwatch.report import Report


def values(report: Report | None, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    page = exposition(report, at_seconds=AT_SECONDS).decode()
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }


def test_the_page_of_a_fleet() -> None:
    page = exposition(FLEET, at_seconds=AT_SECONDS).decode().replace(__version__, "VERSION")
    assert page == golden("metrics.prom", page)


def test_every_engine_has_a_status_for_every_check() -> None:
    statuses = values(FLEET, "kvwatch_check_status")
    assert len(statuses) == 3 * len(CHECKS)
    assert set(statuses.values()) == {status.code for status in Status}


def test_what_is_not_known_has_no_series() -> None:
    page = exposition(report_of(DOWN)).decode()
    assert "kvwatch_capacity" not in page
    assert "kvwatch_recommended" not in page
    assert "NaN" not in page


def test_before_the_first_report_the_page_tells_the_build_alone() -> None:
    page = exposition(None).decode()
    assert [line.split("{")[0] for line in page.splitlines() if line[0] != "#"] == ["kvwatch_build_info"]


def test_a_failed_scrape_is_zero_and_not_absent() -> None:
    assert values(FLEET, "kvwatch_scrape_success")[("target", "http://10.0.0.9:8000"),] == 0
    assert values(FLEET, "kvwatch_scrape_success")[("target", KEY.target),] == 1


def test_what_is_recommended_carried_and_predicted_is_a_number() -> None:
    who = (("engine", "0"), ("model_name", "llama-3-8b"), ("target", KEY.target))
    expected = {
        "kvwatch_recommended_watermark_ratio": 0.08,
        "kvwatch_recommended_gateway_max_in_flight": 17,
        "kvwatch_requests_carried": 17,
        "kvwatch_budget_num_gpu_blocks": 284,
        "kvwatch_capacity_deviation_ratio": -0.0986,
        "kvwatch_capacity_num_gpu_blocks": 256,
        "kvwatch_capacity_tokens": 32768,
    }
    assert {name: values(FLEET, name)[who] for name in expected} == expected


def test_hostile_label_values_stay_label_values() -> None:
    name = 'a"b\\c\nkvwatch_evil 1'
    engine = replace(THRASHING, key=replace(KEY, model_name=name))
    assert {dict(labels)["model_name"] for labels in values(report_of(engine), "kvwatch_check_status")} == {name}
    assert values(report_of(engine), "kvwatch_evil") == {}


def test_the_check_whose_evidence_becomes_a_metric_exists() -> None:
    assert {check for check, _ in EVIDENCE} <= {check.id for check in ALL}


def test_names_are_unique_and_without_a_colon() -> None:
    names = [name for table in (CAPACITY, EVIDENCE, RECOMMENDED) for name, _ in table.values()]
    assert len(set(names)) == len(names)
    assert all(name.startswith("kvwatch_") and ":" not in name for name in names)


@pytest.mark.real
def test_promtool_has_nothing_to_say_about_the_metrics(promtool: Program) -> None:
    done = promtool.run("check", "metrics", given=exposition(FLEET, at_seconds=1.0).decode())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
