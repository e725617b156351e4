"""Snapshots of one engine in time: increases, rates, extremes and quantiles.

Counters: between two snapshots a counter grows by what it rose. Where a counter fell for good, or the process start
time changed, the interval is left out of every increase and of the time that rates divide by, so a restart is neither a
negative amount nor growth. (PromQL counts the value after a reset as growth; leaving it out can only under-count, by at
most one interval.) Gauges of the process before say nothing of the present one: what must last is asked of `held`,
which begins at the latest restart. (PromQL's min_over_time has them in its range until they are older than it.)

Not every fall is a restart: vLLM with several API servers exports the sum of their files, which can step back a little
(vLLM pull request 18053), and a proxy may answer with an old page. Where the counters are later what they were or more,
the pages between are passed over, and the rise is counted from where they were: the way back is no growth.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from kvwatch.errors import NoData
from kvwatch.snapshot import EngineKey, Histogram, Snapshot
from kvwatch.vllm_metrics import ALL, Metric

_COUNTERS = tuple(metric.name for metric in ALL if metric.kind == "counter")
_HISTOGRAMS = tuple(metric.name for metric in ALL if metric.kind == "histogram")
# As Prometheus' look-back: a page older than this says nothing about now.
STALE_SECONDS = 300.0


@dataclass(frozen=True)
class Window:
    """One engine's snapshots, ascending in time, one per instant, at least one. Build it with `window`."""

    snapshots: tuple[Snapshot, ...]

    @property
    def key(self) -> EngineKey:
        return self.snapshots[-1].key

    @property
    def latest(self) -> Snapshot:
        return self.snapshots[-1]

    @property
    def duration_seconds(self) -> float:
        """From the first snapshot to the last; 0 for a single page."""
        return self.snapshots[-1].at_seconds - self.snapshots[0].at_seconds

    @cached_property
    def _pairs(self) -> tuple[tuple[Snapshot, Snapshot], ...]:
        return tuple(pairwise(self.snapshots))

    @cached_property
    def intervals(self) -> tuple[tuple[Snapshot, Snapshot], ...]:
        """Snapshots, each with the next one up to which counters only grew: what increases are made of."""
        found = []
        last = self.snapshots[0]
        for number, page in enumerate(self.snapshots[1:], start=1):
            if not _other_process(last, page):
                if _lowest_ratio(last, page) >= 1:
                    found.append((last, page))
                elif self._is_reached_again(last, number + 1):
                    continue
            last = page
        return tuple(found)

    def _is_reached_again(self, level: Snapshot, start: int) -> bool:
        """Whether a snapshot from `start` on, of the same process, has no counter below this one's."""
        return any(
            _lowest_ratio(level, later) >= 1 and not _other_process(level, later) for later in self.snapshots[start:]
        )

    @property
    def restarts(self) -> int:
        """How often the engine restarted inside the window."""
        return sum(_restarted(*pair) for pair in self._pairs)

    @property
    def several_servers(self) -> bool:
        """Whether the pages come from processes that run side by side, as behind a load balancer: a process that
        was seen before is seen again after another.
        """
        starts = [s.process_start_seconds for s in self.snapshots if s.process_start_seconds is not None]
        return any(after < before - 1 for before, after in pairwise(starts))

    @property
    def counted_seconds(self) -> float:
        """The time that increases cover: the duration without the intervals in which a counter fell for good."""
        return sum(after.at_seconds - before.at_seconds for before, after in self.intervals)

    def last(self, seconds: float) -> "Window":
        """The snapshots of the left-open span (latest - seconds, latest], as PromQL 3 ranges are.

        Where pages are further apart than the span, the one before the latest is in it too, unless it is stale: what
        lasts shows on two pages.
        """
        start = self.latest.at_seconds - seconds
        inside = tuple(s for s in self.snapshots if s.at_seconds > start)
        if len(inside) <= 1:
            inside = tuple(s for s in self.snapshots[-2:] if self.latest.at_seconds - s.at_seconds <= STALE_SECONDS)
        return Window(inside)

    @cached_property
    def since_restart(self) -> "Window":
        """The snapshots of the present process, at least one. All of them where processes run side by side."""
        if self.several_servers:
            return self
        first = max((n for n, pair in enumerate(self._pairs, 1) if _restarted(*pair)), default=0)
        return Window(self.snapshots[first:]) if first else self

    def held(self, seconds: float) -> "Window":
        """`last`, of the present process: what an engine held before it restarted says nothing of what it holds now."""
        return self.since_restart.last(seconds)

    # Gauges -------------------------------------------------------------------------------------------------------

    def value(self, metric: Metric) -> float:
        """The latest value. Raises NoData if the latest page lacks it."""
        value = self.latest.get(metric)
        if value is None:
            raise NoData(f"{metric.exposed} is not exposed")
        return value

    def part(self, metric: Metric, label_value: str) -> float:
        """The latest value of one series of a metric that is split by a label."""
        value = self.latest.parts.get(metric.name, {}).get(label_value)
        if value is None:
            raise NoData(f"{metric.exposed}{{{metric.split}={label_value!r}}} is not exposed")
        return value

    def values(self, metric: Metric) -> tuple[float, ...]:
        """All values in the window, oldest first, at least one."""
        values = tuple(v for s in self.snapshots if (v := s.get(metric)) is not None)
        if not values:
            raise NoData(f"{metric.exposed} is not exposed")
        return values

    def minimum(self, metric: Metric) -> float:
        return min(self.values(metric))

    def maximum(self, metric: Metric) -> float:
        return max(self.values(metric))

    def mean(self, metric: Metric) -> float:
        """Plain mean over the snapshots."""
        values = self.values(metric)
        return math.fsum(values) / len(values)

    # Counters -----------------------------------------------------------------------------------------------------

    def increase(self, metric: Metric) -> float:
        """How much a counter grew. Raises NoData for a single page or a metric that is not exposed."""
        return self._increase(metric.exposed, lambda snapshot: snapshot.get(metric))

    def increase_of_part(self, metric: Metric, label_value: str) -> float:
        """How much one series of a split counter grew."""
        name = f"{metric.exposed}{{{metric.split}={label_value!r}}}"
        return self._increase(name, lambda snapshot: snapshot.parts.get(metric.name, {}).get(label_value))

    def rate(self, metric: Metric) -> float:
        """Increase per second."""
        return self.increase(metric) / self._seconds_for_a_rate()

    def _increase(self, name: str, read: Callable[[Snapshot], float | None]) -> float:
        self._seconds_for_a_rate()
        growth = [
            after - before
            for first, second in self.intervals
            if (before := read(first)) is not None and (after := read(second)) is not None
        ]
        if not growth:
            raise NoData(f"{name} is not exposed")
        return math.fsum(growth)

    def _seconds_for_a_rate(self) -> float:
        seconds = self.counted_seconds
        if seconds > 0:
            return seconds
        if self.several_servers:
            raise NoData("the pages come from several servers, as behind a load balancer: give each engine's address")
        if self.restarts:
            raise NoData("the engine restarted; a rate needs two pages since then")
        if len(self.snapshots) > 1:
            raise NoData("the counters step back, as the sum over several API servers does; sample a longer --window")
        raise NoData("a rate needs two pages, and there is one; give --window or a capture folder")

    # Histograms ---------------------------------------------------------------------------------------------------

    def lifetime(self, metric: Metric) -> Histogram:
        """The histogram since the engine started. Raises NoData if not exposed or still empty."""
        histogram = self.latest.histograms.get(metric.name)
        if histogram is None:
            raise NoData(f"{metric.exposed} is not exposed")
        if histogram.count <= 0:
            raise NoData(f"{metric.exposed} has no observation yet")
        return histogram

    def observed(self, metric: Metric) -> Histogram:
        """The observations made inside the window. Raises NoData if there are none."""
        total = self._observed(metric)
        if total.count <= 0:
            raise NoData(f"{metric.exposed} has no observation in {self.duration_seconds:.0f} s")
        return total

    def observations(self, metric: Metric) -> float:
        """How many observations were made inside the window, 0 included. Raises NoData if that is not known."""
        return self._observed(metric).count

    def _observed(self, metric: Metric) -> Histogram:
        self._seconds_for_a_rate()
        deltas = [
            _subtract(second, first)
            for before, after in self.intervals
            if (first := before.histograms.get(metric.name)) and (second := after.histograms.get(metric.name))
        ]
        total = _add([delta for delta in deltas if delta is not None])
        if total is None:
            raise NoData(f"{metric.exposed} is not exposed")
        return total

    def average(self, metric: Metric) -> float:
        """Mean observation inside the window."""
        histogram = self.observed(metric)
        if histogram.sum is None:
            raise NoData(f"{metric.exposed}_sum is not exposed")
        return max(0.0, histogram.sum) / histogram.count

    def quantile(self, metric: Metric, q: float) -> float:
        """Quantile of the observations inside the window, interpolated as PromQL's histogram_quantile does."""
        return quantile(self.observed(metric), q)


