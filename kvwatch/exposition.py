"""Prometheus text exposition -> the samples kvwatch reads.

prometheus_client's parser is the reference (https://prometheus.io/docs/instrumenting/exposition_formats/). This reader
looks only at the families of `vllm_metrics` and skips every other line unread, which is what makes a scrape cheap; on
those families it must agree with the reference, sample for sample (tests/test_exposition.py).
"""

import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from kvwatch.errors import ExpositionError
from kvwatch.vllm_metrics import ENGINE_ONLY, PROCESS_START_TIME, SERIES

MAX_PAGE_BYTES = 16 * 1024 * 1024
"""Largest page accepted, after decompression. A busy vLLM with many engines writes well under 1 MiB."""

_GZIP_MAGIC = b"\x1f\x8b"
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_NO_MORE_LABELS = re.compile(r"[ \t,]*\Z")
_LABELS_END = re.compile(r'(?:[^"}]|"(?:[^"\\]|\\.)*")*\}')
_ESCAPE = re.compile(r'\\[\\n"]')
_UNESCAPED = {"\\\\": "\\", "\\n": "\n", '\\"': '"'}


class Sample(NamedTuple):
    """One line of an exposition. `labels` is shared between samples: read it, do not change it."""

    name: str
    labels: Mapping[str, str]
    value: float


def decode(body: bytes, *, limit_bytes: int = MAX_PAGE_BYTES) -> str:
    """Page bytes -> text. Unpacks gzip, bounded. Raises ExpositionError if too large, not whole or not UTF-8."""
    if body.startswith(_GZIP_MAGIC):
        body = _gunzip(body, limit_bytes)
    if len(body) > limit_bytes:
        raise ExpositionError(_too_large(len(body), limit_bytes))
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ExpositionError(
            f"the page is not UTF-8 text (byte {error.start} is 0x{body[error.start]:02x}); "
            "give the address of a Prometheus /metrics page or a file saved from one"
        ) from error


def read_samples(text: str, *, is_wanted: Callable[[str], bool] | None = None) -> list[Sample]:
    """Text exposition -> the samples of the wanted names (default: those of `vllm_metrics`), in page order.

    Raises ExpositionError for HTML or JSON, for a page that ends inside a line, and for a wanted line that does not
    parse (with its number). Lines of other families are not looked at.
    """
    _refuse_other_formats(text)
    wanted = is_wanted or _is_read_by_kvwatch
    known: dict[str, bool] = {}
    label_sets: dict[str, dict[str, str]] = {"": {}}
    samples: list[Sample] = []
    for number, line in enumerate(text.split("\n"), start=1):
        brace = line.find("{")
        name = line[:brace] if brace > 0 else _first_word(line)
        take = known.get(name)
        if take is None:
            take = known[name] = _decide(name, wanted)
        if take:
            samples.append(_read_line(line, brace, number, label_sets))
    return samples


def is_vllm_page(samples: Iterable[Sample]) -> bool:
    """Whether any sample belongs to vLLM rather than to the process around it or to another kind of server."""
    found = {SERIES[name] for name in {sample.name for sample in samples} - {PROCESS_START_TIME}}
    return any(series.prefix or series.metric in ENGINE_ONLY for series in found)


def _is_read_by_kvwatch(name: str) -> bool:
    return name in SERIES or name == PROCESS_START_TIME


def _decide(raw_name: str, wanted: Callable[[str], bool]) -> bool:
    name = raw_name.strip()
    return bool(name) and name[0] != "#" and wanted(name)


def _first_word(line: str) -> str:
    return line.split(None, 1)[0] if line and not line.isspace() else ""


def _read_line(line: str, brace: int, number: int, label_sets: dict[str, dict[str, str]]) -> Sample:
    try:
        if brace <= 0:
            name, rest = line.split(None, 1)
            return Sample(name, label_sets[""], _value(rest))
        end = _labels_end(line, brace)
        text = line[brace + 1 : end]
        labels = label_sets.get(text)
        if labels is None:
            labels = label_sets[text] = _labels(text)
        return Sample(line[:brace].strip(), labels, _value(line[end + 1 :]))
    except (ValueError, IndexError) as error:
        raise ExpositionError(
            f"line {number} is not a sample: {line.strip()[:120]!r} ({error}); "
            "the page may be cut short or may not be a Prometheus exposition: fetch it again"
        ) from error


def _labels_end(line: str, brace: int) -> int:
    """Index of the brace that closes the labels; a brace or an escaped quote may stand inside a value."""
    end = line.find('"}', brace)
    if end > 0 and line[end - 1] != "=" and "\\" not in line[brace:end]:
        return end + 1
    match = _LABELS_END.match(line, brace + 1)
    if match is None:
        raise ValueError("the labels do not end")
    return match.end() - 1


def _labels(text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    position = 0
    while not _NO_MORE_LABELS.match(text, position):
        match = _LABEL.match(text, position)
        if match is None:
            raise ValueError(f"labels {text!r}")
        name, value = match.group(1), match.group(2)
        if name in labels:
            raise ValueError(f"label {name!r} stands twice")
        labels[name] = _ESCAPE.sub(lambda m: _UNESCAPED[m.group()], value) if "\\" in value else value
        position = match.end()
    return labels


def _value(text: str) -> float:
    """The first word: a timestamp or an exemplar may follow."""
    word = text.split(None, 1)[0]
    if "_" in word:  # float() would take 1_000
        raise ValueError(f"value {word!r}")
    return float(word)


def _refuse_other_formats(text: str) -> None:
    head = text[:512].lstrip()
    if head.startswith("<"):
        raise ExpositionError(
            "this is an HTML or XML page, not a Prometheus exposition; a login page or a proxy may stand in front: "
            "give the engine's own address, for example http://HOST:8000"
        )
    if head.startswith(("{", "[")):
        raise ExpositionError(
            "this is JSON, not a Prometheus exposition; vLLM serves its metrics at /metrics: give that address"
        )
    if text.strip() and not text.endswith("\n"):
        last = text[text.rfind("\n") + 1 :]
        raise ExpositionError(
            f"the page ends inside a line ({last[:80]!r}); an exposition ends with a line feed, so this one is not "
            "whole: fetch or save it again"
        )


def _gunzip(body: bytes, limit_bytes: int) -> bytes:
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        page = unpacker.decompress(body, limit_bytes + 1)
    except zlib.error as error:
        raise ExpositionError(f"the page is damaged gzip data ({error}): fetch it again") from error
    if len(page) > limit_bytes:
        raise ExpositionError(_too_large(len(page), limit_bytes, at_least=True))
    if not unpacker.eof:
        raise ExpositionError("the page is gzip data cut short: fetch it again")
    return page


def _too_large(size: int, limit: int, *, at_least: bool = False) -> str:
    return (
        f"the page has {'at least ' if at_least else ''}{size:,} bytes, more than the {limit:,} kvwatch reads; "
        "one vLLM server writes far less: give the address of a single server, not of a federation endpoint"
    )
