"""Workloads with known truth, on which choices of settings are judged by the simulator that decides as vLLM does."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from fake_engine import FakeEngine

from kvwatch.capacity import EngineFacts
from kvwatch.checks.check import engine_view
from kvwatch.objective import Option, choose
from kvwatch.report import report
from kvwatch.simulation import CostModel, Request, SchedulerSettings, SimulationResult
from kvwatch.simulator import simulate
from kvwatch.study import trial_of
from kvwatch.what_if import Trial, cap_candidates, with_seqs
from kvwatch.window import Window
from kvwatch.workload import offered_load

VERSION = (0, 32, 0)
TRUE_WATERMARKS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3)
# A decoding step of 20 ms; what a token more costs, as on an H100; reading the KV cache at 3 TB/s, 128 KiB a token.
GPU = CostModel(step_seconds=0.02, per_token_seconds=6e-5, per_kv_token_seconds=4e-8)
# The CPU of a test machine with a tiny model, where steps grow with the batch.
CPU = CostModel(step_seconds=0.0055, per_token_seconds=9e-5, per_kv_token_seconds=2e-8)

Draw = Callable[[random.Random], Request]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCase:
    name: str
    settings: SchedulerSettings
    cost: CostModel
    requests: tuple[Request, ...]
    clients: int | None

    @property
    def trial(self) -> Trial:
        """The case as a trial with its true requests as the only draw."""
        return Trial(
            settings=self.settings, cost=self.cost, draws=(self.requests,), clients=self.clients, version=VERSION
        )

    def play(self, settings: SchedulerSettings, in_flight: int | None = None) -> SimulationResult:
        clients = self.clients if in_flight is None or self.clients is None else min(in_flight, self.clients)
        return simulate(settings, self.cost, self.requests, clients)

    def window(self) -> Window:
        """The /metrics pages of an engine with this load, one every two seconds."""
        return FakeEngine(self.settings, self.cost, self.requests, clients=self.clients).window()

    def reconstructed(self) -> Trial:
        """What kvwatch makes of those pages, nothing else given."""
        view = engine_view(self.window(), EngineFacts())
        return trial_of(view, offered_load(view))[0]

    def chosen_from_pages(self) -> SchedulerSettings:
        """What `kvwatch recommend` says of those pages."""
        (engine,) = report([self.window()], simulate=True).engines
        flags = ("max_num_seqs", "watermark")
        changes: dict[str, Any] = {m.setting: m.proposed for m in engine.recommendations if m.setting in flags}
        return replace(self.settings, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Least share of the best throughput; preemptions at most so many times those of the best, plus so many."""

    kept: float
    ratio: float
    preemptions: int


