"""Engines behind Prometheus, Thanos, Mimir or VictoriaMetrics: the pages they scraped, put together again.

An instant query for a range selector gives the samples as they were scraped, each with its own time
(https://prometheus.io/docs/prometheus/latest/querying/api/#range-vectors; VictoriaMetrics does the same). All series of
one scrape share its time, so samples of one target and time are one page. A range query would repeat the latest value
at every step until the next scrape, and an engine scraped once a minute would look stalled in between.

Needs the extra `fleet`. prometheus-api-client leaves timeouts, sizes and errors to its session, so they are set here.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

from kvwatch.errors import ExpositionError, SourceError
from kvwatch.exposition import Sample
from kvwatch.snapshot import ENGINE_LABEL, INSTANCE_LABELS, MODEL_LABELS, CacheConfig, Snapshot, snapshots
from kvwatch.vllm_metrics import ALL, CACHE_CONFIG_INFO, PREFIXES, PROCESS_START_TIME, SERIES

CONNECT_SECONDS, READ_SECONDS, RETRIES = 3.0, 30.0, 1
MAX_SERIES = 100_000
"""An engine has about 600. What its samples take is bounded by MAX_ANSWER_BYTES."""
MAX_ANSWER_BYTES = 256 * 1024 * 1024

# Of a longer window not every sample is fetched, unless &step= says so: 240 pages, at most five minutes apart.
_RAW_SECONDS, _COARSEST_STEP_SECONDS = 3600.0, 300

_MATCHER = r'[a-zA-Z_][a-zA-Z0-9_]*\s*(?:=~|!~|!=|=)\s*"(?:[^"\\]|\\.)*"'
_SELECTOR = re.compile(rf"\{{\s*((?:{_MATCHER})(?:\s*,\s*(?:{_MATCHER}))*)?\s*,?\s*\}}")
_STEP = re.compile(r"[1-9][0-9]*(?:ms|s|m|h)")
_EXAMPLE = 'for example prometheus+http://HOST:9090?selector={job="vllm"}'


_INFO_NAMES = frozenset(name for name, series in SERIES.items() if series.metric is CACHE_CONFIG_INFO)
_TRIMMED = (
    f"{CACHE_CONFIG_INFO.exposed} is not in the history of this engine, so its pool is not known; VictoriaMetrics "
    "drops labels beyond -maxLabelsPerTimeseries (30 by default), and vLLM writes more: raise it to 60"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Where to ask and which series: `matchers` as PromQL writes them between braces, "" for all engines."""

    address: str
    matchers: str
    step: str | None = None

    def query(self, window_seconds: float) -> str:
        """PromQL for the raw samples of the window, or for one value every step where that is given."""
        names = f'__name__=~"{name_pattern()}"'
        selector = f"{{{', '.join(filter(None, (names, self.matchers)))}}}"
        return f"{selector}[{round(window_seconds * 1000)}ms{f':{self.step}' if self.step else ''}]"


def parse_history(where: str) -> History:
    """`http://HOST:9090/PATH?selector={…}&step=15s` -> History. Raises SourceError with an example."""
    address, _, query = where.partition("?")
    # not parse_qs: it reads the + of a regular expression as a blank
    before, *pairs = re.split(r"(?:^|&)(selector|step)=", query)
    given = dict(zip(pairs[::2], map(unquote, pairs[1::2]), strict=True))
    if before:
        raise SourceError(f"{where}: {before!r} is not understood; give selector={{…}} and step=…, {_EXAMPLE}")
    selector, step = given.get("selector", "{}").strip(), given.get("step")
    found = _SELECTOR.fullmatch(selector)
    if found is None:
        raise SourceError(f'{where}: {selector!r} is not a selector of the form {{label="value"}}; {_EXAMPLE}')
    if step is not None and not _STEP.fullmatch(step):
        raise SourceError(f"{where}: step={step!r} is not a duration; write 15s or 1m")
    return History(address=address.rstrip("/"), matchers=(found[1] or "").strip(), step=step)


def name_pattern() -> str:
    """A regular expression for every name that kvwatch reads; PromQL anchors it at both ends."""
    plain = [name for m in ALL if m.kind != "histogram" for name in (m.name, *m.former)]
    bars = [name for m in ALL if m.kind == "histogram" for name in (m.name, *m.former)]
    prefixes = "|".join(prefix for prefix in PREFIXES if prefix)
    return f"{PROCESS_START_TIME}|(?:{prefixes})?(?:{'|'.join(plain)}|(?:{'|'.join(bars)})_(?:bucket|sum|count))"


