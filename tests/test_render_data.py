"""The JSON and YAML documents that other programs read."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import yaml
from pages import CAPTURES, EXPOSITION, read

from kvwatch import checks
from kvwatch.render.data import plain, report_data, to_json, to_yaml
from kvwatch.report import Report, report
from kvwatch.sources.capture import read_capture
from kvwatch.window import windows

NAMES = ["healthy", "prefix", "thrash", *(path.stem for path in sorted(EXPOSITION.glob("*.prom")))]


def recorded(name: str) -> Report:
    page = EXPOSITION / f"{name}.prom"
    found = (
        read(page.read_text(), target=name) if page.exists() else read_capture(CAPTURES / name, target=name, notes=[])
    )
    return report(windows(found))


def strict(text: str) -> Any:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("name", NAMES)
def test_the_document_has_the_agreed_keys(name: str) -> None:
    document = strict(to_json(report_data(recorded(name))))
    assert list(document)[:5] == ["schema_version", "kind", "window_seconds", "worst", "engines"]
    assert (document["schema_version"], document["kind"]) == (1, "report")
    assert document["worst"] in {"ok", "warning", "critical", "unknown"}
    for engine in document["engines"]:
        needed = {"engine", "model_name", "target", "vllm_version", "observed", "capacity", "budget", "findings"}
        assert needed | {"recommendations", "options"} <= set(engine)
        capacity = {"num_gpu_blocks", "usable_blocks", "block_size_tokens", "capacity_tokens", "max_concurrency"}
        assert capacity | {"max_model_len", "source"} <= set(engine["capacity"])
        assert [finding["check"] for finding in engine["findings"]] == [check.id for check in checks.ALL]
        for finding in engine["findings"]:
            assert list(finding) == ["check", "status", "summary", "evidence", "runbook"]
            assert finding["runbook"].endswith(f"/{finding['check']}.md")


def test_a_recommendation_has_the_agreed_keys() -> None:
    (engine,) = report_data(recorded("thrash"))["engines"]
    keys = ["setting", "flag", "current", "proposed", "apply", "because", "confidence", "predicted", "note"]
    assert [list(made) for made in engine["recommendations"]] == [keys] * len(engine["recommendations"])
    assert engine["recommendations"]


def test_what_is_observed_is_named_with_its_unit() -> None:
    (engine,) = report_data(recorded("thrash"))["engines"]
    units = ("_requests", "_ratio", "_per_second", "_seconds", "_minimum", "_maximum")
    assert all(name.endswith(units) for name in engine["observed"])
    assert engine["observed"]["preemptions_per_second"] == pytest.approx(25 / 38.145, rel=1e-3)


def test_every_figure_of_the_capacity_says_where_it_came_from() -> None:
    (engine,) = report_data(recorded("thrash"))["engines"]
    assert engine["capacity"]["source"] == {
        "num_gpu_blocks": "observed",
        "max_concurrency": "observed",
        "capacity_tokens": "observed",
        "max_model_len": "derived",
        "tokens_per_block": "derived",
    }


@pytest.mark.parametrize("name", NAMES)
def test_yaml_holds_what_json_holds(name: str) -> None:
    document = report_data(recorded(name))
    assert yaml.safe_load(to_yaml(document)) == strict(to_json(document))


def test_what_is_no_number_becomes_null() -> None:
    judged = recorded("healthy")
    (engine,) = judged.engines
    wrong = replace(engine, observed={"a_ratio": math.nan, "b_ratio": math.inf, "c_ratio": 0.5})
    (found,) = strict(to_json(report_data(replace(judged, engines=(wrong,)))))["engines"]
    assert found["observed"] == {"a_ratio": None, "b_ratio": None, "c_ratio": 0.5}


def test_names_keep_their_letters() -> None:
    assert "模型" in to_json({"model_name": "模型"})
    assert "模型" in to_yaml({"model_name": "模型"})


def test_nested_values_become_plain() -> None:
    assert plain({1: (2, {"x": {3}})}) == {"1": [2, {"x": [3]}]}


def test_an_empty_report_is_a_document() -> None:
    document = strict(to_json(report_data(report(()))))
    assert (document["worst"], document["engines"], document["window_seconds"]) == ("unknown", [], 0)