WANTED = Wanted(kept=0.96, ratio=1.25, preemptions=2)
WANTED_OF_PAGES = Wanted(kept=0.94, ratio=1.5, preemptions=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What the best settings give, and the highest throughput of all."""

    best: Option
    now: SimulationResult
    highest_throughput: float

    def throughput_ratio(self, result: SimulationResult) -> float:
        return result.output_tokens_per_second / self.highest_throughput

    def is_good(self, result: SimulationResult, wanted: Wanted) -> bool:
        calm = result.preemptions <= wanted.ratio * self.best.result.preemptions + wanted.preemptions
        return calm and self.throughput_ratio(result) >= wanted.kept


@lru_cache(maxsize=64)
def truth_of(case: GridCase) -> Truth:
    """Every cap times every watermark, on the true requests."""
    now = case.settings
    settings = [
        with_seqs(now, cap, watermark)
        for cap in sorted({*cap_candidates(case.trial), now.max_num_seqs})
        for watermark in TRUE_WATERMARKS
    ]
    options = [Option(settings=one, result=case.play(one)) for one in settings]
    return Truth(
        best=choose(options, "balanced", now),
        now=case.play(now),
        highest_throughput=max(option.result.output_tokens_per_second for option in options),
    )


def _lengths(prompt: tuple[int, int], output: tuple[int, int], **more: object) -> Draw:
    def draw(rng: random.Random) -> Request:
        return Request(prompt_tokens=rng.randint(*prompt), output_tokens=rng.randint(*output), **more)  # type: ignore[arg-type]

    return draw


def _lognormal(prompt: tuple[float, float], output: tuple[float, float]) -> Draw:
    """Medians and sigmas of the logarithm; cut at 3,000 tokens each."""
    import math

    def length(rng: random.Random, median: float, sigma: float) -> int:
        return max(1, min(3000, round(median * math.exp(rng.gauss(0, sigma)))))

    return lambda rng: Request(prompt_tokens=length(rng, *prompt), output_tokens=length(rng, *output))


def _mixed(rng: random.Random) -> Request:
    if rng.random() < 0.8:
        return Request(prompt_tokens=rng.randint(100, 300), output_tokens=rng.randint(50, 250))
    return Request(prompt_tokens=rng.randint(1500, 3500), output_tokens=rng.randint(500, 1500))


def _summaries_and_stories(rng: random.Random) -> Request:
    """Long prompts with short answers, and the reverse."""
    if rng.random() < 0.5:
        return Request(prompt_tokens=rng.randint(2000, 4000), output_tokens=rng.randint(50, 150))
    return Request(prompt_tokens=rng.randint(50, 200), output_tokens=rng.randint(1000, 2000))


def _sharing(prefixes: int, tokens: int) -> Draw:
    def draw(rng: random.Random) -> Request:
        prompt = tokens + rng.randint(50, 500)
        return Request(
            prompt_tokens=prompt,
            output_tokens=rng.randint(200, 800),
            prefix=f"p{rng.randrange(prefixes)}",
            prefix_tokens=tokens,
        )

    return draw


SHAPES: dict[str, Draw] = {
    "steady": _lengths((900, 1500), (600, 1200)),
    "chat": _lognormal((300, 0.6), (250, 0.7)),
    "heavy tail": _lognormal((500, 1.1), (400, 1.1)),
    "reasoning": _lognormal((300, 0.5), (1200, 0.5)),
    "mixed": _mixed,
    "opposites": _summaries_and_stories,
    "one prefix": _sharing(1, 1024),
    "six prefixes": _sharing(6, 1024),
}


def _case(
    shape: str,
    pool: float,
    *,
    arrivals: str = "closed",
    load: float = 1.0,
    clients: int = 28,
    count: int = 260,
    block_size: int = 16,
    cost: CostModel = GPU,
    seats: int = 256,
    series: int = 1,
) -> GridCase:
    """A pool of `pool` times what all clients' requests hold at their end; each series has other random numbers."""
    name = f"{shape}, {arrivals}, pool {pool:g} x demand"
    if arrivals != "closed":
        name += f", load {load:g}"
    rng = random.Random(name if series == 1 else f"{name}/{series}")
    if cost is CPU:
        name += ", on a CPU"
    requests = tuple(SHAPES[shape](rng) for _ in range(count))
    ends = [-(-(r.prompt_tokens + r.output_tokens) // block_size) for r in requests]
    shared = max(r.prefix_tokens for r in requests) // block_size
    demand = clients * (sum(ends) / count - shared) + shared
    settings = SchedulerSettings(
        num_gpu_blocks=1 + max(*ends, round(pool * demand)),
        block_size=block_size,
        max_model_len=8192,
        max_num_seqs=seats,
    )
    case = GridCase(name=name, settings=settings, cost=cost, requests=requests, clients=clients)
    if arrivals == "closed":
        return case
    busy = case.play(replace(settings, watermark=0.05))
    rate = load * busy.requests / busy.makespan_seconds
    return replace(case, clients=None, requests=_arriving(requests, rate, rng, bursts=arrivals == "bursty"))


def _arriving(requests: tuple[Request, ...], rate: float, rng: random.Random, *, bursts: bool) -> tuple[Request, ...]:
    """Poisson arrivals at a rate per second; with bursts, three times that for a fifth of the time, else half of it."""
    at, timed = 0.0, []
    period = 40 / rate  # a burst each forty requests or so
    for request in requests:
        factor = 1.0
        if bursts:
            factor = 3.0 if at % period < period / 5 else 0.5
        at += rng.expovariate(rate * factor)
        timed.append(replace(request, at_seconds=round(at, 3)))
    return tuple(timed)


def cases(series: int = 1) -> tuple[GridCase, ...]:
    """The 37 workloads, drawn with the random numbers of this series."""
    case = partial(_case, series=series)
    return (
        *(case("steady", pool) for pool in (0.5, 0.7, 1.0, 1.5)),
        case("steady", 0.6, block_size=128, cost=CPU),
        case("steady", 0.5, arrivals="poisson", load=0.9),
        case("steady", 0.5, arrivals="poisson", load=1.2),
        case("steady", 0.6, arrivals="bursty", load=1.0),
        *(case("chat", pool) for pool in (0.5, 0.8, 2.0)),
        case("chat", 0.5, arrivals="poisson", load=1.1),
        case("chat", 0.6, arrivals="bursty", load=1.0),
        *(case("heavy tail", pool) for pool in (0.5, 0.7, 1.0)),
        case("heavy tail", 0.6, arrivals="poisson", load=1.1),
        case("heavy tail", 0.7, arrivals="bursty", load=0.9),
        *(case("reasoning", pool) for pool in (0.5, 0.7, 1.0)),
        case("reasoning", 0.5, arrivals="poisson", load=1.1),
        case("reasoning", 0.5, cost=CPU, block_size=128),
        *(case("mixed", pool) for pool in (0.5, 0.8, 1.2)),
        case("mixed", 0.6, arrivals="poisson", load=1.1),
        case("mixed", 0.6, arrivals="bursty", load=1.0),
        *(case("opposites", pool) for pool in (0.5, 0.8)),
        case("opposites", 0.6, arrivals="poisson", load=1.1),
        *(case("one prefix", pool) for pool in (0.5, 0.8)),
        case("one prefix", 0.6, arrivals="poisson", load=1.1),
        *(case("six prefixes", pool) for pool in (0.5, 0.8)),
        case("six prefixes", 0.6, arrivals="bursty", load=1.0),
    )


CASES = cases()
