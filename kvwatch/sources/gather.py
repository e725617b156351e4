"""Sources -> snapshots and facts, sampled over a window where a source is live."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kvwatch.capacity import EngineFacts
from kvwatch.errors import ExpositionError, KvwatchError, SourceError
from kvwatch.exposition import MAX_PAGE_BYTES, decode, read_samples
from kvwatch.snapshot import EngineKey, Snapshot, snapshots
from kvwatch.sources import Source
from kvwatch.sources.capture import read_capture, read_page

MAX_PARALLEL_SCRAPES = 16
HISTORY_SECONDS = 300.0
"""Five scrapes at the slowest usual interval of a minute."""


@dataclass(slots=True)
class Gathered:
    """What the sources gave. `failures` names the sources that gave nothing."""

    snapshots: list[Snapshot] = field(default_factory=list)
    facts: dict[str, EngineFacts] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def gather(
    sources: tuple[Source, ...],
    *,
    window_seconds: float,
    headers: Mapping[str, str],
    progress: Callable[[float, float], None],
    history_seconds: float = HISTORY_SECONDS,
) -> Gathered:
    """Read all sources. Live ones are sampled over the window; `progress(elapsed, total)` is told as time passes.

    `history_seconds` is the span asked of a Prometheus-compatible history. A source given twice is read once.
    A source that cannot be read is a failure, and the rest is still returned; raises the error if nothing was read.
    """
    found = Gathered()
    errors: list[KvwatchError] = []
    sources = tuple({(source.kind, source.where): source for source in reversed(sources)}.values())[::-1]
    for source in sources:
        if source.is_live:
            continue
        try:
            found.snapshots += _read_once(source, history_seconds, headers, found)
        except KvwatchError as error:
            errors.append(_named(error, source))
    live = [source for source in sources if source.is_live]
    if live:
        errors += _sample(live, window_seconds, dict(headers), progress, found)
    if errors and not found.snapshots:
        raise errors[0] if len(errors) == 1 else SourceError("\n".join(str(error) for error in errors))
    found.failures = [str(error) for error in errors]
    found.notes += _vanished(found.snapshots)
    return found


def _vanished(snapshots: Iterable[Snapshot]) -> list[str]:
    """Engines that later pages of their target do not show: what is said of them is old."""
    seen: dict[str, dict[EngineKey, list[float]]] = {}
    for snapshot in snapshots:
        seen.setdefault(snapshot.key.target, {}).setdefault(snapshot.key, []).append(snapshot.at_seconds)
    notes = []
    for target, engines in seen.items():
        newest = max(max(times) for times in engines.values())
        for key, times in sorted(engines.items()):
            if (ago := newest - max(times)) > 0:
                notes.append(
                    f"{key} on {target}: not on the pages of the last {ago:.0f} s; what is said of it is older"
                )
    return notes


def _read_once(source: Source, history_seconds: float, headers: Mapping[str, str], found: Gathered) -> list[Snapshot]:
    if source.kind == "folder":
        return list(read_capture(Path(source.where), target=source.given, notes=found.notes))
    if source.kind == "file":
        path = Path(source.where)
        return list(read_page(path, at_seconds=_written_seconds(path), target=source.given))
    if source.kind == "prometheus":
        from kvwatch.sources.prometheus import read_history  # noqa: PLC0415 -- needs the extra `fleet`

        return read_history(
            source.where,
            window_seconds=history_seconds,
            now_seconds=time.time(),
            headers=headers,
            notes=found.notes,
        )
    body = sys.stdin.buffer.read(MAX_PAGE_BYTES + 1)
    return list(snapshots(read_samples(decode(body)), at_seconds=time.time(), target="stdin"))


def _written_seconds(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError as error:  # since the command line was read, it may have been moved away
        raise SourceError(f"{path}: {error.strerror}") from error


def _sample(
    live: list[Source],
    window_seconds: float,
    headers: dict[str, str],
    progress: Callable[[float, float], None],
    found: Gathered,
) -> list[KvwatchError]:
    """Scrape every live source at the same moments, from now until the window has passed."""
    from kvwatch.sources.scrape import Scraper  # noqa: PLC0415 -- files need no HTTP client

    scrapers = {source: Scraper(source.where, headers=headers) for source in live}
    last_error: dict[Source, KvwatchError] = {}
    read: set[Source] = set()
    interval = sample_interval_seconds(window_seconds)
    started = time.monotonic()

    def scrape(source: Source) -> tuple[Snapshot, ...] | KvwatchError:
        try:
            page = scrapers[source].page()
            return snapshots(read_samples(decode(page.body)), at_seconds=page.at_seconds, target=source.given)
        except KvwatchError as error:
            return _named(error, source)

    with ThreadPoolExecutor(max_workers=min(len(live), MAX_PARALLEL_SCRAPES)) as pool:
        last, number = sample_count(window_seconds) - 1, 0
        while number <= last:
            _wait_until(started + number * interval, started, window_seconds, progress)
            for source, result in zip(live, pool.map(scrape, live), strict=True):
                if isinstance(result, KvwatchError):
                    last_error[source] = result
                else:
                    read.add(source)
                    found.snapshots += result
            if not read:
                break  # nothing answers: say so at once instead of after the window
            if number == last:
                break
            # a slow server's missed rounds are not made up for, but the last round is
            missed = int((time.monotonic() - started) / interval) if interval else 0
            number = min(last, max(number + 1, missed + 1))
        answering = [source for source in live if source in read]
        for source, facts in zip(answering, pool.map(lambda s: scrapers[s].facts(), answering), strict=True):
            found.facts[source.given] = facts
    progress(window_seconds, window_seconds)
    for scraper in scrapers.values():
        scraper.close()
    found.notes += [f"some scrapes failed: {last_error[source]}" for source in live if source in read & set(last_error)]
    return [last_error[source] for source in live if source not in read]


def sample_interval_seconds(window_seconds: float) -> float:
    """Two seconds, or less so that a short window still has five intervals."""
    return min(2.0, window_seconds / 5) if window_seconds > 0 else 0.0


def sample_count(window_seconds: float) -> int:
    interval = sample_interval_seconds(window_seconds)
    return 1 if interval <= 0 else round(window_seconds / interval) + 1


def _wait_until(moment: float, started: float, window_seconds: float, progress: Callable[[float, float], None]) -> None:
    while (now := time.monotonic()) < moment:
        progress(now - started, window_seconds)
        time.sleep(min(0.2, moment - now))


def _named(error: KvwatchError, source: Source) -> KvwatchError:
    """The error with the source in front, unless it is there already."""
    text = str(error)
    if source.given in text or source.where in text:
        return error
    kind = ExpositionError if isinstance(error, ExpositionError) else SourceError
    return kind(f"{source.given}: {text}")
