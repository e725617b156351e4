"""Weighted samples in arithmetic runs, and their exact nearest-rank percentiles.

While nothing but decoding happens, every step is longer than the one before by the same amount, and every running
request waits that long for its next token. So a stretch of `count` steps with `weight` requests is four numbers, not
count * weight samples.
"""

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_FEW_RUNS = 256


class _Run(NamedTuple):
    """Samples `first + i * increment` for start <= i < end, each counting `weight` times; increment >= 0."""

    first: float
    increment: float
    start: int
    end: int
    weight: int

    def value(self, index: int) -> float:
        return self.first + index * self.increment

    def split(self, pivot: float) -> tuple[int, int]:
        """Indices at which the values >= pivot and those > pivot start."""
        if self.increment <= 0.0:
            below = self.start if self.first >= pivot else self.end
            return below, (below if self.first > pivot else self.end)
        guess = int((pivot - self.first) / self.increment)
        low = max(self.start, min(self.end, guess))
        # the division rounds; the comparison of the values themselves decides
        while low > self.start and self.value(low - 1) >= pivot:
            low -= 1
        while low < self.end and self.value(low) < pivot:
            low += 1
        high = low
        while high < self.end and self.value(high) <= pivot:
            high += 1
        return low, high


class Samples:
    """A multiset of seconds. Memory is 32 bytes per run added."""

    __slots__ = ("_counts", "_firsts", "_increments", "_weights", "total")

    def __init__(self) -> None:
        self._firsts = array("d")
        self._increments = array("d")
        self._counts = array("q")
        self._weights = array("q")
        self.total = 0

    def add(self, value: float) -> None:
        self.add_run(first=value, increment=0.0, count=1, weight=1)

    def add_run(self, *, first: float, increment: float, count: int, weight: int) -> None:
        """Add `first + i * increment` for 0 <= i < count, each `weight` times."""
        self._firsts.append(first)
        self._increments.append(increment)
        self._counts.append(count)
        self._weights.append(weight)
        self.total += count * weight

    def nearest_rank(self, percent: int) -> float | None:
        """The smallest sample with at least `percent` % of all samples not above it; None without samples."""
        if not self.total:
            return None
        rank = max(1, -(-self.total * percent // 100))
        survivors: Iterable[_Run] = self._runs()
        pivot = self._guess(rank)
        while True:  # quickselect: each round keeps one side of the pivot
            below: list[_Run] = []
            above: list[_Run] = []
            less = equal = 0
            for run in survivors:
                low, high = run.split(pivot)
                if low > run.start:
                    below.append(run._replace(end=low))
                    less += (low - run.start) * run.weight
                equal += (high - low) * run.weight
                if high < run.end:
                    above.append(run._replace(start=high))
            if rank <= less:
                survivors = below
            elif rank <= less + equal:
                return pivot
            else:
                survivors = above
                rank -= less + equal
            pivot = _weighted_middle(survivors, rank)

    def _runs(self) -> Iterator[_Run]:
        for first, increment, count, weight in zip(
            self._firsts, self._increments, self._counts, self._weights, strict=True
        ):
            yield _Run(first, increment, 0, count, weight)

    def _guess(self, rank: int) -> float:
        """A sample near `rank`, from a few of the runs: the first round then keeps little."""
        stride = max(1, len(self._firsts) // _FEW_RUNS)
        few = [
            _Run(self._firsts[i], self._increments[i], 0, self._counts[i], self._weights[i])
            for i in range(0, len(self._firsts), stride)
        ]
        share = sum((run.end - run.start) * run.weight for run in few)
        return _weighted_middle(few, max(1, rank * share // self.total))


def _weighted_middle(runs: list[_Run], rank: int) -> float:
    """The middle value of the run that holds `rank` when runs are ordered by their middles."""
    stride = max(1, len(runs) // _FEW_RUNS)
    few = sorted((run.value((run.start + run.end) // 2), (run.end - run.start) * run.weight) for run in runs[::stride])
    total = sum((run.end - run.start) * run.weight for run in runs) if stride > 1 else sum(w for _, w in few)
    wanted = rank * sum(w for _, w in few) // max(1, total)
    for value, weight in few:
        wanted -= weight
        if wanted <= 0:
            return value
    return few[-1][0]


def nearest_rank(values: Iterable[float], percent: int) -> float | None:
    """The nearest-rank percentile of plain values; None without any."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(1, -(-len(ordered) * percent // 100)) - 1]
