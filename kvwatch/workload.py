"""From what an engine's pages show to the load that is offered to it: lengths, arrivals, shared prefixes, settings.

What the pages show and what is made of it:

- Length histograms of finished requests -> one curve each for prompts and answers (kvwatch/lengths.py). They say
  nothing about which prompt goes with which answer; the tokens that running requests hold do: every token of an answer
  is generated once, while its request holds prompt + answer so far, so the mean held is
  E[prompt x answer] / E[answer] + E[answer^2] / (2 E[answer]). What is held beyond that for unrelated lengths gives
  their correlation.
- Requests in flight that hardly change -> a closed loop of so many clients. Otherwise an open loop that repeats the
  arrivals of each interval between two pages: finished + what the number in flight rose by.
- Prompt tokens that were not computed -> a shared prefix. Whether few requests hold it in common or each session has
  its own is told by the blocks that sharing saves.

Drawing requests is stratified: so many ranks, evenly spaced, in an order that the seed shuffles. A few hundred requests
therefore have the lengths of the histogram whatever the seed.
"""

import contextlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, quantiles

from kvwatch.checks.check import EngineView
from kvwatch.errors import NoData
from kvwatch.footprint import MINIMUM_OBSERVATIONS, observed_lengths
from kvwatch.lengths import LengthCurve, length_curve
from kvwatch.settings_now import Assumption, Origin, settings_now
from kvwatch.simulation import Request, SchedulerSettings
from kvwatch.snapshot import Histogram, Snapshot
from kvwatch.vllm_metrics import (
    KV_CACHE_USAGE,
    PREFIX_CACHE_HITS,
    PREFIX_CACHE_QUERIES,
    PROMPT_TOKENS,
    REQUEST_GENERATION_TOKENS,
    REQUEST_PREFILL_KV_COMPUTED_TOKENS,
    REQUEST_PROMPT_TOKENS,
    REQUEST_SUCCESS,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    TIME_TO_FIRST_TOKEN,
)
from kvwatch.window import Window

LEAST_REQUESTS, MOST_REQUESTS = 200, 1200
_ROUNDS = 8  # requests per client in a simulated closed loop
_STEADY_REQUESTS, _STEADY_SHARE = 2.0, 0.10  # in-flight counts that differ by no more are one number of clients
_LARGEST_CORRELATION = 0.999
_CORRELATION_NOISE = 0.3  # what unrelated lengths are estimated at by chance, over some hundred requests
_LARGEST_CORRECTION = 1.25
_TELLING_RATIO = 0.2
_PAIRS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalSpan:
    """Requests that arrived between two pages; a span of 0 seconds holds those in flight at the first page."""

    start_seconds: float
    seconds: float
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """The load and the settings under which it was seen. `clients` None: an open loop that repeats `arrivals`.

    Without `prefixes_known` the pages do not tell whether requests share a prefix, and none is assumed.
    """

    prompts: LengthCurve
    outputs: LengthCurve
    correlation: float
    prefix_tokens: int
    prefixes: int
    prefixes_known: bool
    clients: int | None
    arrivals: tuple[ArrivalSpan, ...]
    settings: SchedulerSettings
    max_num_seqs_known: bool
    observations: float
    source: str  # "window" or "lifetime": over which the lengths were observed
    assumptions: tuple[Assumption, ...]

    @property
    def typical_count(self) -> int:
        """How many requests represent the load."""
        wanted = _ROUNDS * self.clients if self.clients else sum(span.requests for span in self.arrivals)
        return min(MOST_REQUESTS, max(LEAST_REQUESTS, wanted))

    def read_again(self, running: float) -> float:
        """Tokens of shared prefixes that so many running requests read beyond those that the pool holds."""
        if not self.prefixes:
            return 0.0
        return self.prefix_tokens * max(0.0, running - _distinct(self.prefixes, running))

    def requests(self, seed: int, count: int | None = None) -> tuple[Request, ...]:
        """`count` requests drawn from the load; the same seed gives the same ones."""
        rng = random.Random(seed)
        count = count or self.typical_count
        lengths = _pairs(self.prompts, self.outputs, self.correlation, count, rng)
        times = _arrival_times(self.arrivals, count, rng) if self.clients is None else [0.0] * count
        names = [f"prefix {number % self.prefixes}" for number in range(count)] if self.prefixes else []
        rng.shuffle(names)
        return tuple(
            self._request(prompt, output, at, names[number] if names else None)
            for number, ((prompt, output), at) in enumerate(zip(lengths, times, strict=True))
        )

    def _request(self, prompt: float, output: float, at: float, prefix: str | None) -> Request:
        longest = longest_request(self.settings)
        prompt_tokens = min(max(1, round(prompt)), longest - 1)
        output_tokens = min(max(1, round(output)), longest - prompt_tokens)
        shared = min(self.prefix_tokens, prompt_tokens) if prefix else 0
        return Request(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            at_seconds=at,
            prefix=prefix if shared else None,
            prefix_tokens=shared,
        )


