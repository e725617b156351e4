"""Workload files, lists of requests, and request logs: from disk to a Workload.

A request log is what a gateway or a public trace recorded: one request a line, as JSON objects or as CSV with a header.
Times may be seconds, unix times or ISO 8601; the first request becomes second 0. Names that are recognised, in upper or
lower case, also inside an object named `usage`:

- time: at_seconds, timestamp, time, arrival_time, created, start_time
- prompt tokens: prompt_tokens, input_tokens, context_tokens, ContextTokens, Request tokens
- output tokens: output_tokens, completion_tokens, generated_tokens, GeneratedTokens, Response tokens

Requests without output tokens failed or were cancelled, and are left out with a note. Azure's LLM inference traces and
BurstGPT are of this form.
"""

import csv
import json
import math
import os
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kvwatch.errors import SettingError, SourceError, shown
from kvwatch.files import bounded_text
from kvwatch.long_context_trap import NAME as LONG_CONTEXT_TRAP
from kvwatch.long_context_trap import long_context_trap
from kvwatch.simulation import Request, Workload
from kvwatch.workload_spec import REQUEST_SOURCES, request_from, workload_from

BUILT_IN = {LONG_CONTEXT_TRAP: long_context_trap}

MAX_FILE_BYTES = 256 * 1024 * 1024
"""Largest workload file or list of requests; a million requests take about 60 MiB."""

_LATEST_SECONDS = 1e11  # as milliseconds it was in 1973

_TIMES = ("at_seconds", "timestamp", "time", "arrival_time", "created", "start_time", "starttime")
_PROMPTS = ("prompt_tokens", "input_tokens", "context_tokens", "contexttokens", "request tokens")
_OUTPUTS = ("output_tokens", "completion_tokens", "generated_tokens", "generatedtokens", "response tokens")


