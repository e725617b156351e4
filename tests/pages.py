"""Exposition pages and snapshots for tests, built from the few lines that a test is about."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvwatch.exposition import read_samples
from kvwatch.snapshot import Snapshot, snapshots
from kvwatch.sources.capture import read_capture
from kvwatch.vllm_metrics import Metric
from kvwatch.window import Window, windows

DATA = Path(__file__).parent / "data"
CAPTURES = DATA / "captures"
EXPOSITION = DATA / "exposition"

# Bounds of vLLM's length histograms for a max_model_len of 4,096.
LENGTH_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0)
TIME_BOUNDS = (0.1, 0.5, 1.0, 5.0, 10.0)


def labels(**values: str) -> str:
    return ",".join(f'{name}="{value}"' for name, value in values.items())


def histogram(name: str, counts: Sequence[float], bounds: Sequence[float], total: float, **values: str) -> str:
    """Lines of a histogram; `counts` are cumulative and end with that of +Inf."""
    where = labels(**values)
    bars = zip([*(repr(bound) for bound in bounds), "+Inf"], counts, strict=True)
    lines = [f'{name}_bucket{{{where},le="{bound}"}} {count}' for bound, count in bars]
    return "\n".join([*lines, f"{name}_count{{{where}}} {counts[-1]}", f"{name}_sum{{{where}}} {total}"])


def engine_page(
    *,
    running: float = 0,
    waiting: float = 0,
    usage: float = 0.0,
    preemptions: float = 0,
    finished: float = 0,
    tokens: float = 0,
    queued_seconds: float = 0.0,
    started: float | None = 1_700_000_000.0,
    config: Mapping[str, str] | None = None,
    extra: str = "",
    without: Sequence[str] = (),
    model_name: str = "m",
    engine: str = "0",
    prefix: str = "vllm:",
) -> str:
    """The page of one engine. `finished` requests had 300 prompt and 150 output tokens each and had waited
    `queued_seconds` on average. `without` drops the metrics whose names contain one of its words.
    """
    who = {"model_name": model_name, "engine": engine}
    where = labels(**who)
    settings = {"block_size": "16", "num_gpu_blocks": "1000", "engine": engine} if config is None else dict(config)
    lengths = [0.0] * 8 + [finished] * 4
    waits = [finished if queued_seconds <= bound else 0 for bound in TIME_BOUNDS] + [finished]
    lines = [
        f"{prefix}num_requests_running{{{where}}} {running}",
        f"{prefix}num_requests_waiting{{{where}}} {waiting}",
        f"{prefix}kv_cache_usage_perc{{{where}}} {usage}",
        f"{prefix}num_preemptions_total{{{where}}} {preemptions}",
        f'{prefix}request_success_total{{{where},finished_reason="stop"}} {finished}',
        f"{prefix}prompt_tokens_total{{{where}}} {tokens}",
        f"{prefix}generation_tokens_total{{{where}}} {tokens}",
        histogram(f"{prefix}request_prompt_tokens", lengths, LENGTH_BOUNDS, 300 * finished, **who),
        histogram(f"{prefix}request_generation_tokens", lengths, LENGTH_BOUNDS, 300 * finished, **who),
        histogram(f"{prefix}request_queue_time_seconds", waits, TIME_BOUNDS, queued_seconds * finished, **who),
    ]
    if settings:
        lines.append(f"{prefix}cache_config_info{{{labels(**settings)}}} 1.0")
    if started is not None:
        lines.append(f"process_start_time_seconds {started}")
    kept = [line for block in lines for line in block.split("\n") if not any(word in line for word in without)]
    return "\n".join([*kept, *extra.split("\n")]).rstrip() + "\n"


def read(page: str, at_seconds: float = 0.0, target: str = "t") -> tuple[Snapshot, ...]:
    return snapshots(read_samples(page), at_seconds=at_seconds, target=target)


def window_of(pages: Sequence[str], *, every_seconds: float = 10.0) -> Window:
    """Pages of one engine at equal distances -> its window."""
    (window,) = windows(s for number, page in enumerate(pages) for s in read(page, number * every_seconds))
    return window


def capture(name: str) -> Window:
    """The window of a recorded capture: healthy, prefix or thrash."""
    (window,) = windows(read_capture(CAPTURES / name, target=name, notes=[]))
    return window


def without(window: Window, *metrics: Metric) -> Window:
    """The pages as they were if the engine did not expose these."""
    names = {metric.name for metric in metrics}
    return Window(
        tuple(
            replace(
                page,
                values={name: value for name, value in page.values.items() if name not in names},
                histograms={name: value for name, value in page.histograms.items() if name not in names},
            )
            for page in window.snapshots
        )
    )
