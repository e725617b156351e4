"""A vLLM engine that is not there: a workload played through the simulator, seen only through its /metrics pages.

The pages are those of vLLM 0.32 as far as kvwatch reads them: names, labels and buckets of vllm/v1/metrics/loggers.py
and buckets.py; gauges as of the last step; a prompt counted when its first token comes; tokens computed again after a
preemption counted nowhere. One difference: usage is taken before the step's finished requests free their blocks.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from kvwatch.exposition import read_samples
from kvwatch.lockstep import Flight
from kvwatch.scheduling import Engine
from kvwatch.simulation import CostModel, Request, SchedulerSettings, StepTrace
from kvwatch.simulator import check_fits
from kvwatch.snapshot import snapshots
from kvwatch.window import Window, windows

LABELS = 'engine="0",model_name="fake"'
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TTFT_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
ITL_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
COUNTERS = (
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
)


def token_buckets(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, ... up to the longest context (vllm/v1/metrics/buckets.py, build_1_2_5_buckets)."""
    steps = [mantissa * 10**exponent for exponent in range(8) for mantissa in (1, 2, 5)]
    return tuple(step for step in steps if step <= longest)


@dataclass(slots=True)
class Bucketed:
    """A Prometheus histogram."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0
    observations: int = 0

    def __post_init__(self) -> None:
        self.counts = [0] * len(self.bounds)

    def observe(self, value: float) -> None:
        self.observations += 1
        self.total += value
        for index in range(len(self.bounds) - 1, -1, -1):
            if value > self.bounds[index]:
                break
            self.counts[index] += 1

    def lines(self, name: str) -> Iterator[str]:
        yield f"# TYPE vllm:{name} histogram"
        for bound, count in zip((*self.bounds, math.inf), (*self.counts, self.observations), strict=True):
            shown = "+Inf" if math.isinf(bound) else repr(float(bound))
            yield f'vllm:{name}_bucket{{engine="0",le="{shown}",model_name="fake"}} {float(count)}'
        yield f"vllm:{name}_count{{{LABELS}}} {float(self.observations)}"
        yield f"vllm:{name}_sum{{{LABELS}}} {float(self.total)}"


@dataclass(slots=True)
class Life:
    """One request as the front-end counts it."""

    request: Request
    computed: int = 0
    generated: int = 0
    hits: int | None = None  # found in the cache when it was first admitted
    preemptions: int = 0
    arrived_at: float = 0.0
    admitted_at: float = 0.0
    last_token_at: float = 0.0


class _Watched(Engine):
    """The simulator's engine, telling what a request found in the cache when it was admitted."""

    seated: dict[int, int]

    def _seat(self, flight: Flight, hit_tokens: int) -> None:
        self.seated[flight.index] = hit_tokens
        super()._seat(flight, hit_tokens)