def window(snapshots: Iterable[Snapshot]) -> Window:
    """Snapshots of one engine in any order -> Window. Of several at one instant the last given wins."""
    by_time = {snapshot.at_seconds: snapshot for snapshot in snapshots}
    if not by_time:
        raise NoData("no page was read")
    return Window(tuple(by_time[at] for at in sorted(by_time)))


def windows(snapshots: Iterable[Snapshot]) -> tuple[Window, ...]:
    """Snapshots of any engines -> one Window per engine, in the order of their keys.

    An engine that the latest page of its target no longer shows keeps its Window, which ends when it was last seen.
    """
    by_key: dict[EngineKey, list[Snapshot]] = {}
    for snapshot in snapshots:
        by_key.setdefault(snapshot.key, []).append(snapshot)
    return tuple(window(by_key[key]) for key in sorted(by_key))


def quantile(histogram: Histogram, q: float) -> float:
    """Quantile of a cumulative histogram, linear inside the bucket.

    As PromQL's histogram_quantile: the total is the last bucket's, the first bucket starts at 0 if its bound is
    positive, and a quantile that falls into the +Inf bucket is the highest finite bound. Raises NoData if the histogram
    is empty or has no finite bucket.
    """
    if not 0 <= q <= 1:
        raise ValueError(f"quantile {q} is not between 0 and 1")
    if len(histogram.bounds) < 2:
        raise NoData("the histogram has no bucket but +Inf")
    if histogram.counts[-1] <= 0:
        raise NoData("the histogram is empty")
    rank = q * histogram.counts[-1]
    below, lower = 0.0, 0.0
    for bound, count in zip(histogram.bounds[:-1], histogram.counts, strict=False):
        if count >= rank and count > below:
            return lower + (bound - min(lower, bound)) * max(0.0, rank - below) / (count - below)
        below, lower = max(below, count), bound
    return lower


