"""How many KV blocks requests of today's lengths hold, and how many of them a pool carries.

A request in flight holds its prompt and what it has generated so far. Taken at a random moment, a request with an
output of o tokens is found with weight o (it is in flight that long) and has generated a uniform share of o (renewal
theory, inspection paradox). With independent prompt and output lengths p and o:

    mean live tokens      E[p] + E[o^2] / (2 E[o])
    variance              Var[p] + E[o^3] / (3 E[o]) - (E[o^2] / (2 E[o]))^2

The demand of N requests in flight has mean N m and standard deviation s sqrt(N); the pool carries N with probability q
if N m + z(q) s sqrt(N) <= usable blocks (normal approximation of the sum).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import NormalDist

from kvwatch.errors import NoData
from kvwatch.snapshot import Histogram
from kvwatch.vllm_metrics import (
    KV_CACHE_USAGE,
    REQUEST_GENERATION_TOKENS,
    REQUEST_PROMPT_TOKENS,
    REQUESTS_RUNNING,
    Metric,
)
from kvwatch.window import Window

POINTS_PER_BUCKET = 8
MINIMUM_OBSERVATIONS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of token counts: points and their weights, which sum to 1."""

    tokens: tuple[float, ...]
    weights: tuple[float, ...]

    def moment(self, power: int) -> float:
        return math.fsum(w * t**power for t, w in zip(self.tokens, self.weights, strict=True))

    @property
    def mean(self) -> float:
        return self.moment(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Blocks one request holds: on average and spread at a random moment, and at its end at the 95th percentile."""

    live_blocks_mean: float
    live_blocks_deviation: float
    peak_blocks_p95: float
    prompt_tokens_mean: float
    output_tokens_mean: float
    observations: float
    source: str  # "window" or "lifetime": over which the lengths were observed

    def demand_blocks(self, in_flight: int, probability: float) -> float:
        """Blocks that so many requests stay under with the probability."""
        z = NormalDist().inv_cdf(probability)
        return in_flight * self.live_blocks_mean + z * self.live_blocks_deviation * math.sqrt(in_flight)

    def carried_by(self, usable_blocks: int, probability: float) -> int:
        """The largest number of requests whose demand stays under the pool with the probability; 0 if not even one."""
        low, high = 0, max(1, int(usable_blocks / max(self.live_blocks_mean, 1e-9)) + 2)
        while low < high:
            middle = (low + high + 1) // 2
            if self.demand_blocks(middle, probability) <= usable_blocks:
                low = middle
            else:
                high = middle - 1
        return low


def lengths(histogram: Histogram, *, longest: int | None) -> Lengths:
    """A length histogram -> points with the histogram's exact bucket counts and, where the page gives it, exact mean.

    Inside every bucket the points follow lo + (hi - lo) u^a, one a for all buckets, chosen so that the mean agrees.
    """
    buckets = list(_buckets(histogram, longest))
    total = math.fsum(count for _, _, count in buckets)
    if total <= 0:
        raise NoData("the length histogram is empty")
    floor = math.fsum(lo * count for lo, _, count in buckets) / total
    spread = math.fsum((hi - lo) * count for lo, hi, count in buckets) / total
    share = 0.5
    if histogram.sum is not None and spread > 0:
        share = min(0.95, max(0.05, (histogram.sum / histogram.count - floor) / spread))
    exponent = 1 / share - 1  # the mean of u^a is 1 / (a + 1)
    steps = [((i + 0.5) / POINTS_PER_BUCKET) ** exponent for i in range(POINTS_PER_BUCKET)]
    points = [
        (max(1.0, lo + (hi - lo) * u), count / total / POINTS_PER_BUCKET) for lo, hi, count in buckets for u in steps
    ]
    return Lengths(tokens=tuple(t for t, _ in points), weights=tuple(w for _, w in points))


def _buckets(histogram: Histogram, longest: int | None) -> Iterable[tuple[float, float, float]]:
    """(lower, upper, count) of the buckets that have observations."""
    lower, below = 0.0, 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
        if count > below:
            upper = bound
            if math.isinf(bound):
                upper = max(lower * 2, float(longest or 0), 1.0)
            elif longest is not None and lower < longest < bound:
                upper = float(longest)
            yield lower, upper, count - below
        lower, below = bound, max(below, count)


def footprint(
    window: Window, *, blocks_for: Callable[[float], float | None], usable_blocks: int, max_model_len: int | None
) -> Footprint:
    """The lengths of finished requests and the blocks that running ones hold -> Footprint.

    Lengths come from the window where enough requests finished in it, else from the engine's life. The mean is raised
    to what the running requests are seen to hold, if that is more. Raises NoData naming what is missing.
    """
    prompt, source = _observed(window, REQUEST_PROMPT_TOKENS)
    output, _ = _observed(window, REQUEST_GENERATION_TOKENS, source)
    prompts, outputs = lengths(prompt, longest=max_model_len), lengths(output, longest=max_model_len)
    progress = outputs.moment(2) / (2 * outputs.mean)
    variance = prompts.moment(2) - prompts.mean**2 + outputs.moment(3) / (3 * outputs.mean) - progress**2
    live_tokens = prompts.mean + progress
    live_blocks = blocks_for(live_tokens)
    if live_blocks is None:
        raise NoData("blocks per token are not one number for this model: give --model and its flags")
    tokens_per_block = live_tokens / live_blocks
    mean = live_tokens / tokens_per_block
    seen = _seen_blocks_per_running(window, usable_blocks)
    return Footprint(
        live_blocks_mean=max(mean, seen or 0.0),
        live_blocks_deviation=math.sqrt(max(0.0, variance)) / tokens_per_block,
        peak_blocks_p95=_peak_p95(prompts, outputs, max_model_len) / tokens_per_block,
        prompt_tokens_mean=prompts.mean,
        output_tokens_mean=outputs.mean,
        observations=prompt.count,
        source=source,
    )


def _observed(window: Window, metric: Metric, source: str | None = None) -> tuple[Histogram, str]:
    if source != "lifetime":
        try:
            histogram = window.observed(metric)
        except NoData:
            if source == "window":
                raise
        else:
            if histogram.count >= MINIMUM_OBSERVATIONS or source == "window":
                return histogram, "window"
    return window.lifetime(metric), "lifetime"


def _seen_blocks_per_running(window: Window, usable_blocks: int) -> float | None:
    """Blocks that running requests were seen to hold, over the snapshots in which the pool was in use."""
    seen = [
        usage * usable_blocks / running
        for snapshot in window.snapshots
        if (usage := snapshot.get(KV_CACHE_USAGE)) and (running := snapshot.get(REQUESTS_RUNNING))
    ]
    return math.fsum(seen) / len(seen) if seen else None


def _peak_p95(prompts: Lengths, outputs: Lengths, max_model_len: int | None) -> float:
    """95th percentile of prompt + output, independent, not beyond the maximum length."""
    cap = float(max_model_len) if max_model_len else math.inf
    sums = sorted(
        (min(cap, p + o), wp * wo)
        for p, wp in zip(prompts.tokens, prompts.weights, strict=True)
        for o, wo in zip(outputs.tokens, outputs.weights, strict=True)
    )
    reached = 0.0
    for tokens, weight in sums:
        reached += weight
        if reached >= 0.95:
            return tokens
    return sums[-1][0]
