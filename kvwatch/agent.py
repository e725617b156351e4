"""`check` on a timer: scrape every target, make one report of all, put it on the board, tell the Alertmanagers.

Rounds start at fixed moments, `interval` apart. A target that has not answered when its round must end counts as
unreadable in that round; its thread goes on by itself and delays neither the other targets nor the next round.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from kvwatch.adviser import Adviser
from kvwatch.capacity import EngineFacts
from kvwatch.config import Config
from kvwatch.errors import ExpositionError, KvwatchError, SettingError
from kvwatch.exposition import decode, read_samples
from kvwatch.finding import Status
from kvwatch.report import Report, Scrape, report
from kvwatch.server import Board
from kvwatch.sinks.alertmanager import Alertmanager, Patience, Tracker
from kvwatch.snapshot import EngineKey, Snapshot, snapshots
from kvwatch.sources import Source, parse
from kvwatch.sources.scrape import Scraper
from kvwatch.window import Window, window, windows

FACTS_SECONDS = 300.0
MAX_ENGINES_PER_TARGET = 256
# The share of an interval a scrape may take; the rest is for the report.
SCRAPE_SHARE = 0.8
# Alerts outlive this many missed rounds, and at least as long as a restart of the agent takes.
ALERT_ROUNDS, ALERT_SECONDS = 3, 30.0
_LOG = logging.getLogger(__name__)

FactsOf: TypeAlias = Callable[[Iterable[Window], Mapping[str, EngineFacts]], Mapping[str, EngineFacts]]
"""Windows, and what servers told about themselves per target -> facts per target."""


class Attempt(threading.Thread):
    """One scrape of one target, in a thread of its own: no timeout of a socket bounds a name look-up or a slow drip."""

    def __init__(self, target: str, scraper: Scraper) -> None:
        super().__init__(name=f"scrape {target}", daemon=True)
        self._target, self._scraper = target, scraper
        self.at_seconds = time.time()
        self.started_seconds = time.monotonic()
        self.duration_seconds = 0.0
        self.pages: tuple[Snapshot, ...] = ()
        self.failure: str | None = "kvwatch failed while it read the page; the traceback is in its log"

    def run(self) -> None:
        try:
            page = self._scraper.page()
            found = snapshots(read_samples(decode(page.body)), at_seconds=page.at_seconds, target=self._target)
            if len(found) > MAX_ENGINES_PER_TARGET:
                raise ExpositionError(f"the page shows {len(found)} engines, more than {MAX_ENGINES_PER_TARGET}")
        except KvwatchError as error:
            self.failure = str(error)
        else:
            self.pages, self.failure = found, None
        self.duration_seconds = time.monotonic() - self.started_seconds


class Watch:
    """One target: what its pages showed lately, what its server tells about itself, and why it cannot be read now."""

    def __init__(self, source: Source, *, headers: Mapping[str, str], config: Config) -> None:
        self.target = source.given
        self.facts = EngineFacts()
        self.failure: str | None = None
        self._interval_seconds = config.interval_seconds
        # one interval and a quarter more than the window, so that it is covered whatever the jitter
        self._kept_seconds = config.window_seconds + 1.25 * config.interval_seconds
        self.snapshots: tuple[Snapshot, ...] = ()  # of all engines, ascending in time; replaced, never changed
        self._shown: frozenset[EngineKey] = frozenset()
        self._scraper = Scraper(source.where, headers=dict(headers))
        self._facts_scraper = Scraper(source.where, headers=dict(headers))
        self._facts_due_seconds = -math.inf
        self._attempt: Attempt | None = None
        self._facts_thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin a scrape, unless an earlier one is still on its way."""
        if self._attempt is None or not self._attempt.is_alive():
            self._attempt = Attempt(self.target, self._scraper)
            self._attempt.start()

    def finish(self, started_seconds: float, deadline_seconds: float) -> Scrape:
        """Wait for the scrape until the deadline and take in what it gave. Monotonic seconds."""
        attempt = self._attempt
        if attempt is None:
            raise RuntimeError("finish without start")
        attempt.join(max(0.0, deadline_seconds - time.monotonic()))
        if attempt.is_alive() or attempt.started_seconds < started_seconds:
            waited = time.monotonic() - attempt.started_seconds
            failure: str | None = (
                f"no complete page within {waited:.1f} s, and a scrape may take {SCRAPE_SHARE:.0%} of --interval "
                f"{self._interval_seconds:g}s; the server hangs or is overloaded"
            )
        else:
            waited, failure = attempt.duration_seconds, attempt.failure
        self._log_change(failure)
        self.failure = failure
        if failure is None:
            self._take_in(attempt.pages)
            self._refresh_facts(deadline_seconds)
        return Scrape(target=self.target, at_seconds=attempt.at_seconds, duration_seconds=waited, failure=failure)

    def engines(self) -> set[EngineKey]:
        return {snapshot.key for snapshot in self.snapshots}

    def failures(self) -> dict[EngineKey, str]:
        """Why engines of this target have no current page: none could be read, or theirs is no longer on it."""
        if self.failure is not None:
            nobody = EngineKey(target=self.target, model_name="", engine="")
            return dict.fromkeys(self.engines() or {nobody}, f"scrape failed: {self.failure}")
        gone = self.engines() - self._shown
        return dict.fromkeys(gone, "the engine is no longer on the page of its server, which still runs")

    def close(self) -> None:
        self._scraper.close()
        self._facts_scraper.close()

    def _take_in(self, pages: tuple[Snapshot, ...]) -> None:
        at, kept = pages[0].at_seconds, self.snapshots
        if kept and at <= kept[-1].at_seconds:
            _LOG.warning("%s: the clock of this host went back; the window starts anew", self.target)
            kept = ()
        self._shown = frozenset(page.key for page in pages)
        if self._restarted(kept, pages):
            _LOG.info("%s: the engine restarted", self.target)
            self.facts, self._facts_due_seconds = EngineFacts(), -math.inf
            kept = tuple(snapshot for snapshot in kept if snapshot.key in self._shown)
        oldest = at - self._kept_seconds
        self.snapshots = (*(snapshot for snapshot in kept if snapshot.at_seconds >= oldest), *pages)

    @staticmethod
    def _restarted(kept: tuple[Snapshot, ...], pages: tuple[Snapshot, ...]) -> bool:
        """Whether a new process wrote these pages: it started at another time, or a counter fell."""
        last = {snapshot.key: snapshot for snapshot in kept}
        before = [snapshot.process_start_seconds for snapshot in last.values()]
        started = pages[0].process_start_seconds
        if started is not None and before and not any(old is None or abs(started - old) <= 1 for old in before):
            return True
        return any(page.key in last and window((last[page.key], page)).restarts for page in pages)

    def _refresh_facts(self, deadline_seconds: float) -> None:
        """Ask the server what it tells about itself, when due. An answer slower than the round is used later."""
        busy = self._facts_thread is not None and self._facts_thread.is_alive()
        if busy or time.monotonic() < self._facts_due_seconds:
            return
        self._facts_due_seconds = time.monotonic() + FACTS_SECONDS
        self._facts_thread = threading.Thread(target=self._ask_facts, name=f"facts {self.target}", daemon=True)
        self._facts_thread.start()
        self._facts_thread.join(max(0.0, deadline_seconds - time.monotonic()))

    def _ask_facts(self) -> None:
        told = self._facts_scraper.facts()
        if told.vllm_version or told.max_model_len:  # a server that is too busy to answer has not changed
            self.facts = told

    def _log_change(self, failure: str | None) -> None:
        if failure is not None and self.failure is None:
            _LOG.warning("%s: scrape failed: %s", self.target, failure)
        elif failure is None and self.failure is not None:
            _LOG.warning("%s: readable again", self.target)


