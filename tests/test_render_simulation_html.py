"""The page of `kvwatch simulate`: what stands in it without scripts, what the charts are given, how it is drawn."""

import json
import re
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from goldens import golden
from parts import binary
from simulator_cases import closed_loop_case

from kvwatch import __version__
from kvwatch.cli.simulate import compare, render
from kvwatch.objective import Objective
from kvwatch.render.html_assets import STYLE
from kvwatch.render.simulation import Comparison
from kvwatch.render.simulation_assets import PAGE_STYLE, SCRIPT
from kvwatch.render.simulation_html import CHART_COLUMNS, MAX_LINES, ChartLibrary, simulation_html
from kvwatch.settings_now import Assumption
from kvwatch.workload_spec import workload_from

LIBRARY = ChartLibrary(script="CHARTS", style="CHART-STYLE", licence="LICENCE")
INPUTS = (
    Assumption(name="num_gpu_blocks", value=256, origin="observed"),
    Assumption(name="max_num_seqs", value=32, origin="assumed"),
    Assumption(name="step_seconds", value=0.02, origin="assumed"),
)


@cache
def comparison(
    seqs: tuple[int, ...] = (32, 16), watermarks: tuple[float, ...] = (0.0, 0.05), objective: Objective = "balanced"
) -> Comparison:
    workload = workload_from(closed_loop_case(max_num_seqs=32, watermark=0.0, vllm_version="0.32.0"))
    return compare(workload, "thrash.yaml", objective, {"max_num_seqs": seqs, "watermark": watermarks})


def page_of(made: Comparison) -> str:
    return simulation_html(made, LIBRARY)


def data_of(page: str) -> Any:
    found = re.search(r"<script type='application/json' id='data'>(.*?)</script>", page)
    assert found is not None
    return json.loads(found[1])


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    table = page[page.index(f"<h2>{heading}</h2>") :].partition("</table>")[0]
    return [re.findall(r"<t[dh][^>]*>([^<]*)", row) for row in table.split("<tr")[1:]]


def test_the_page_as_recorded() -> None:
    page = page_of(replace(comparison(), assumptions=INPUTS)).replace(SCRIPT, "").replace(STYLE + PAGE_STYLE, "")
    page = page.replace(f"kvwatch {__version__}", "kvwatch VERSION")
    page = re.sub(r"(id='data'>).*?(</script>)", r"\1DATA\2", page)
    assert page == golden("simulation.html", page)


def test_the_chosen_option_is_the_first_row_and_the_present_settings_are_marked() -> None:
    rows = rows_of(page_of(comparison()), "Options")
    assert rows[0][:4] == ["", "max-num-seqs", "watermark", "preempted"]
    assert [row[:4] for row in rows[1:]] == [
        ["chosen", "32", "0.05", "14"],
        ["now", "32", "0", "51"],
        ["", "16", "0", "0"],
        ["", "16", "0.05", "0"],
    ]


def test_present_settings_that_were_not_asked_for_are_a_row_too() -> None:
    rows = rows_of(page_of(comparison(seqs=(32,), watermarks=(0.05,))), "Options")
    assert [row[:3] for row in rows[1:]] == [["chosen", "32", "0.05"], ["now", "32", "0"]]


def test_nothing_is_chosen_that_is_worse_than_the_present_settings() -> None:
    """16 seats preempt nobody, and cost more than 3 % of the throughput."""
    made = comparison(seqs=(16,), watermarks=(0.0,))
    assert made.chosen == made.current
    rows = rows_of(page_of(made), "Options")
    assert [row[:3] for row in rows[1:]] == [["chosen, now", "32", "0"], ["", "16", "0"]]


def test_what_the_choice_costs_is_told_measure_by_measure() -> None:
    rows = {name: cells for name, *cells in rows_of(page_of(comparison()), "What it changes")}
    assert rows["preemptions"] == ["51", "14", "-72.5%"]
    assert set(rows) >= {"output tokens/s", "TTFT p99, s", "ITL p99, ms"}


def test_present_settings_that_are_chosen_change_nothing() -> None:
    page = page_of(comparison(seqs=(32,), watermarks=(0.0,)))
    assert "<h1>Keep the present settings</h1>" in page
    assert "What it changes" not in page


def test_a_choice_that_is_not_calm_says_so() -> None:
    page = page_of(comparison(seqs=(32,), watermarks=(0.0, 0.01), objective="stability"))
    assert "No option has at most 0.02 preemptions per request; this is the calmest." in page


def test_a_line_ends_where_its_run_ends() -> None:
    lines = data_of(page_of(comparison()))["lines"]
    assert [(line["kind"], line["label"]) for line in lines[:2]] == [
        ("chosen", "seqs 32, watermark 0.05"),
        ("now", "seqs 32, watermark 0"),
    ]
    longest = max(len(line["usage"]) for line in lines)
    assert longest == CHART_COLUMNS
    assert len(lines[1]["usage"]) < CHART_COLUMNS
    assert all(0 <= share <= 1 for line in lines for share in line["usage"])


def test_beyond_a_few_lines_the_chart_says_how_many_it_leaves_out() -> None:
    data = data_of(page_of(comparison(seqs=(32, 28, 24, 20, 16), watermarks=(0.0, 0.05))))
    assert (len(data["lines"]), data["left_out"], len(data["points"])) == (MAX_LINES, 10 - MAX_LINES, 10)
    assert {line["kind"] for line in data["lines"][:2]} == {"chosen", "now"}


def test_everything_from_outside_is_escaped() -> None:
    evil = "</script><img src=x onerror=alert(1)><!--\"'&"
    inputs = (Assumption(name="vllm_version", value=evil, origin="observed"),)
    page = page_of(replace(comparison(), name=evil, assumptions=inputs))
    assert "<img" not in page
    assert "<!--" not in page
    assert page.count("</script>") == 3


def test_json_in_the_page_cannot_end_its_element() -> None:
    page = page_of(comparison())
    embedded = page[page.index("id='data'>") + 10 :].partition("</script>")[0]
    assert "<" not in embedded


def test_the_page_carries_its_charts_with_their_licence_and_loads_nothing() -> None:
    page = render(comparison(), "html")
    assert "The MIT License (MIT)" in page
    assert "uPlot=function" in page
    assert re.findall(r"<link|<script [^>]*src|@import|url\(", page) == []


def test_without_scripts_the_tables_stand_and_the_charts_are_hidden() -> None:
    page = page_of(comparison())
    before_scripts = page.partition("<script")[0]
    assert "<noscript>" in before_scripts
    assert before_scripts.count("<table>") == 2
    assert re.findall(r"id='(\w+)' hidden", before_scripts) == ["usage", "trade"]


@pytest.mark.real
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_draws_both_charts_and_nothing_is_wider_than_the_window(tmp_path: Path, width: int) -> None:
    page = render(comparison(), "html")
    measure = "document.title = [...document.querySelectorAll('#usage canvas, #trade canvas')].length + ' ' + "
    measure += "(document.documentElement.scrollWidth <= innerWidth)"
    (tmp_path / "page.html").write_text(page.replace("</body>", f"<script>{measure}</script></body>"))
    # a window of Chromium is never as narrow as a telephone, a frame is
    frame = f"<iframe src='page.html' style='width:{width}px;height:900px'></iframe>"
    told = "<script>onload = () => document.title = frames[0].document.title</script>"
    (tmp_path / "frame.html").write_text(frame + told)
    command = [binary("chromium"), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=3000", "--dump-dom", (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert "<title>2 true</title>" in done.stdout
