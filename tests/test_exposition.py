import gzip
import math
from pathlib import Path
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvwatch.errors import ExpositionError
from kvwatch.exposition import MAX_PAGE_BYTES, decode, read_samples
from kvwatch.vllm_metrics import PROCESS_START_TIME, SERIES

PAGES = sorted((Path(__file__).parent / "data" / "exposition").glob("*.prom"))
CAPTURED = sorted((Path(__file__).parent / "data" / "captures").glob("*/*.prom"))


def wanted(name: str) -> bool:
    return name in SERIES or name == PROCESS_START_TIME


def comparable(samples: list[tuple[str, dict[str, str], float]]) -> list[tuple[str, list[tuple[str, str]], str]]:
    return [(name, sorted(labels.items()), repr(float(value))) for name, labels, value in samples]


def by_reference(page: str) -> list[tuple[str, dict[str, str], float]]:
    families = text_string_to_metric_families(page)
    return [(s.name, dict(s.labels), s.value) for family in families for s in family.samples if wanted(s.name)]


def by_kvwatch(page: str) -> list[tuple[str, dict[str, str], float]]:
    return [(s.name, dict(s.labels), s.value) for s in read_samples(page)]


@pytest.mark.parametrize("page", [*PAGES, *CAPTURED], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_reader_agrees_with_the_reference_parser(page: Path) -> None:
    text = page.read_text()
    assert comparable(by_reference(text)) == comparable(by_kvwatch(text))


names = st.sampled_from([*sorted(SERIES), "vllm:num_preemptions_created", "other_total", PROCESS_START_TIME])
label_names = st.sampled_from(["engine", "model_name", "le", "reason", "note"])
label_values = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8) | st.sampled_from(
    ['"', "\\", "\n", "}", "{", '="', '"} 7', "a,b=c", ""]
)
values = st.floats() | st.sampled_from(["NaN", "+Inf", "-Inf", "0", "12", "1e3"])
blanks = st.sampled_from([" ", "  ", "\t"])


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


@st.composite
def lines(draw: st.DrawFn) -> str:
    labels = draw(st.dictionaries(label_names, label_values, max_size=3))
    inside = ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())
    comma = draw(st.sampled_from(["", ","])) if labels else ""
    braces = f"{{{inside}{comma}}}" if bool(labels) or draw(st.booleans()) else ""
    stamp = draw(st.sampled_from(["", " 1796006760702"]))
    return f"{draw(names)}{braces}{draw(blanks)}{draw(values)}{stamp}"


@given(st.lists(lines() | st.sampled_from(["", "# a comment", "# EOF"]), max_size=12))
def test_the_reader_agrees_with_the_reference_parser_on_any_page(page_lines: list[str]) -> None:
    page = "\n".join(page_lines) + "\n"
    assert comparable(by_reference(page)) == comparable(by_kvwatch(page))


@given(st.text())
def test_any_text_gives_samples_or_an_exposition_error(text: str) -> None:
    try:
        read_samples(text)
    except ExpositionError as error:
        assert str(error)


@given(st.binary())
def test_any_bytes_give_samples_or_an_exposition_error(body: bytes) -> None:
    try:
        read_samples(decode(body))
    except ExpositionError as error:
        assert str(error)


def test_created_series_are_ignored() -> None:
    page = (
        "# TYPE vllm:num_preemptions_created gauge\nvllm:num_preemptions_created 1.7e9\nvllm:num_preemptions_total 3\n"
    )
    assert [("vllm:num_preemptions_total", 3.0)] == [(s.name, s.value) for s in read_samples(page)]


def test_a_longer_name_is_not_taken_for_a_shorter_one() -> None:
    page = 'vllm:num_requests_waiting 72\nvllm:num_requests_waiting_by_reason{reason="capacity"} 72\n'
    assert ["vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason"] == [s.name for s in read_samples(page)]


def test_nan_and_infinity_are_read() -> None:
    nan, infinity = read_samples("vllm:num_requests_running NaN\nvllm:num_requests_running +Inf\n")
    assert math.isnan(nan.value)
    assert math.inf == infinity.value


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("<!DOCTYPE html><html><body>Sign in</body></html>\n", "HTML"),
        ('{"detail":"Not Found"}\n', "JSON"),
        ("vllm:num_requests_running 1\nvllm:num_requests_wai", "ends inside a line"),
        ('vllm:num_requests_running{engine="0 1\n', "line 1 is not a sample"),
        ("vllm:num_requests_running\n", "line 1 is not a sample"),
        ("vllm:num_requests_running abc\n", "line 1 is not a sample"),
        ("vllm:num_requests_running 1_0\n", "line 1 is not a sample"),
        ('vllm:num_requests_running{a="1",a="2"} 1\n', "stands twice"),
    ],
)
def test_what_is_no_exposition_is_refused_with_its_reason(page: str, says: str) -> None:
    with pytest.raises(ExpositionError, match=says):
        read_samples(page)


def test_an_empty_page_has_no_samples() -> None:
    assert [] == read_samples("")


def test_a_gzip_page_is_unpacked() -> None:
    assert "vllm:num_requests_running 1\n" == decode(gzip.compress(b"vllm:num_requests_running 1\n"))


def test_a_gzip_page_cut_short_is_refused() -> None:
    with pytest.raises(ExpositionError, match="cut short"):
        decode(gzip.compress(bytes(range(256)) * 40)[:-9])


def test_a_page_over_the_limit_is_refused() -> None:
    with pytest.raises(ExpositionError, match="more than the"):
        decode(b"x" * (MAX_PAGE_BYTES + 1))


def test_a_small_gzip_of_a_huge_page_is_refused_without_unpacking_it_all() -> None:
    with pytest.raises(ExpositionError, match="at least"):
        decode(gzip.compress(b"\n" * (8 * MAX_PAGE_BYTES)))


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(ExpositionError, match="not UTF-8"):
        decode(b"\x80\x81\x82")


def test_the_work_of_a_line_grows_with_its_labels_and_not_with_their_square() -> None:
    def seconds(labels: int) -> float:
        many = ",".join(f'a_label_with_a_long_name_{n}="b"' for n in range(labels))
        page = f"vllm:num_requests_running{{{many}}} 1\n"
        started = process_time()
        assert len(read_samples(page)[0].labels) == labels
        return process_time() - started

    assert min(seconds(20_000) for _ in range(3)) < 9 * min(seconds(5_000) for _ in range(3))