def longest_request(settings: SchedulerSettings) -> int:
    """Tokens, prompt and answer, of the longest request that these settings can run."""
    low, high = 2, settings.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if settings.blocks(middle - 1) <= settings.usable_blocks else (low, middle - 1)
    return low


def offered_load(view: EngineView) -> OfferedLoad:
    """What the engine's window shows -> OfferedLoad. Raises NoData naming what is missing."""
    now = settings_now(view)
    window, settings = view.window, now.settings
    prompt, source = observed_lengths(window, REQUEST_PROMPT_TOKENS, None)
    output, _ = observed_lengths(window, REQUEST_GENERATION_TOKENS, source)
    longest = view.capacity.max_model_len
    prompts = length_curve(prompt, longest=longest, mean=_started_prompt_mean(window, prompt, source))
    outputs = _with_unfinished(length_curve(output, longest=longest), window, source)
    clients, arrivals, arrival_notes = _arrivals(window)
    cached = _cached_per_request(window, prompts, source) if settings.enable_prefix_caching else 0.0
    held = _held_per_running(window, settings)
    correlation, prefix_tokens, prefixes = 0.0, 0, 0
    if cached is not None and cached >= settings.block_size / 2:
        prefix_tokens = _prefix_tokens(prompts, cached, settings.block_size)
        prefixes = _prefixes(window, prompts, outputs, prefix_tokens, held)
    elif held is not None and _is_settled(window) and len(settings.kv_groups) == 1:
        correlation = _correlation(prompts, outputs, held - settings.block_size / 2)
    derived: tuple[tuple[str, float | int | str, Origin], ...] = (
        ("prompt_tokens_mean", round(prompts.moment(1), 1), "observed"),
        ("output_tokens_mean", round(outputs.moment(1), 1), "observed"),
        ("length_correlation", round(correlation, 2), "derived" if correlation else "assumed"),
        ("prefix_tokens", prefix_tokens, "assumed" if cached is None else "derived"),
        ("prefixes", prefixes, "assumed" if cached is None else "derived"),
    )
    return OfferedLoad(
        prompts=prompts,
        outputs=outputs,
        correlation=correlation,
        prefix_tokens=prefix_tokens,
        prefixes=prefixes,
        prefixes_known=cached is not None,
        clients=clients,
        arrivals=arrivals,
        settings=settings,
        max_num_seqs_known=now.max_num_seqs_known,
        observations=prompt.count,
        source=source,
        assumptions=(
            *now.assumptions,
            *arrival_notes,
            *(Assumption(name=name, value=value, origin=origin) for name, value, origin in derived),
        ),
    )


# ---- lengths -------------------------------------------------------------------------------------------------------


def _started_prompt_mean(window: Window, finished: Histogram, source: str) -> float | None:
    """Mean prompt of the requests that got their first token in the window, if those are more than the finished."""
    if source != "window":
        return None
    try:
        started = window.observed(TIME_TO_FIRST_TOKEN).count
        tokens = window.increase(PROMPT_TOKENS)
    except NoData:
        return None
    return tokens / started if started > finished.count and tokens > 0 else None


def _with_unfinished(outputs: LengthCurve, window: Window, source: str) -> LengthCurve:
    """The answers of all that started, from those that finished in the window, among which the long ones are rare.

    With N finished of mean f, R more running at the end than at the start, whose answers have the mean m (1 + c^2) of
    a length-biased sample, c being the coefficient of variation: (N + R) m = N f + R m (1 + c^2), so
    m = f N / (N - R c^2).
    """
    if source != "window":
        return outputs
    first, last = window.snapshots[0].get(REQUESTS_RUNNING), window.latest.get(REQUESTS_RUNNING)
    if first is None or last is None or last <= first:
        return outputs
    variation = outputs.moment(2) / outputs.moment(1) ** 2 - 1
    finished = outputs.observations
    factor = finished / max(finished - (last - first) * variation, finished / _LARGEST_CORRECTION)
    return outputs.scaled(factor)