def _other_process(before: Snapshot, after: Snapshot) -> bool:
    old, new = before.process_start_seconds, after.process_start_seconds
    return old is not None and new is not None and abs(new - old) > 1


def _restarted(before: Snapshot, after: Snapshot) -> bool:
    """Another process; where no start time tells, a counter that lost more than half of its value."""
    if None in (before.process_start_seconds, after.process_start_seconds):
        return _lowest_ratio(before, after) < 0.5
    return _other_process(before, after)


def _lowest_ratio(before: Snapshot, after: Snapshot) -> float:
    """The smallest after / before over all counters and histograms; 1 or more where none fell."""
    pairs = [(before.values[n], after.values[n]) for n in _COUNTERS if n in before.values and n in after.values]
    old, new = before.histograms, after.histograms
    pairs += [(old[n].count, new[n].count) for n in _HISTOGRAMS if n in old and n in new]
    return min((after / before for before, after in pairs if before > 0), default=1.0)


def _subtract(after: Histogram, before: Histogram) -> Histogram | None:
    """Observations between two pages; None where the buckets differ, as after a change of version."""
    if after.bounds != before.bounds:
        return None
    counts = tuple(max(0.0, a - b) for a, b in zip(after.counts, before.counts, strict=True))
    total = None if after.sum is None or before.sum is None else after.sum - before.sum
    return Histogram(bounds=after.bounds, counts=counts, sum=total, count=max(0.0, after.count - before.count))


def _add(histograms: Sequence[Histogram]) -> Histogram | None:
    if not histograms:
        return None
    bounds = histograms[-1].bounds
    same = [h for h in histograms if h.bounds == bounds]
    counts = tuple(math.fsum(column) for column in zip(*(h.counts for h in same), strict=True))
    sums = [h.sum for h in same if h.sum is not None]
    total = math.fsum(sums) if len(sums) == len(same) else None
    return replace(same[0], counts=counts, sum=total, count=math.fsum(h.count for h in same))