class Agent:
    """Rounds of scrapes, reports and alerts. `facts_of` adds what flags say to what servers tell."""

    def __init__(self, config: Config, *, facts_of: FactsOf, board: Board) -> None:
        self._config, self._facts_of, self._board = config, facts_of, board
        self._watches = [Watch(_live(target), headers=config.headers, config=config) for target in config.targets]
        lifetime = max(ALERT_ROUNDS * config.interval_seconds, ALERT_SECONDS)
        patience = Patience(
            for_seconds=config.for_seconds,
            down_for_seconds=config.down_for_seconds,
            keep_firing_seconds=config.keep_firing_seconds,
            limits=config.limits,
        )
        self._tracker = Tracker(patience, lifetime_seconds=lifetime)
        self._sinks = [Alertmanager(url) for url in config.alertmanagers]
        self._adviser = Adviser(window_seconds=config.window_seconds)
        self._scrapes: tuple[Scrape, ...] = ()
        self._worst: Status | None = None

    def run(self, stop: threading.Event) -> None:
        """Rounds until `stop` is set. A round that fails is logged, and its report is missing; the next one comes."""
        interval = self._config.interval_seconds
        first, number = time.monotonic(), 0
        while not stop.wait(max(0.0, first + number * interval - time.monotonic())):
            try:
                self.round()
            except Exception:  # noqa: BLE001 -- a fault in one check must not end the watch
                _LOG.exception("a round failed; the next one follows")
            number = next_round(number, time.monotonic() - first, interval)
        self.close()

    def round(self) -> Report:
        """Scrape, judge, publish, once."""
        started = time.monotonic()
        deadline = started + SCRAPE_SHARE * self._config.interval_seconds
        for watch in self._watches:
            watch.start()
        self._scrapes = tuple(watch.finish(started, deadline) for watch in self._watches)
        judged = self.judge()
        self._publish(judged)
        return judged

    def judge(self, *, simulate: bool = False) -> Report:
        """The report of what the latest rounds showed. Rounds never wait for a simulation: it takes seconds of CPU."""
        made = windows(snapshot for watch in self._watches for snapshot in watch.snapshots)
        failures: dict[EngineKey, str] = {}
        told: dict[str, EngineFacts] = {}
        for watch in self._watches:
            failures.update(watch.failures())
            told.update({key.target: watch.facts for key in watch.engines()})
        return report(
            made,
            facts=self._facts_of(made, told),
            limits=self._config.limits,
            scrapes=self._scrapes,
            failures=failures,
            simulate=simulate,
            proposer=self._adviser,
        )

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
        for watch in self._watches:
            watch.close()

    def _publish(self, judged: Report) -> None:
        now = time.time()
        self._board.post(judged, at_seconds=now)
        if judged.worst is not self._worst:
            _LOG.info("%s", _sentence(judged))
            self._worst = judged.worst
        if self._sinks:
            batch = self._tracker.update(judged, now)
            for sink in self._sinks:
                sink.submit(batch)


def next_round(number: int, elapsed_seconds: float, interval_seconds: float) -> int:
    """The next round: the following one, or the first whose moment is not past. Missed rounds are not made up."""
    return max(number + 1, math.ceil(elapsed_seconds / interval_seconds))


def _live(target: str) -> Source:
    source = parse(target)
    if not source.is_live:
        raise SettingError(f"--target {target!r} is not a server; give http://HOST:PORT")
    return source


def _sentence(judged: Report) -> str:
    for engine in judged.engines:
        for finding in engine.findings:
            if finding.status is judged.worst:
                return f"{judged.worst.value}: {engine.key} {engine.key.target}: {finding.check}: {finding.summary}"
    return judged.worst.value