class FakeEngine:
    """Plays requests and writes a page every `every_seconds` until the last request has arrived."""

    def __init__(
        self,
        settings: SchedulerSettings,
        cost: CostModel,
        requests: Sequence[Request],
        *,
        clients: int | None = None,
        every_seconds: float = 2.0,
    ) -> None:
        for index, request in enumerate(requests):
            check_fits(settings, request, index)
        self.pages: list[tuple[float, str]] = []
        self.preemptions = 0
        self.finished = 0
        self._settings, self._cost, self._every = settings, cost, every_seconds
        self._clients = clients
        self._lives = [Life(request, arrived_at=request.at_seconds) for request in requests]
        self._arrivals = sorted(request.at_seconds for request in requests)
        self._sent = 0
        self._counters = dict.fromkeys(COUNTERS, 0)
        tokens = tuple(map(float, token_buckets(settings.max_model_len)))
        self._histograms = {
            "request_prompt_tokens": Bucketed(tokens),
            "request_generation_tokens": Bucketed(tokens),
            "request_prefill_kv_computed_tokens": Bucketed(tokens),
            "request_num_preemptions": Bucketed((1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)),
            "iteration_tokens_total": Bucketed(tuple(map(float, STEP_TOKENS))),
            "time_to_first_token_seconds": Bucketed(TTFT_SECONDS),
            "inter_token_latency_seconds": Bucketed(ITL_SECONDS),
            "request_queue_time_seconds": Bucketed(REQUEST_SECONDS),
            "e2e_request_latency_seconds": Bucketed(REQUEST_SECONDS),
        }
        self._running, self._free_blocks = 0, settings.usable_blocks
        engine = _Watched(settings, cost, requests, clients=clients, retry=None, trace=self._step)
        engine.seated = {}
        self._engine = engine
        self._next_page = 0.0
        engine.run()

    def window(self) -> Window:
        """What kvwatch makes of the pages."""
        found = [
            snapshot
            for at_seconds, text in self.pages
            for snapshot in snapshots(read_samples(text), at_seconds=at_seconds)
        ]
        return windows(found)[0]

    def save(self, folder: Path) -> Path:
        """The pages as a capture folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for at_seconds, text in self.pages:
            (folder / f"{round(at_seconds * 1000):013d}.prom").write_text(text)
        return folder

    def _step(self, step: StepTrace) -> None:
        start = step.start_seconds
        self._receive(start)
        while self._next_page <= start and self._sent < len(self._lives):
            self.pages.append((self._next_page, self._page()))
            self._next_page += self._every
        for index in step.preempted:
            self._lives[index].preemptions += 1
        self._counters["num_preemptions_total"] += len(step.preempted)
        self.preemptions += len(step.preempted)
        for index, found in self._engine.seated.items():
            life = self._lives[index]
            life.computed = found
            if life.hits is None:
                life.hits, life.admitted_at = found, start
                self._counters["prefix_cache_queries_total"] += life.request.prompt_tokens
                self._counters["prefix_cache_hits_total"] += found
        self._engine.seated.clear()
        held = sum(self._lives[index].computed for index, _ in step.scheduled)
        tokens = sum(count for _, count in step.scheduled)
        cost = self._cost
        end = start + cost.step_seconds + tokens * cost.per_token_seconds + held * cost.per_kv_token_seconds
        self._running, self._free_blocks = len(step.scheduled), step.free_blocks
        self._compute(step.scheduled, end)

    def _receive(self, now: float) -> None:
        """Requests that are in the engine's hands by now."""
        if self._clients is not None:
            while self._sent < len(self._lives) and self._sent - self.finished < self._clients:
                self._lives[self._sent].arrived_at = now
                self._sent += 1
            return
        while self._sent < len(self._arrivals) and self._arrivals[self._sent] <= now:
            self._sent += 1

    def _compute(self, scheduled: Iterable[tuple[int, int]], end: float) -> None:
        seen = outputs = 0
        for index, count in scheduled:
            life = self._lives[index]
            life.computed += count
            if life.computed < life.request.prompt_tokens + life.generated:
                continue
            outputs += 1
            life.generated += 1
            if life.generated == 1:
                seen += life.request.prompt_tokens - (life.hits or 0)
                self._counters["prompt_tokens_total"] += life.request.prompt_tokens
                self._histograms["time_to_first_token_seconds"].observe(end - life.arrived_at)
            else:
                self._histograms["inter_token_latency_seconds"].observe(end - life.last_token_at)
            life.last_token_at = end
            if life.generated == life.request.output_tokens:
                self._finish(life, end)
        self._counters["generation_tokens_total"] += outputs
        if outputs:  # the front-end counts a step when it gives an output
            self._histograms["iteration_tokens_total"].observe(seen + outputs)

    def _finish(self, life: Life, end: float) -> None:
        self.finished += 1
        self._running -= 1
        request = life.request
        for name, value in (
            ("request_prompt_tokens", request.prompt_tokens),
            ("request_generation_tokens", request.output_tokens),
            ("request_prefill_kv_computed_tokens", request.prompt_tokens - (life.hits or 0)),
            ("request_num_preemptions", life.preemptions),
            ("request_queue_time_seconds", life.admitted_at - life.arrived_at),
            ("e2e_request_latency_seconds", end - life.arrived_at),
        ):
            self._histograms[name].observe(value)

    def _page(self) -> str:
        settings = self._settings
        longest = settings.max_model_len
        concurrency = settings.num_gpu_blocks / settings.blocks(longest)
        info = {
            "block_size": settings.block_size,
            "cache_dtype": "auto",
            "enable_prefix_caching": settings.enable_prefix_caching,
            "engine": 0,
            "gpu_memory_utilization": 0.92,
            "kv_cache_max_concurrency": concurrency,
            "kv_cache_memory_bytes": None,
            "kv_cache_size_tokens": int(concurrency * longest),
            "num_gpu_blocks": settings.num_gpu_blocks,
        }
        labels = ",".join(f'{name}="{value}"' for name, value in info.items())
        usage = 1 - self._free_blocks / settings.usable_blocks
        waiting = self._sent - self.finished - self._running
        lines = [
            "process_start_time_seconds 1.0",
            f"vllm:cache_config_info{{{labels}}} 1.0",
            f"vllm:num_requests_running{{{LABELS}}} {float(self._running)}",
            f"vllm:num_requests_waiting{{{LABELS}}} {float(waiting)}",
            f"vllm:kv_cache_usage_perc{{{LABELS}}} {usage}",
            f'vllm:request_success_total{{finished_reason="length",{LABELS}}} {float(self.finished)}',
            'vllm:admission_rejections_total{model_name="fake",reason="max_num_queued_reqs"} 0.0',
        ]
        lines += [f"vllm:{name}{{{LABELS}}} {float(value)}" for name, value in self._counters.items()]
        for name, histogram in self._histograms.items():
            lines += histogram.lines(name)
        return "\n".join(lines) + "\n"


def in_flight_changes(window: Window) -> list[float]:
    """How the number of requests in flight moved from page to page."""
    counts = [s.values["num_requests_running"] + s.values["num_requests_waiting"] for s in window.snapshots]
    return [after - before for before, after in pairwise(counts)]
