import re
from dataclasses import replace

from goldens import golden
from reports import AT_SECONDS, DOWN, FLEET, HEALTHY, THRASHING, report_of

from kvwatch import __version__
from kvwatch.proposal import SettingOption, SimulationBasis
from kvwatch.render.html import report_html
from kvwatch.render.html_assets import SCRIPT, STYLE
from kvwatch.report import Report


def body(report: Report | None, **more: float | str) -> str:
    """The page from its body on, without style and script."""
    page = report_html(report, at_seconds=AT_SECONDS, **more)  # type: ignore[arg-type]
    return page[page.index("<body") :].replace(SCRIPT, "")


def test_the_page_of_a_fleet() -> None:
    page = report_html(FLEET, at_seconds=AT_SECONDS, interval_seconds=5).replace(STYLE, "").replace(SCRIPT, "")
    page = re.sub(r"'sha256-[^']+'", "'sha256-HASH'", page.replace(f"kvwatch {__version__}", "kvwatch VERSION"))
    assert page == golden("report.html", page)


def test_the_verdict_and_what_to_do_now_stand_before_everything_else() -> None:
    page = body(FLEET)
    header = page[: page.index("<main")]
    assert "CRITICAL" in header
    assert "the KV pool is thrashing" in header
    assert "0.66 preemptions per second" in header
    assert "at 17 in the gateway" in header
    assert THRASHING.key.target in header


def test_the_worst_engine_comes_first_in_table_and_sections() -> None:
    page = body(FLEET)
    places = [page.index(f"id='e{number}'") for number in range(3)]
    assert places == sorted(places)
    assert page.index("10.0.0.7", page.index("<main")) < page.index("10.0.0.8", page.index("<main"))


def test_an_engine_without_a_problem_is_green_even_if_a_check_is_unknown() -> None:
    page = body(report_of(HEALTHY))
    assert "class='verdict ok'" in page
    assert "No problem found" in page


def test_no_data_yet_says_so() -> None:
    page = body(None, interval_seconds=5)
    assert "No data yet" in page
    assert "class='verdict unknown'" in page


def test_a_target_that_is_down_shows_why_and_no_number() -> None:
    page = body(report_of(DOWN))
    assert "There is no current page of an engine" in page
    assert "scrape failed: no connection" in page
    assert "never read" in page
    assert "<dl" not in page
    assert "over 60 s" not in page


def test_an_old_report_is_not_called_current() -> None:
    page = body(report_of(THRASHING), stale="the latest report is 45 s old")
    assert "class='verdict unknown'" in page
    assert "what stands below is old" in page
    assert "Now:" not in page[: page.index("<main")]


def test_what_was_simulated_is_a_table_relative_to_the_present_settings() -> None:
    now = SettingOption(
        name="now",
        max_num_seqs=None,
        watermark=0.0,
        gateway_max_in_flight=None,
        num_gpu_blocks=256,
        preemptions_per_request=0.41,
        preemptions_per_request_low=0.38,
        preemptions_per_request_high=0.46,
        recomputed_tokens_per_request=300.0,
        output_throughput_ratio=1.0,
        output_throughput_ratio_low=1.0,
        output_throughput_ratio_high=1.0,
        steps_ratio=1.0,
        output_tokens_per_second=None,
        ttft_p50_ratio=None,
        ttft_p99_ratio=None,
        itl_p50_ratio=None,
        itl_p99_ratio=None,
    )
    gateway = replace(now, name="gateway", gateway_max_in_flight=19, preemptions_per_request=0.14, ttft_p99_ratio=0.6)
    basis = SimulationBasis(
        objective="balanced",
        requests=200,
        draws=3,
        observed_preemptions_per_request=0.34,
        simulated_preemptions_per_request=0.41,
        cost_error_ratio=None,
        inputs=(),
    )
    page = body(report_of(replace(THRASHING, options=(now, gateway), simulation=basis)))
    rows = [
        re.findall(r"<t[dh][^>]*>([^<]*)", row) for row in page.split("<tr>") if "0.41" in row or "gateway 19" in row
    ]
    assert rows == [
        ["now", "0.41", "100%", "", "0", "", ""],
        ["gateway 19", "0.14", "100%", "", "0", "60%", ""],
    ]


def test_everything_from_outside_is_escaped() -> None:
    evil = "<img src=x onerror=alert(1)>\"'&"
    key = replace(THRASHING.key, model_name=evil, target=evil, engine=evil)
    page = body(report_of(replace(THRASHING, key=key, vllm_version=evil), DOWN))
    assert "<img" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;&quot;&#x27;&amp;" in page


def test_the_page_loads_nothing_from_elsewhere() -> None:
    page = report_html(FLEET, at_seconds=AT_SECONDS, interval_seconds=5)
    assert re.findall(r"(?:src|url\(|@import)", page) == ["src"] * page.count("-src")
    assert "default-src 'none'" in page


def test_a_page_to_keep_has_no_script_and_does_not_refresh() -> None:
    page = report_html(FLEET, at_seconds=AT_SECONDS)
    assert "<script" not in page
    assert "http-equiv='refresh'" not in page


def test_what_the_reader_opened_can_be_found_again_after_a_refresh() -> None:
    page = body(FLEET)
    ids = re.findall(r"<details[^>]* id='([^']+)'", page)
    assert len(ids) == page.count("<details")
    assert len(set(ids)) == len(ids)