def _pairs(
    prompts: LengthCurve, outputs: LengthCurve, correlation: float, count: int, rng: random.Random
) -> list[tuple[float, float]]:
    """Prompts and answers in random order, every rank once, their ranks correlated (a Gaussian copula)."""
    normal = NormalDist()
    scores = [normal.inv_cdf((number + 0.5) / count) for number in range(count)]
    noise = list(scores)
    rng.shuffle(noise)
    rest = math.sqrt(1 - correlation**2)
    mixed = [correlation * score + rest * other for score, other in zip(scores, noise, strict=True)]
    order = sorted(range(count), key=mixed.__getitem__)
    answers = [0.0] * count
    for index, answer in zip(order, outputs.sample(count), strict=True):
        answers[index] = answer
    pairs = list(zip(prompts.sample(count), answers, strict=True))
    rng.shuffle(pairs)
    return pairs


def _correlation(prompts: LengthCurve, outputs: LengthCurve, held_tokens: float) -> float:
    """The correlation of ranks with which running requests hold so many tokens on average; 0 if none comes closer."""

    def held(correlation: float) -> float:
        pairs = _pairs(prompts, outputs, correlation, _PAIRS, random.Random(0))
        answers = math.fsum(answer for _, answer in pairs)
        return math.fsum((prompt + answer / 2) * answer for prompt, answer in pairs) / answers

    low, high = -_LARGEST_CORRELATION, _LARGEST_CORRELATION
    if held(high) - held(low) < _TELLING_RATIO * held_tokens:
        return 0.0  # lengths so alike that what is held tells nothing
    if held_tokens <= held(low):
        return low
    if held_tokens >= held(high):
        return high
    while high - low > 0.02:
        middle = (low + high) / 2
        low, high = (middle, high) if held(middle) < held_tokens else (low, middle)
    found = (low + high) / 2
    return found if abs(found) > _CORRELATION_NOISE else 0.0


def _held_per_running(window: Window, settings: SchedulerSettings) -> float | None:
    """Tokens, in whole blocks, that a running request was seen to hold on average."""
    blocks = running = 0.0
    for snapshot in window.snapshots:
        usage, count = snapshot.get(KV_CACHE_USAGE), snapshot.get(REQUESTS_RUNNING)
        if usage is not None and count:
            blocks += usage * settings.usable_blocks
            running += count
    return blocks * settings.block_size / running if running else None


def _is_settled(window: Window) -> bool:
    """Whether the window is long enough that running requests were seen at every age: three generations."""
    try:
        finished = window.increase(REQUEST_SUCCESS)
        running = window.mean(REQUESTS_RUNNING)
    except NoData:
        return False
    return finished >= 3 * running and len(window.snapshots) >= 5


# ---- arrivals ------------------------------------------------------------------------------------------------------


def _arrivals(window: Window) -> tuple[int | None, tuple[ArrivalSpan, ...], tuple[Assumption, ...]]:
    """The number of clients of a closed loop, or the arrivals of an open one."""
    counts = [flying for snapshot in window.snapshots if (flying := _in_flight(snapshot)) is not None]
    if not counts:
        raise NoData(f"{REQUESTS_RUNNING.exposed} and {REQUESTS_WAITING.exposed} are not exposed")
    spans = _spans(window)
    arrived = sum(span.requests for span in spans[1:])
    busy = sorted(count for count in counts if count > 0) or [1.0]
    low, high = (busy[0], busy[-1]) if len(busy) < 10 else (quantiles(busy, n=10)[0], quantiles(busy, n=10)[-1])
    is_steady = high - low <= max(_STEADY_REQUESTS, _STEADY_SHARE * high)
    if is_steady or arrived < MINIMUM_OBSERVATIONS or len(spans) < 4:
        clients = max(1, round(high))
        origin: Origin = "derived" if is_steady and len(busy) >= 3 else "assumed"
        return clients, (), (Assumption(name="clients", value=clients, origin=origin),)
    rate = round(arrived / sum(span.seconds for span in spans), 3)
    return None, spans, (Assumption(name="arrivals_per_second", value=rate, origin="observed"),)


