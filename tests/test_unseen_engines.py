"""What a report says of engines whose page cannot be read now."""

from pathlib import Path

from kvwatch.finding import Status
from kvwatch.render.text import report_text
from kvwatch.report import Report, Scrape, report
from kvwatch.snapshot import EngineKey, Snapshot
from kvwatch.sources.capture import read_capture
from kvwatch.window import windows

THRASH = Path(__file__).parent / "data" / "captures" / "thrash"
KEY = EngineKey(target="http://pod:8000", model_name="tiny-llama", engine="0")
REFUSED = "scrape failed: http://pod:8000/metrics: no connection"


def thrash() -> list[Snapshot]:
    return list(read_capture(THRASH, target=KEY.target, notes=[]))


def statuses(judged: Report) -> dict[str, Status]:
    return {finding.check: finding.status for finding in judged.engines[0].findings}


def test_an_engine_whose_scrape_failed_is_critical_and_nothing_old_is_shown() -> None:
    judged = report(windows(thrash()), failures={KEY: REFUSED})
    (engine,) = judged.engines
    assert engine.key == KEY
    assert engine.observed == {}
    assert engine.capacity.num_gpu_blocks is None
    assert engine.recommendations == ()
    assert engine.at_seconds == thrash()[-1].at_seconds
    expected = dict.fromkeys(statuses(judged), Status.UNKNOWN) | {"metrics_missing": Status.CRITICAL}
    assert statuses(judged) == expected
    assert engine.findings[0].summary == REFUSED


def test_a_target_that_never_showed_an_engine_has_an_entry_of_its_own() -> None:
    never = EngineKey(target="http://pod:8000", model_name="", engine="")
    judged = report((), failures={never: REFUSED})
    assert [engine.key for engine in judged.engines] == [never]
    assert judged.engines[0].at_seconds is None
    assert judged.worst is Status.CRITICAL
    assert "no engine seen yet" in report_text(judged)


def test_only_the_engine_that_failed_is_unknown() -> None:
    other = EngineKey(target="http://other:8000", model_name="tiny-llama", engine="0")
    judged = report(windows(thrash()), failures={other: REFUSED})
    by_key = {engine.key: engine for engine in judged.engines}
    assert set(by_key) == {KEY, other}
    assert by_key[KEY].observed["running_requests"] == 18
    assert by_key[other].observed == {}


def test_a_report_carries_how_each_scrape_went() -> None:
    scrape = Scrape(target="http://pod:8000", at_seconds=1.0, duration_seconds=0.01, failure="no connection")
    assert report((), scrapes=[scrape]).scrapes == (scrape,)
