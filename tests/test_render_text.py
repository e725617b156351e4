"""A report as text: what an SRE reads at night."""

from dataclasses import replace
from pathlib import Path

import pytest
from goldens import golden
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import CAPTURES, EXPOSITION, engine_page, read, window_of

from kvwatch.errors import printable
from kvwatch.finding import Finding, Status
from kvwatch.render.text import report_text
from kvwatch.report import Report, report
from kvwatch.sources.capture import read_capture
from kvwatch.window import windows

WIDTHS = (80, 120)


def recorded(name: str) -> Report:
    """The report of a capture, or of a page if there is one of this name."""
    page = EXPOSITION / f"{name}.prom"
    found = (
        read(page.read_text(), target=name) if page.exists() else read_capture(CAPTURES / name, target=name, notes=[])
    )
    return report(windows(found))


def widest(text: str) -> int:
    return max(len(line) for line in text.splitlines())


# Whole reports -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "name",
    ["healthy", "prefix", "thrash", "v0.15ish_qwen3coder30b_live", "nim_llama31_8b", "dp2_engines"],
)
def test_a_check_reads_as_expected(name: str, width: int) -> None:
    text = report_text(recorded(name), width=width) + "\n"
    assert widest(text) <= width
    assert text == golden(f"check_{name}_{width}.txt", text)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["healthy", "thrash", "nim_llama31_8b"])
def test_a_recommendation_reads_as_expected(name: str, width: int) -> None:
    text = report_text(recorded(name), width=width, recommendations_first=True) + "\n"
    assert widest(text) <= width
    assert text == golden(f"recommend_{name}_{width}.txt", text)


@pytest.mark.parametrize("page", sorted(EXPOSITION.glob("*.prom")), ids=lambda path: path.stem)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(page: Path, width: int) -> None:
    for first in (False, True):
        text = report_text(recorded(page.stem), width=width, recommendations_first=first)
        assert widest(text) <= max(width, len(page.stem) + 4)  # a name is not broken


# Headlines -----------------------------------------------------------------------------------------------------------


def headline(judged: Report) -> str:
    return " ".join(report_text(judged, width=500).split("\n\n")[0].split())


def with_statuses(judged: Report, **statuses: Status) -> Report:
    (engine,) = judged.engines
    findings = tuple(replace(f, status=statuses.get(f.check, Status.OK)) for f in engine.findings)
    return replace(judged, engines=(replace(engine, findings=findings),))


@pytest.mark.parametrize("recommendations_first", [False, True])
def test_what_to_do_stands_directly_below_the_problems(recommendations_first: bool) -> None:
    judged = report(windows(read_capture(CAPTURES / "thrash", target="thrash", notes=[])))
    text = report_text(judged, recommendations_first=recommendations_first)
    marks = ("  CRITICAL ", "  WARNING  ", "Now, without a restart:", "  unknown  ", "  ok       ")
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)


def test_the_worst_finding_is_the_headline() -> None:
    assert headline(recorded("thrash")) == (
        "CRITICAL preemptions_sustained: 0.66 preemptions per second, 0.83 per finished request (1 engine over 38 s)"
    )


def test_an_engine_is_fine_where_only_the_budget_is_not_known() -> None:
    judged = with_statuses(recorded("healthy"), capacity_below_budget=Status.UNKNOWN)
    count = len(judged.engines[0].findings)
    assert headline(judged) == (
        f"OK {count - 1} of {count} checks ok, 1 unknown; no problem found (1 engine over 38 s)"
    )


def test_all_checks_fine() -> None:
    judged = with_statuses(recorded("healthy"))
    count = len(judged.engines[0].findings)
    assert headline(judged) == f"OK {count} of {count} checks ok; no problem found (1 engine over 38 s)"


@pytest.mark.parametrize("check", ["engine_stalled", "preemptions_sustained", "kv_cache_saturated"])
def test_an_engine_is_not_called_fine_where_harm_could_not_be_judged(check: str) -> None:
    text = headline(with_statuses(recorded("healthy"), **{check: Status.UNKNOWN}))
    assert text.startswith(f"UNKNOWN no problem found, but {check} was not judged: ")


def test_a_single_page_is_never_fine() -> None:
    for page in EXPOSITION.glob("*.prom"):
        assert headline(recorded(page.stem)).split()[0] in {"UNKNOWN", "WARNING"}


def test_no_engine_at_all() -> None:
    assert headline(report(())) == "UNKNOWN no engine was read"


# Words, colour, names ------------------------------------------------------------------------------------------------


def test_colour_marks_the_status_words_and_nothing_else() -> None:
    plain, coloured = (report_text(recorded("thrash"), colour=colour) for colour in (False, True))
    assert "\x1b" not in plain
    assert "\x1b[1;31mCRITICAL\x1b[0m" in coloured
    bare = coloured
    for code in ("\x1b[1;31m", "\x1b[33m", "\x1b[32m", "\x1b[36m", "\x1b[0m"):
        bare = bare.replace(code, "")
    assert bare == plain


def test_flags_are_not_broken_at_their_hyphens() -> None:
    judged = recorded("v0.15ish_qwen3coder30b_live")
    for width in range(60, 121):
        for line in report_text(judged, width=width).splitlines():
            assert not line.rstrip().endswith("-")


def test_a_name_from_a_page_cannot_colour_or_move_the_cursor() -> None:
    judged = report([window_of([engine_page(model_name=r"evil\n\n\nname")] * 2)])
    (engine,) = judged.engines
    hostile = replace(engine.key, model_name="evil\x1b[2J\x07\r\x9b31m", target="http://x\x1b]0;title\x07")
    finding = Finding(check="x", status=Status.WARNING, summary="a\x1b[31mb", evidence={}, runbook="")
    changed = replace(engine, key=hostile, findings=(*engine.findings, finding))
    text = report_text(replace(judged, engines=(changed,), notes=("n\x1b[31m",)))
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "evil" in text


def test_notes_stand_at_the_end() -> None:
    text = report_text(report([window_of([engine_page()])], notes=["one page was left out"]))
    assert text.endswith("\n\nnote: one page was left out")


words = st.text(max_size=60)
statuses = st.sampled_from(list(Status))


@given(
    findings=st.lists(st.tuples(statuses, words), min_size=1, max_size=5),
    model=words,
    target=words,
    notes=st.lists(words, max_size=2),
    width=st.integers(60, 120),
    first=st.booleans(),
)
@settings(max_examples=80)
def test_any_report_is_rendered_within_the_width(
    *,
    findings: list[tuple[Status, str]],
    model: str,
    target: str,
    notes: list[str],
    width: int,
    first: bool,
) -> None:
    judged = BASE
    (engine,) = judged.engines
    changed = replace(
        engine,
        key=replace(engine.key, model_name=model, target=target),
        findings=tuple(
            replace(engine.findings[i], status=status, summary=summary) for i, (status, summary) in enumerate(findings)
        ),
    )
    text = report_text(
        replace(judged, engines=(changed,), notes=tuple(notes)), width=width, recommendations_first=first
    )
    # what a terminal would obey is shown as its number, which is longer
    longest_word = max(len(printable(part)) for part in (model, target, *notes, *(s for _, s in findings), "x"))
    assert all(len(line) <= max(width, longest_word + 12) for line in text.split("\n"))
    assert all(character.isprintable() or character == "\n" for character in text)


BASE = report([window_of([engine_page()] * 3)])