def read_workload(name: str, *, notes: list[str]) -> Workload:
    """A built-in workload by its name, or a YAML or JSON file. What is left out of a log is added to `notes`.

    Raises SourceError for what cannot be read and SettingError for what cannot be used.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    path = Path(name)
    mapping = _parse(path, _text(path))
    if not isinstance(mapping, Mapping):
        raise SettingError(f"{path} holds no mapping; a workload has the keys engine, cost and requests.")
    sources = [key for key in REQUEST_SOURCES if mapping.get(key) is not None]
    if len(sources) > 1:
        raise SettingError(f"{path} has {' and '.join(sources)}; requests come from one place. Keep one of them.")
    requests: tuple[Request, ...] | None = None
    if sources and sources[0] != "requests":
        given = mapping[sources[0]]
        if not isinstance(given, str):
            raise SettingError(f"{path}: {sources[0]} is {shown(given)}; it must be the name of a file.")
        file = path.parent / _file_name(given, f"{path}: {sources[0]}")
        requests = read_requests(file) if sources[0] == "requests_file" else read_request_log(file, notes=notes)
    try:
        return workload_from(mapping, requests=requests)
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from error


def _file_name(given: str, where: str) -> str:
    """As it is, where the system can have a file of that name."""
    try:
        possible = "\0" not in given and bool(os.fsencode(given))
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise SettingError(f"{where} is {shown(given)}; no file can have that name.")
    return given


def read_requests(path: Path) -> tuple[Request, ...]:
    """JSON lines, each an object as under `requests` of a workload file."""
    return tuple(request_from(item, where) for where, item in _json_lines(path))


def read_request_log(path: Path, *, notes: list[str]) -> tuple[Request, ...]:
    """A log -> requests ordered by time, the first at second 0."""
    rows = _json_lines(path) if path.suffix in {".jsonl", ".json", ".ndjson"} else _csv_rows(path)
    found: list[tuple[float, int, int, str]] = []
    unanswered = 0
    for where, row in rows:
        columns = _columns(row, where)
        prompt, output = (_tokens(_pick(columns, names, where), where) for names in (_PROMPTS, _OUTPUTS))
        at_seconds = _time(_pick(columns, _TIMES, where), where)
        if output < 1 or prompt < 1:
            unanswered += 1
            continue
        found.append((at_seconds, prompt, output, where))
    if not found:
        raise SourceError(f"{path}: no request with prompt and output tokens in it")
    if unanswered:
        notes.append(f"{path}: {unanswered} of {unanswered + len(found)} requests left out, they have no output tokens")
    found.sort(key=lambda item: item[0])
    start = found[0][0]
    return tuple(_logged(at_seconds - start, prompt, output, where) for at_seconds, prompt, output, where in found)


def _logged(at_seconds: float, prompt: int, output: int, where: str) -> Request:
    try:
        return Request(at_seconds=round(at_seconds, 6), prompt_tokens=prompt, output_tokens=output)
    except SettingError as error:
        raise SettingError(f"{where}: {error}") from error


def _text(path: Path) -> str:
    try:
        return bounded_text(path, limit_bytes=MAX_FILE_BYTES)
    except OSError as error:
        known = ", ".join(BUILT_IN)
        server = f"; for a server give http://{path}" if ":" in str(path) or str(path) == "localhost" else ""
        raise SourceError(
            f"{path}: {error.strerror}; a workload is a file or the name of a built-in one ({known}){server}"
        ) from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8 text: {error}") from error


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".json":
        try:
            return json.loads(text, object_pairs_hook=_once_each)
        except (ValueError, RecursionError) as error:
            raise SettingError(f"{path} is not JSON: {error}") from error
    import yaml  # noqa: PLC0415 -- a tenth of the start-up time, and lists of requests need none of it

    from kvwatch.yaml_once import load_yaml  # noqa: PLC0415 -- it imports yaml

    try:
        return load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 2001-99-99, a number of 5,000 digits
        raise SettingError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in which no key is there twice: of two values one would be lost without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there {names.count(twice)} times")
    return found


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    # Not splitlines(): U+2028 and U+0085 may stand in a string of JSON as they are.
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", json.loads(line, object_pairs_hook=_once_each)
        except (ValueError, RecursionError) as error:
            raise SettingError(f"{path}:{number} is not JSON ({error}); write one object a line.") from error


def _csv_rows(path: Path) -> Iterator[tuple[str, Any]]:
    reader = csv.DictReader(_text(path).splitlines())
    try:
        names = reader.fieldnames or ()
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SettingError(f"{path} has the column {twice[0]!r} {names.count(twice[0])} times; keep one of them.")
        yield from ((f"{path}:{number}", row) for number, row in enumerate(reader, start=2))
    except csv.Error as error:
        raise SettingError(f"{path} is not CSV: {error}") from error


def _columns(row: Any, where: str) -> dict[str, Any]:
    """Names in lower case; `usage` of an OpenAI answer is looked into."""
    if not isinstance(row, Mapping):
        raise SettingError(f"{where} is {shown(row)}, not an object with a time and token counts.")
    usage = row.get("usage")
    flat = {**row, **usage} if isinstance(usage, Mapping) else row
    return {str(key).strip().lower(): value for key, value in flat.items()}


def _pick(columns: Mapping[str, Any], names: tuple[str, ...], where: str) -> Any:
    for name in names:
        if columns.get(name) not in (None, ""):  # a list of JSON fits in no set
            return columns[name]
    raise SettingError(f"{where} has none of {', '.join(names)}; its columns are {', '.join(columns)[:500]}.")


def _tokens(value: Any, where: str) -> int:
    """A whole number of at least 0; a log of text may write it 700 or 700.0."""
    try:
        number = int(value) if isinstance(value, int) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or "_" in str(value) or not number >= 0 or number % 1 != 0:
        raise SettingError(f"{where}: {shown(value)} is not a number of tokens.")
    return int(number)


def _time(value: Any, where: str) -> float:
    """Seconds: a number, or an ISO 8601 time (UTC where it names no zone)."""
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return _iso_time(str(value), where)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise SettingError(f"{where}: {shown(value)} is not a time.")
    if abs(seconds) > _LATEST_SECONDS:
        raise SettingError(
            f"{where}: {shown(value)} seconds is in the year 5138 or later; milliseconds? Give seconds since 1970, or "
            "since any other moment."
        )
    return seconds


def _iso_time(text: str, where: str) -> float:
    # Azure's traces have seven digits of a second, and Python before 3.11 wants three or six and no Z.
    head, dot, rest = text.strip().replace("Z", "+00:00").partition(".")
    digits = len(rest) - len(rest.lstrip("0123456789"))
    try:
        moment = datetime.fromisoformat(head + (f".{rest[:digits][:6]:0<6}{rest[digits:]}" if dot else ""))
    except ValueError as error:
        raise SettingError(f"{where}: {text[:60]!r} is neither a number of seconds nor an ISO 8601 time.") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
