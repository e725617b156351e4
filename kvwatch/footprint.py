"""How many KV blocks requests of today's lengths hold, and how many of them a pool carries.

A request in flight holds its prompt and what it has generated so far. Taken at a random moment, a request with an
output of o tokens is found with weight o (it is in flight that long) and has generated a uniform share of o (renewal
theory, inspection paradox). With independent prompt and output lengths p and o, and u uniform:

    live tokens           p + u o, weighted with o: mean E[p] + E[o^2] / (2 E[o])
    tokens at the end     p + o, each request once

Both become blocks through the model's own rule (whole blocks, windows, fixed states), request by request over 512
evenly spread combinations of p, o and u. The demand of N requests in flight has mean N m and standard deviation
s sqrt(N); the pool carries N with probability q if N m + z(q) s sqrt(N) <= usable blocks (normal approximation).

Requests that share a prefix hold its blocks together. Where the prefix cache is hit, the mean is what running requests
are seen to hold, though not less than what each of them cannot share.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from kvwatch.errors import NoData
from kvwatch.lengths import LengthCurve, length_curve
from kvwatch.snapshot import Histogram
from kvwatch.vllm_metrics import (
    KV_CACHE_USAGE,
    PREFIX_CACHE_HITS,
    PREFIX_CACHE_QUERIES,
    REQUEST_GENERATION_TOKENS,
    REQUEST_PROMPT_TOKENS,
    REQUESTS_RUNNING,
    Metric,
)
from kvwatch.window import Window

MINIMUM_OBSERVATIONS = 10
_COMBINATIONS = 512
_LONGEST_TOKENS = 10**9  # no model's context; a page may claim more
# Additive recurrence with the plastic number, evenly spread over the unit square beside an even first axis
# (M. Roberts, https://extremelearning.com.au/unreasonable-effectiveness-of-quasirandom-sequences/).
_STEP_OUTPUT, _STEP_SHARE = 0.7548776662466927, 0.5698402909980532

BlocksFor = Callable[[float], float | None]


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


def footprint(window: Window, *, blocks_for: BlocksFor, usable_blocks: int, max_model_len: int | None) -> Footprint:
    """The lengths of finished requests and the blocks that running ones hold -> Footprint.

    `blocks_for` gives the blocks of a request of so many tokens, None where the model's rule is not known. Lengths come
    from the window where enough requests finished in it, else from the engine's life. The mean is raised to what the
    running requests are seen to hold, if that is more. Raises NoData naming what is missing.
    """
    prompt, source = observed_lengths(window, REQUEST_PROMPT_TOKENS)
    output, _ = observed_lengths(window, REQUEST_GENERATION_TOKENS, source)
    prompts, outputs = length_curve(prompt, longest=max_model_len), length_curve(output, longest=max_model_len)
    mean, deviation, peak = _blocks(prompts, outputs, blocks_for, max_model_len)
    seen = _seen_blocks_per_running(window, usable_blocks)
    hit_ratio = _hit_ratio(window, source)
    if seen is not None and hit_ratio > 0:
        own = _shortened(prompts, 1 - hit_ratio)
        mean, deviation, _ = _blocks(own, outputs, blocks_for, max_model_len)
    raised = max(1.0, (seen or 0.0) / mean)
    return Footprint(
        live_blocks_mean=raised * mean,
        live_blocks_deviation=raised * deviation,
        peak_blocks_p95=peak,
        prompt_tokens_mean=prompts.moment(1),
        output_tokens_mean=outputs.moment(1),
        observations=prompt.count,
        source=source,
    )


def _blocks(
    prompts: LengthCurve, outputs: LengthCurve, blocks_for: BlocksFor, max_model_len: int | None
) -> tuple[float, float, float]:
    """Mean and standard deviation of the blocks held at a random moment, and the 95th percentile at the end."""
    longest = float(max_model_len or _LONGEST_TOKENS)

    def blocks(tokens: float) -> float:
        found = blocks_for(min(longest, max(1.0, tokens)))
        if found is None:
            raise NoData("blocks per token are not one number for this model: give --model and its flags")
        return float(found)

    weights, live, ends = [], [], []
    for number in range(_COMBINATIONS):
        prompt = prompts.at((number + 0.5) / _COMBINATIONS)
        output = min(longest, outputs.at((0.5 + number * _STEP_OUTPUT) % 1))
        weights.append(output)
        live.append(blocks(prompt + output * ((0.5 + number * _STEP_SHARE) % 1)))
        ends.append(blocks(prompt + output))
    total = math.fsum(weights)
    mean = math.fsum(w * b for w, b in zip(weights, live, strict=True)) / total
    variance = math.fsum(w * (b - mean) ** 2 for w, b in zip(weights, live, strict=True)) / total
    return mean, math.sqrt(variance), sorted(ends)[int(0.95 * _COMBINATIONS)]


def _shortened(curve: LengthCurve, share: float) -> LengthCurve:
    return LengthCurve(
        ranks=curve.ranks, tokens=tuple(share * tokens for tokens in curve.tokens), observations=curve.observations
    )


def observed_lengths(window: Window, metric: Metric, source: str | None = None) -> tuple[Histogram, str]:
    """The window's observations if there are enough, else the engine's life; `source` asks for one of the two."""
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


def _hit_ratio(window: Window, source: str) -> float:
    """Share of the prompt tokens found in the prefix cache, over the span of the lengths; 0 where it is not known."""
    try:
        if source == "window":
            queries, hits = window.increase(PREFIX_CACHE_QUERIES), window.increase(PREFIX_CACHE_HITS)
        else:
            queries, hits = window.value(PREFIX_CACHE_QUERIES), window.value(PREFIX_CACHE_HITS)
    except NoData:
        return 0.0
    return min(1.0, hits / queries) if queries > 0 else 0.0


def _seen_blocks_per_running(window: Window, usable_blocks: int) -> float | None:
    """Blocks that running requests were seen to hold, over the snapshots in which the pool was in use.

    The second half of the window counts: when a load has just begun, all requests are young and hold little.
    """
    seen = [
        (usage * usable_blocks, running)
        for snapshot in window.last(window.duration_seconds / 2).snapshots
        if (usage := snapshot.get(KV_CACHE_USAGE)) and (running := snapshot.get(REQUESTS_RUNNING))
    ]
    return math.fsum(blocks for blocks, _ in seen) / math.fsum(running for _, running in seen) if seen else None
