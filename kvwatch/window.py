"""Snapshots of one engine in time: increases, rates, extremes and quantiles.

Counters: between two snapshots a counter grows by what it rose. Where any counter fell, or the process start time
changed, the engine restarted in between: that interval is left out of every increase and of the time that rates divide
by, so a restart is neither a negative amount nor growth. (PromQL counts the value after a reset as growth; leaving it
out can only under-count, by at most one interval.)
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvwatch.errors import NoData
from kvwatch.snapshot import EngineKey, Histogram, Snapshot
from kvwatch.vllm_metrics import ALL, Metric

_COUNTERS = tuple(metric.name for metric in ALL if metric.kind == "counter")


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
    def _steps(self) -> tuple[tuple[Snapshot, Snapshot], ...]:
        """Neighbouring snapshots with no restart between them."""
        pairs = zip(self.snapshots, self.snapshots[1:], strict=False)
        return tuple((before, after) for before, after in pairs if not _restarted(before, after))

    @property
    def restarts(self) -> int:
        """How often the engine restarted inside the window."""
        return len(self.snapshots) - 1 - len(self._steps)

    @property
    def counted_seconds(self) -> float:
        """The time that increases cover: the duration without the intervals in which the engine restarted."""
        return sum(after.at_seconds - before.at_seconds for before, after in self._steps)

    def last(self, seconds: float) -> "Window":
        """The snapshots of the left-open span (latest - seconds, latest], as PromQL 3 ranges are."""
        start = self.latest.at_seconds - seconds
        return Window(tuple(s for s in self.snapshots if s.at_seconds > start))

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
            max(0.0, after - before)
            for first, second in self._steps
            if (before := read(first)) is not None and (after := read(second)) is not None
        ]
        if not growth:
            raise NoData(f"{name} is not exposed")
        return math.fsum(growth)

    def _seconds_for_a_rate(self) -> float:
        seconds = self.counted_seconds
        if seconds > 0:
            return seconds
        if self.restarts:
            raise NoData("the engine restarted; a rate needs two pages since then")
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
        self._seconds_for_a_rate()
        deltas = [
            _subtract(second, first)
            for before, after in self._steps
            if (first := before.histograms.get(metric.name)) and (second := after.histograms.get(metric.name))
        ]
        total = _add([delta for delta in deltas if delta is not None])
        if total is None:
            raise NoData(f"{metric.exposed} is not exposed")
        if total.count <= 0:
            raise NoData(f"{metric.exposed} has no observation in {self.duration_seconds:.0f} s")
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

    As PromQL's histogram_quantile: the first bucket starts at 0 if its bound is positive, and a quantile that falls
    into the +Inf bucket is the highest finite bound.
    """
    if not 0 <= q <= 1:
        raise ValueError(f"quantile {q} is not between 0 and 1")
    if histogram.count <= 0:
        raise NoData("the histogram is empty")
    rank = q * histogram.count
    below, lower = 0.0, 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
        if count >= rank and count > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - min(lower, bound)) * max(0.0, rank - below) / (count - below)
        below, lower = max(below, count), bound
    return lower


def _restarted(before: Snapshot, after: Snapshot) -> bool:
    old, new = before.process_start_seconds, after.process_start_seconds
    if old is not None and new is not None and abs(new - old) > 1:
        return True
    return any(
        after.values[name] < before.values[name] for name in _COUNTERS if name in after.values and name in before.values
    )


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