def _in_flight(snapshot: Snapshot) -> float | None:
    running, waiting = snapshot.get(REQUESTS_RUNNING), snapshot.get(REQUESTS_WAITING)
    return None if running is None or waiting is None else running + waiting


def _spans(window: Window) -> tuple[ArrivalSpan, ...]:
    """Arrivals of each interval: what finished, and what the number in flight rose by."""
    first = _in_flight(window.snapshots[0]) or 0.0
    spans = [ArrivalSpan(start_seconds=0.0, seconds=0.0, requests=round(first))]
    start = window.snapshots[0].at_seconds
    owed = 0.0  # an arrival that one page shows early is taken off the next interval
    for before, after in window.intervals:
        done, done_before = after.get(REQUEST_SUCCESS), before.get(REQUEST_SUCCESS)
        here, there = _in_flight(after), _in_flight(before)
        if done is None or done_before is None or here is None or there is None or done < done_before:
            continue
        owed += done - done_before + here - there
        spans.append(
            ArrivalSpan(
                start_seconds=before.at_seconds - start,
                seconds=after.at_seconds - before.at_seconds,
                requests=max(0, round(owed)),
            )
        )
        owed = min(0.0, owed)
    return tuple(spans)


def _arrival_times(spans: Sequence[ArrivalSpan], count: int, rng: random.Random) -> list[float]:
    """`count` arrival times: the spans, repeated as often as needed, at random instants within each."""
    times = [0.0] * min(count, spans[0].requests)
    length = sum(span.seconds for span in spans)
    repetition = 0
    while len(times) < count:
        for span in spans[1:]:
            start = repetition * length + span.start_seconds
            drawn = min(span.requests, count)  # of more than are wanted, the first
            seconds = span.seconds * (drawn / max(1, span.requests))
            times += [start + rng.random() * seconds for _ in range(drawn)]
        repetition += 1
    return sorted(round(at, 6) for at in times[:count])


# ---- prefixes ------------------------------------------------------------------------------------------------------


def _cached_per_request(window: Window, prompts: LengthCurve, source: str) -> float | None:
    """Prompt tokens per request that were found in the cache: by what was not computed, else by hits and queries.

    None where the pages have neither.
    """
    read = window.observed if source == "window" else window.lifetime
    with contextlib.suppress(NoData):  # not before vLLM 0.13
        computed, prompt = read(REQUEST_PREFILL_KV_COMPUTED_TOKENS), read(REQUEST_PROMPT_TOKENS)
        if computed.sum is not None and prompt.sum is not None:
            return max(0.0, (prompt.sum - computed.sum) / prompt.count)
    try:
        queries, hits = window.increase(PREFIX_CACHE_QUERIES), window.increase(PREFIX_CACHE_HITS)
    except NoData:
        return None
    return min(1.0, hits / queries) * prompts.moment(1) if queries > 0 else 0.0


def _prefix_tokens(prompts: LengthCurve, cached: float, block_size: int) -> int:
    """The shared prefix, in whole blocks, of which requests find so many tokens on average."""
    lengths = prompts.sample(_PAIRS)

    def found(prefix: float) -> float:
        return math.fsum(min(prefix, length - 1) // block_size * block_size for length in lengths) / len(lengths)

    low, high = 1, max(1, math.ceil(max(lengths) / block_size))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle * block_size) >= cached else (middle + 1, high)
    return low * block_size


def _prefixes(
    window: Window, prompts: LengthCurve, outputs: LengthCurve, prefix_tokens: int, held: float | None
) -> int:
    """How many different prefixes there are: from the tokens that running requests save by holding them in common."""
    if held is None:
        return 1
    running = max(1.0, window.mean(REQUESTS_RUNNING))
    alone = prompts.moment(1) + outputs.moment(2) / (2 * outputs.moment(1))
    distinct = running * (1 - (alone - held) / prefix_tokens)
    if distinct <= 1.5:
        return 1
    most = max(1, LEAST_REQUESTS // 8)
    for prefixes in range(1, most):
        if _distinct(prefixes, running) >= distinct:
            return prefixes
    return most


def _distinct(prefixes: int, running: float) -> float:
    """How many of the prefixes so many requests have between them, on average."""
    return prefixes * (1.0 - math.pow(1.0 - 1.0 / prefixes, running))
