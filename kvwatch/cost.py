"""What a step of this engine costs, fitted to the intervals between the pages of a window.

    seconds = steps x step + computed tokens x per_token + tokens read from the KV cache x per_kv_token

Steps and tokens come from vllm:iteration_tokens_total, whose observations are steps (vllm/v1/metrics/loggers.py,
PrometheusStatLogger.record). It leaves out what is computed again after a preemption, so the preemptions of the
interval are added at the tokens that one costs. The tokens read are those held times the steps; a prefix that requests
share is held once and read by each of them. All three
coefficients are at least 0 (non-negative least squares; with three of them, every subset is tried), and the subsets
are averaged by how well they explain the intervals for their number of coefficients.

Only intervals that were busy throughout count: an idle engine makes no step.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from kvwatch.simulation import CostModel
from kvwatch.snapshot import Snapshot
from kvwatch.vllm_metrics import ITERATION_TOKENS, KV_CACHE_USAGE, PREEMPTIONS, REQUESTS_RUNNING
from kvwatch.window import Window

MINIMUM_INTERVALS = 5
# A fit that misses interval by interval by more than this says nothing about other settings.
LARGEST_ERROR_RATIO = 0.25
TOKENS_TO_DOUBLE_A_STEP = 300
# No engine makes a million steps in a second: such a counter is another's, or wrong.
SHORTEST_STEP_SECONDS = 1e-6
# A step computes before it reads: costs by which less than this share of the time is computing are no engine's.
_LEAST_COMPUTING_RATIO = 0.01
_EXACT = 1e-12  # a squared error of this share is one of rounding

Coefficients = tuple[float, float, float]  # seconds per step, per computed token, per token read
ReadAgain = Callable[[float], float]  # running requests -> tokens


def _nothing(_running: float) -> float:
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFit:
    """The fitted costs; `error_ratio` is what the fit misses, as a share of the time of all intervals."""

    cost: CostModel
    error_ratio: float
    intervals: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyInterval:
    """Between two pages: what was done, and how long it took."""

    seconds: float
    steps: float
    tokens: float
    kv_tokens: float


def fit_cost(
    window: Window, *, pool_tokens: int, tokens_per_preemption: float, read_again: ReadAgain = _nothing
) -> CostFit | None:
    """The costs that explain the window's busy intervals, or None if too few are known or none explains them.

    `tokens_per_preemption` is how many tokens are computed again for one preemption; `read_again` how many tokens so
    many running requests read that the pool holds for another of them.
    """
    intervals = busy_intervals(
        window, pool_tokens=pool_tokens, tokens_per_preemption=tokens_per_preemption, read_again=read_again
    )
    if len(intervals) < MINIMUM_INTERVALS:
        return None
    coefficients = least_squares(intervals)
    if coefficients is None:
        return None
    missed = math.fsum(abs(i.seconds - _predicted(i, coefficients)) for i in intervals)
    error = missed / math.fsum(i.seconds for i in intervals)
    if error > LARGEST_ERROR_RATIO:
        return None
    step, per_token, per_kv_token = coefficients
    return CostFit(
        cost=CostModel(step_seconds=step, per_token_seconds=per_token, per_kv_token_seconds=per_kv_token),
        error_ratio=error,
        intervals=len(intervals),
    )


def assumed_cost(seconds_per_step: float, tokens_per_step: float) -> CostModel:
    """The cost where none can be fitted: of the same mean step, with tokens in the proportion that hardware gives.

    A decoding step reads the weights once; a token more needs 2 FLOPs per parameter. On a GPU with F FLOP/s and B
    bytes/s, at 2 bytes per parameter, a token more therefore costs B / F of the step: H100 SXM 989e12 / 3.35e12 = 295
    tokens to double it, A100 156, L4 403 (data sheets, dense bf16).
    """
    step = seconds_per_step / (1 + tokens_per_step / TOKENS_TO_DOUBLE_A_STEP)
    return CostModel(step_seconds=step, per_token_seconds=step / TOKENS_TO_DOUBLE_A_STEP)


def tokens_per_step(window: Window) -> float:
    """Mean tokens computed in a step over the busy intervals; 0 where steps are not exposed."""
    intervals = busy_intervals(window, pool_tokens=0, tokens_per_preemption=0.0)
    steps = math.fsum(interval.steps for interval in intervals)
    return math.fsum(interval.tokens for interval in intervals) / steps if steps else 0.0


def seconds_per_step(window: Window) -> float | None:
    """Mean time of a step over the busy intervals; None where steps are not exposed."""
    intervals = busy_intervals(window, pool_tokens=0, tokens_per_preemption=0.0)
    steps = math.fsum(interval.steps for interval in intervals)
    return math.fsum(interval.seconds for interval in intervals) / steps if steps else None


def busy_intervals(
    window: Window, *, pool_tokens: int, tokens_per_preemption: float, read_again: ReadAgain = _nothing
) -> tuple[BusyInterval, ...]:
    """The intervals at both ends of which requests ran, and in which steps were made.

    Where a page lacks the usage of the pool or the count of preemptions, its intervals are left out, unless
    `pool_tokens` or `tokens_per_preemption` is 0: then they are not asked for.
    """
    found = []
    for before, after in window.intervals:
        first, second = before.histograms.get(ITERATION_TOKENS.name), after.histograms.get(ITERATION_TOKENS.name)
        if first is None or second is None or first.sum is None or second.sum is None:
            continue
        steps, tokens = second.count - first.count, second.sum - first.sum
        again = _preempted(before, after) if tokens_per_preemption else 0.0
        seconds = after.at_seconds - before.at_seconds
        if again is None or steps <= 0 or tokens < 0 or again < 0 or not (_is_busy(before) and _is_busy(after)):
            continue
        if seconds < steps * SHORTEST_STEP_SECONDS:
            continue
        read = _read(before, after, pool_tokens, read_again) if pool_tokens else 0.0
        if read is None:
            continue
        found.append(
            BusyInterval(
                seconds=seconds,
                steps=steps,
                tokens=tokens + again * tokens_per_preemption,
                kv_tokens=steps * read,
            )
        )
    return tuple(found)


def _read(before: Snapshot, after: Snapshot, pool_tokens: int, read_again: ReadAgain) -> float | None:
    """Tokens that a step reads from the KV cache, the mean of both pages."""
    first, second = before.get(KV_CACHE_USAGE), after.get(KV_CACHE_USAGE)
    if first is None or second is None:
        return None
    shared = sum(read_again(page.get(REQUESTS_RUNNING) or 0.0) for page in (before, after))
    return ((first + second) * pool_tokens + shared) / 2


def _preempted(before: Snapshot, after: Snapshot) -> float | None:
    first, second = before.get(PREEMPTIONS), after.get(PREEMPTIONS)
    return None if first is None or second is None else second - first


def _is_busy(snapshot: Snapshot) -> bool:
    return (snapshot.get(REQUESTS_RUNNING) or 0.0) > 0


def _predicted(interval: BusyInterval, coefficients: Sequence[float]) -> float:
    return math.fsum(c * x for c, x in zip(coefficients, _row(interval), strict=True))


def _row(interval: BusyInterval) -> tuple[float, float, float]:
    return interval.steps, interval.tokens, interval.kv_tokens


def least_squares(intervals: Sequence[BusyInterval]) -> Coefficients | None:
    """The non-negative coefficients that explain the intervals best; a step must cost something.

    A pool that is full all the time does not tell a step's fixed cost from that of reading the pool: both explain the
    intervals, one says that a smaller batch loses throughput, the other that it loses none, and which of them misses by
    less is chance. So the subsets of coefficients are averaged, each weighted by exp(-AIC / 2) (Akaike weights: Burnham
    and Anderson, Model Selection and Multimodel Inference, 2002). Where intervals tell them apart, one has it all.
    """
    found = tuple(_explanations(intervals))
    if not found:
        return None
    best = min(criterion for criterion, _ in found)
    weights = [math.exp((best - criterion) / 2) for criterion, _ in found]
    step, per_token, per_kv_token = (
        math.fsum(weight * fitted[k] for weight, (_, fitted) in zip(weights, found, strict=True)) / math.fsum(weights)
        for k in range(3)
    )
    return step, per_token, per_kv_token


def _explanations(intervals: Sequence[BusyInterval]) -> Iterator[tuple[float, Coefficients]]:
    """Each subset of the coefficients, fitted, after its n ln(squared error / n) + 2 k (Akaike 1974)."""
    n = len(intervals)
    floor = _EXACT * math.fsum(i.seconds**2 / i.steps for i in intervals)
    for size in (1, 2, 3):
        for columns in combinations(range(3), size):
            solved = _solve(intervals, columns)
            if solved is None or min(solved) < 0 or max(solved) <= 0:
                continue
            full = [0.0, 0.0, 0.0]
            for column, value in zip(columns, solved, strict=True):
                full[column] = value
            coefficients = _computing(intervals, (full[0], full[1], full[2]))
            error = math.fsum(((i.seconds - _predicted(i, coefficients)) ** 2) / i.steps for i in intervals)
            yield n * math.log(max(error, floor) / n) + 2.0 * size, coefficients


def _computing(intervals: Sequence[BusyInterval], coefficients: Coefficients) -> Coefficients:
    """The coefficients, by which steps take time before they read anything.

    Else the first token of a short prompt would take none. What is missing is taken from reading and given to steps,
    rather than the explanation be refused: a millisecond more or less must not decide between all and nothing.
    """
    step, per_token, per_kv_token = coefficients
    computing = math.fsum(i.steps * step + i.tokens * per_token for i in intervals)
    missing = _LEAST_COMPUTING_RATIO * math.fsum(i.seconds for i in intervals) - computing
    if missing <= 0 or per_kv_token <= 0:
        return coefficients
    reading = per_kv_token * math.fsum(i.kv_tokens for i in intervals)
    steps = math.fsum(i.steps for i in intervals)
    return step + missing / steps, per_token, per_kv_token * max(0.0, 1 - missing / reading)


def _solve(intervals: Sequence[BusyInterval], columns: Sequence[int]) -> list[float] | None:
    """Weighted normal equations by elimination. An interval's variance grows with its steps, so it weighs 1 / steps.

    None where the columns do not tell the coefficients apart.
    """
    rows = [[_row(i)[column] / math.sqrt(i.steps) for column in columns] for i in intervals]
    scale = [math.sqrt(math.fsum(row[k] ** 2 for row in rows)) for k in range(len(columns))]
    if min(scale) <= 0:
        return None
    rows = [[value / s for value, s in zip(row, scale, strict=True)] for row in rows]
    seconds = [i.seconds / math.sqrt(i.steps) for i in intervals]
    size = len(columns)
    matrix = [
        [math.fsum(row[a] * row[b] for row in rows) for b in range(size)]
        + [math.fsum(row[a] * y for row, y in zip(rows, seconds, strict=True))]
        for a in range(size)
    ]
    for pivot in range(size):
        if abs(matrix[pivot][pivot]) < 1e-9:  # columns are of length 1 and the matrix is positive: no pivoting needed
            return None
        for row in matrix[pivot + 1 :]:
            factor = row[pivot] / matrix[pivot][pivot]
            for column in range(pivot, size + 1):
                row[column] -= factor * matrix[pivot][column]
    solved = [0.0] * size
    for index in reversed(range(size)):
        known = math.fsum(matrix[index][column] * solved[column] for column in range(index + 1, size))
        solved[index] = (matrix[index][size] - known) / matrix[index][index]
    return [value / s for value, s in zip(solved, scale, strict=True)]
