"""A length histogram -> a curve of lengths from which requests are drawn.

vLLM's length buckets are wide (1, 2, 5, 10, ...), so where inside a bucket the requests lie is a guess. The page knows
the exact mean, and lengths are seldom cut off at a bucket's bound, which settles most of it:

- inner buckets: a density that slopes towards the fuller neighbour;
- the lowest and the highest bucket: filled only as far from their neighbour as its density reaches, the highest as far
  as the exact mean asks for;
- what is still missing to the mean is made up by moving all points within their buckets.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvwatch.errors import NoData
from kvwatch.snapshot import Histogram

_PARTS = 16  # straight pieces of the curve per bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCurve:
    """Lengths in tokens by rank: `tokens[i]` is the length at rank `ranks[i]` (0..1), straight lines in between."""

    ranks: tuple[float, ...]
    tokens: tuple[float, ...]
    observations: float

    def at(self, rank: float) -> float:
        """The length that a share `rank` of all requests does not exceed."""
        right = min(max(1, bisect_right(self.ranks, rank)), len(self.ranks) - 1)
        low, high = self.ranks[right - 1], self.ranks[right]
        share = (rank - low) / (high - low) if high > low else 0.0
        return self.tokens[right - 1] + (self.tokens[right] - self.tokens[right - 1]) * min(1.0, max(0.0, share))

    def sample(self, count: int) -> list[float]:
        """`count` lengths at evenly spaced ranks, ascending."""
        return [self.at((number + 0.5) / count) for number in range(count)]

    def moment(self, power: int) -> float:
        """E[length^power], over 1,024 evenly spaced ranks."""
        return math.fsum(length**power for length in self.sample(1024)) / 1024

    def scaled(self, factor: float) -> "LengthCurve":
        """Every length times the factor."""
        return LengthCurve(
            ranks=self.ranks, tokens=tuple(max(1.0, t * factor) for t in self.tokens), observations=self.observations
        )


@dataclass(frozen=True, slots=True)
class _Bucket:
    low: float
    high: float
    share: float

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def density(self) -> float:
        return self.share / max(self.width, 1e-9)  # a bucket of next to no requests is cut to no width


def length_curve(histogram: Histogram, *, longest: int | None = None, mean: float | None = None) -> LengthCurve:
    """A cumulative histogram -> LengthCurve. `longest` bounds the last bucket; `mean` replaces the histogram's own.

    Raises NoData for an empty histogram.
    """
    buckets = _buckets(histogram, longest)
    if not buckets:
        raise NoData("the length histogram is empty")
    if mean is None and histogram.sum is not None:
        mean = histogram.sum / histogram.count
    if mean is None:
        mean = math.fsum(b.share * (b.low + b.high) / 2 for b in buckets)
    mean = min(max(mean, math.fsum(b.share * b.low for b in buckets)), math.fsum(b.share * b.high for b in buckets))
    narrowed = _narrowed(buckets, mean)
    ranks, tokens = _curve(narrowed)
    return LengthCurve(ranks=ranks, tokens=_moved_to_mean(ranks, tokens, narrowed, mean), observations=histogram.count)


def _buckets(histogram: Histogram, longest: int | None) -> list[_Bucket]:
    """The buckets that have observations; a request has at least one token."""
    total = max(histogram.counts, default=0.0)
    if total <= 0:
        return []
    buckets: list[_Bucket] = []
    lower, below = 0.0, 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
        if count > below:
            upper = bound
            if math.isinf(bound):
                upper = max(lower * 2, 1.0)
            if longest is not None and longest > lower:
                upper = min(upper, float(longest)) if not math.isinf(bound) else float(longest)
            buckets.append(_Bucket(lower, max(upper, lower + 1.0), (count - below) / total))
        lower, below = bound, max(below, count)
    return buckets


def _narrowed(buckets: list[_Bucket], mean: float) -> list[_Bucket]:
    """The outermost buckets, cut to where their requests are likely to lie."""
    if len(buckets) == 1:
        only = buckets[0]
        half = min(mean - only.low, only.high - mean) / 2
        return [_Bucket(mean - half, max(mean + half, mean - half + 1e-9), 1.0)]
    first, last = buckets[0], buckets[-1]
    if len(buckets) == 2:
        if last.low > first.high:
            return buckets
        # one even density over both: low = edge - share x span, high = edge + share x span, mean in the middle
        skew = last.share - first.share
        span = 2 * (mean - first.high) / skew if abs(skew) > 1e-9 else math.inf
        if span <= 0:
            return buckets
        low = max(first.low, first.high - first.share * span)
        high = min(last.high, last.low + last.share * span)
        return [_Bucket(low, first.high, first.share), _Bucket(last.low, high, last.share)]
    if first.high == buckets[1].low:
        first = _Bucket(max(first.low, first.high - first.share / buckets[1].density), first.high, first.share)
    inner = [first, *buckets[1:-1]]
    if last.low == buckets[-2].high:
        rest = mean - math.fsum(b.share * _middle(inner, i) for i, b in enumerate(inner))
        wanted = 2 * (rest / last.share - last.low)
        shortest = min(last.width, last.share / buckets[-2].density)
        last = _Bucket(last.low, last.low + min(last.width, max(shortest, wanted)), last.share)
    return [*inner, last]


def _slope(buckets: Sequence[_Bucket], index: int) -> float:
    """How the density changes over the bucket, from -1 (falls to nothing) over 0 (even) to 1 (rises from nothing)."""
    if not 0 < index < len(buckets) - 1:
        return 0.0
    before, here, after = buckets[index - 1], buckets[index], buckets[index + 1]
    if before.high != here.low or here.high != after.low:
        return 0.0
    left, right = here.density - before.density, after.density - here.density
    if left * right <= 0:
        return 0.0  # a peak or a trough
    change = math.copysign(min(abs(left), abs(right)), left)
    return max(-1.0, min(1.0, change / (2 * here.density)))


def _middle(buckets: Sequence[_Bucket], index: int) -> float:
    """The mean length inside a bucket: a density 1 + s(2u - 1) has its mean at 1/2 + s/6."""
    bucket = buckets[index]
    return bucket.low + bucket.width * (0.5 + _slope(buckets, index) / 6)


def _curve(buckets: Sequence[_Bucket]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    starts = [0.0, *accumulate(bucket.share for bucket in buckets)]
    ranks, tokens = [0.0], [buckets[0].low]
    for index, (bucket, start) in enumerate(zip(buckets, starts, strict=False)):
        slope = _slope(buckets, index)
        if tokens[-1] != bucket.low:
            ranks.append(start)
            tokens.append(bucket.low)
        for part in range(1, _PARTS + 1):
            u = part / _PARTS
            ranks.append(start + bucket.share * u)
            tokens.append(bucket.high if part == _PARTS else bucket.low + bucket.width * _inverse(slope, u))
    return tuple(ranks), tuple(tokens)


def _inverse(slope: float, u: float) -> float:
    """Where a share u of the density 1 + s(2x - 1) on 0..1 is reached: (1 - s) x + s x^2 = u."""
    if abs(slope) < 1e-9:
        return u
    a = 1 - slope
    return (math.sqrt(a * a + 4 * slope * u) - a) / (2 * slope)


def _moved_to_mean(
    ranks: Sequence[float], tokens: Sequence[float], buckets: Sequence[_Bucket], mean: float
) -> tuple[float, ...]:
    """Move every point within its bucket, all by the same share of the way to a bound, so that the mean is met."""
    now = _area(ranks, tokens)
    target = max(1.0, mean)
    if abs(now - target) < 1e-9:
        return tuple(max(1.0, t) for t in tokens)
    bounds = [buckets[0].high if target > now else buckets[0].low]
    index = 0
    for token in tokens[1:]:
        while index < len(buckets) - 1 and token > buckets[index].high:
            index += 1
        bounds.append(buckets[index].high if target > now else buckets[index].low)
    room = _area(ranks, bounds) - now
    share = min(1.0, (target - now) / room) if abs(room) > 1e-12 else 0.0
    return tuple(max(1.0, t + (b - t) * share) for t, b in zip(tokens, bounds, strict=True))


def _area(ranks: Sequence[float], tokens: Sequence[float]) -> float:
    pairs = zip(ranks, ranks[1:], tokens, tokens[1:], strict=False)
    return math.fsum((high - low) * (left + right) / 2 for low, high, left, right in pairs)