def read_history(
    where: str,
    *,
    window_seconds: float,
    now_seconds: float,
    notes: list[str],
    headers: Mapping[str, str] | None = None,
) -> list[Snapshot]:
    """The snapshots of all engines that the selector finds in (now - window, now].

    A target's page that is no engine's is left out and noted. Raises SourceError: the extra is missing, no answer, a
    refused query, too many series, nothing found.
    """
    history = parse_history(where)
    if history.step is None and window_seconds > _RAW_SECONDS:
        history = replace(history, step=f"{min(_COARSEST_STEP_SECONDS, math.ceil(window_seconds / 240))}s")
    client = _client(history.address, dict(headers or {}))
    query = history.query(window_seconds)
    # last_over_time keeps the names, so that series are counted and not merged
    count = _ask(client, f"count(last_over_time({query}))", now_seconds, history.address)
    amount = sum(int(float(entry["value"][1])) for entry in count)
    if amount == 0:
        raise SourceError(
            f"{where}: no series of vLLM in the last {window_seconds:.0f} s; try the selector in the web page of "
            'Prometheus, with {__name__=~"vllm[:_].+"} and without its other labels'
        )
    if amount > MAX_SERIES:
        raise SourceError(
            f"{where}: {amount:,} series, more than the {MAX_SERIES:,} kvwatch reads; narrow the selector, {_EXAMPLE}"
        )
    return _pages(_ask(client, query, now_seconds, history.address), where, notes)


def _pages(series: Iterable[Mapping[str, Any]], where: str, notes: list[str]) -> list[Snapshot]:
    """Series of many targets -> snapshots: what one target gave at one time is a page."""
    series = list(series)
    distinguishing = _target_labels(entry["metric"] for entry in series)
    pages: dict[tuple[tuple[str, ...], float], list[Sample]] = defaultdict(list)
    for entry in series:
        labels = dict(entry["metric"])
        name = labels.pop("__name__")
        target = tuple(labels.get(label, "") for label in distinguishing)
        for at_seconds, value in entry["values"]:
            pages[target, float(at_seconds)].append(Sample(name, labels, float(value)))
    found: list[Snapshot] = []
    left_out: dict[str, str] = {}
    for (target, at_seconds), samples in sorted(pages.items(), key=lambda item: item[0]):
        if all(sample.name in _INFO_NAMES for sample in samples):
            continue  # without the labels of its target: nobody's
        try:
            found += snapshots(samples, at_seconds=at_seconds, target=where)
        except ExpositionError as error:
            left_out["/".join(filter(None, target)) or where] = str(error)
    if not found:
        raise SourceError(f"{where}: {next(iter(left_out.values()), 'no engine was found')}")
    notes += [f"{target}: left out: {reason}" for target, reason in left_out.items()]
    latest = {snapshot.key: snapshot for snapshot in found}
    notes += [f"{key.target}: {_TRIMMED}" for key, last in latest.items() if last.cache_config == CacheConfig()]
    return found


def _target_labels(labels: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """Names of the labels that a scrape adds: those of series that vLLM labels with model and engine only.

    Two jobs that scrape one server, or two Prometheus servers behind Thanos, differ in some of them; without them their
    samples would be added up.
    """
    own = {"__name__", ENGINE_LABEL, *MODEL_LABELS}
    names = set(INSTANCE_LABELS)
    for found in labels:
        series = SERIES.get(found["__name__"])
        if series is None or (series.metric.kind in {"gauge", "counter"} and series.metric.split is None):
            names |= set(found) - own
    return tuple(sorted(names))


def _ask(client: Any, query: str, now_seconds: float, address: str) -> list[Mapping[str, Any]]:
    from prometheus_api_client.exceptions import PrometheusApiClientException  # noqa: PLC0415 -- the extra `fleet`
    from requests import RequestException  # noqa: PLC0415 -- comes with it

    try:
        answer = client.custom_query(query, params={"time": f"{now_seconds:.3f}"})
    except (RequestException, PrometheusApiClientException, LookupError, TypeError, ValueError) as error:
        raise SourceError(
            f"{address}: not the answer of a Prometheus API ({type(error).__name__}: {str(error)[:160]}); give the "
            f"address whose /api/v1/query answers, {_EXAMPLE}"
        ) from error
    if not isinstance(answer, list):
        raise SourceError(f"{address}: the answer has no list of series; is this a Prometheus API?")
    return answer


def _client(address: str, headers: dict[str, str]) -> Any:
    try:
        from prometheus_api_client import PrometheusConnect  # noqa: PLC0415 -- the extra `fleet`
    except ImportError as error:
        raise SourceError(
            f"{address}: a Prometheus history needs prometheus-api-client (the extra `fleet`), which is not installed: "
            "pip install prometheus-api-client"
        ) from error
    from urllib3.util import Retry  # noqa: PLC0415 -- only with the extra

    from kvwatch.sources.prometheus_session import session  # noqa: PLC0415 -- only with the extra

    retry = Retry(total=RETRIES, connect=0, read=0, backoff_factor=0.5, status_forcelist=(502, 503, 504))
    made = session(timeout_seconds=(CONNECT_SECONDS, READ_SECONDS), limit_bytes=MAX_ANSWER_BYTES)
    return PrometheusConnect(url=address, headers=headers, retry=retry, session=made)
