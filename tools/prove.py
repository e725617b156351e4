#!/usr/bin/env python3
"""A real vLLM thrashes, kvwatch reads its /metrics and names flags, vLLM restarts with them: is it better?

    python tools/prove.py [--rounds 6] [--output docs/proof.md]

The same seeded work every time: 28 clients send 3 requests each, prompts of 900 to 1500 tokens, answers of 600 to 1200,
to a pool of 256 blocks of 128 tokens. The prediction is made from the first run's pages, before the flags are tried.
It needs the vLLM of tools/install_vllm.sh and several minutes in which the machine does nothing else.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

sys.path[:0] = [str(Path(__file__).parent.parent / "tests"), str(Path(__file__).parent.parent)]

from load import Load, Traffic  # noqa: E402 -- the path must be set first
from vllm_server import vllm_server  # noqa: E402

from kvwatch.capacity import EngineFacts  # noqa: E402
from kvwatch.checks.check import engine_view  # noqa: E402
from kvwatch.errors import KvwatchError  # noqa: E402
from kvwatch.simulator import simulate  # noqa: E402
from kvwatch.snapshot import Snapshot  # noqa: E402
from kvwatch.sources import parse  # noqa: E402
from kvwatch.sources.gather import gather  # noqa: E402
from kvwatch.sources.scrape import Scraper  # noqa: E402
from kvwatch.study import trial_of  # noqa: E402
from kvwatch.vllm_metrics import INTER_TOKEN_LATENCY, TIME_TO_FIRST_TOKEN  # noqa: E402
from kvwatch.what_if import with_seqs  # noqa: E402
from kvwatch.window import Window, windows  # noqa: E402
from kvwatch.workload import offered_load  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
CLIENTS, EACH, SEATS = 28, 3, 32
REQUESTS = CLIENTS * EACH
WORK = Traffic(clients=CLIENTS, prompt_tokens=(900, 1500), output_tokens=(600, 1200), requests_per_client=EACH, seed=11)
WARM_UP = Traffic(clients=8, prompt_tokens=(900, 1500), output_tokens=(20, 40), requests_per_client=2, seed=5)
POOL = ("--num-gpu-blocks-override", "256")
BASELINE = {"max_num_seqs": SEATS, "watermark": 0.0}
# The pages that kvwatch sees end before the first clients run out of requests: the load is still on.
SEEN_REQUESTS = REQUESTS - CLIENTS
TARGETS = {"preemptions": 0.80, "throughput": 0.97}
CHANCE = 0.05
FEWEST_ROUNDS = 5  # all of one kind among fewer may be chance
DRAWS = 8
EARLIER = "## Runs before this one"
# The API server and the clients compute as well. Beside as many threads as CPUs they make each step wait for whichever
# thread they interrupted, and equal runs differ by half.
THREADS = int(os.environ.get("OMP_NUM_THREADS") or max(1, (os.cpu_count() or 1) - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the work, measured on the server's own counters."""

    settings: Mapping[str, float]
    preemptions: int
    seconds: float
    output_tokens: int
    itl_mean_seconds: float
    itl_p99_seconds: float
    ttft_p50_seconds: float
    ttft_p99_seconds: float

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is expected of the same work under some settings: mean and extremes over draws of requests."""

    preemptions: float
    preemptions_low: int
    preemptions_high: int
    output_tokens_per_second: float


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=rounds, default=6, help="how often both settings are run, in turn: 5 to 50")
    options.add_argument("--output", type=Path, default=ROOT / "docs" / "proof.md")
    asked = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        baseline = [measure(BASELINE, folder, "baseline")]
        report = recommend(folder / "baseline")
        proposed = {**BASELINE, **flags_of(report)}
        if proposed == BASELINE:
            raise SystemExit(f"kvwatch proposed no flag:\n{json.dumps(report, indent=1)[:4000]}")
        expected = [predict(folder / "baseline", settings) for settings in (BASELINE, proposed)]
        say(f"proposed {proposed}; expected {expected[1]}")
        tuned = [measure(proposed, folder, "tuned")]
        for number in range(1, asked.rounds):
            baseline.append(measure(BASELINE, folder, f"baseline{number}"))
            tuned.append(measure(proposed, folder, f"tuned{number}"))
    text = page(report, proposed, expected, baseline, tuned)
    asked.output.write_text(f"{text}{earlier(asked.output)}", encoding="utf-8")
    say(text)
    return 0 if all(verdict == "met" for _, verdict in verdicts(expected, baseline, tuned)) else 1


# ---- running -------------------------------------------------------------------------------------------------------


def measure(settings: Mapping[str, float], folder: Path, name: str) -> Run:
    """Start vLLM with the settings, let the clients do their work, read its counters, end it."""
    say(f"{name}: vLLM with {command_line(settings)}")
    with vllm_server(folder / f"{name}.log", *POOL, *command_line(settings).split()) as address:
        warm_up = Load(address, WARM_UP)
        warm_up.start()
        warm_up.wait()
        load = Load(address, WORK)
        scraper = Scraper(f"{address}/metrics")
        before = scraper.page().body
        started = time.monotonic()
        load.start()
        with recording(scraper, folder / name, load):
            load.wait()
        seconds = time.monotonic() - started
        after = scraper.page().body if not load.errors else before
    if load.errors or load.answered != REQUESTS:
        log = (folder / f"{name}.log").read_text(errors="replace")[-2000:]
        raise SystemExit(f"{load.answered} of {REQUESTS} requests were answered; errors: {load.errors[:3]}\n{log}")
    window = window_of({0: before, 1: after}, folder / f"{name}-ends")
    run = measured(settings, window, seconds)
    say(f"{name}: {run.preemptions} preemptions, {run.output_tokens_per_second:.0f} output tokens/s")
    return run


def measured(settings: Mapping[str, float], window: Window, seconds: float) -> Run:
    first, last = window.snapshots[0], window.latest
    return Run(
        settings=settings,
        preemptions=int(rise(first, last, "num_preemptions_total")),
        seconds=seconds,
        output_tokens=int(rise(first, last, "generation_tokens_total")),
        itl_mean_seconds=window.average(INTER_TOKEN_LATENCY),
        itl_p99_seconds=window.quantile(INTER_TOKEN_LATENCY, 0.99),
        ttft_p50_seconds=window.quantile(TIME_TO_FIRST_TOKEN, 0.5),
        ttft_p99_seconds=window.quantile(TIME_TO_FIRST_TOKEN, 0.99),
    )


def rise(first: Snapshot, last: Snapshot, name: str) -> float:
    return last.values[name] - first.values[name]


@contextmanager
def recording(scraper: Scraper, folder: Path, load: Load) -> Iterator[None]:
    """Save a page a second while the block runs, until so many requests are answered that clients run out of them."""
    folder.mkdir()
    done = threading.Event()

    def record() -> None:
        while not done.is_set() and load.answered < SEEN_REQUESTS:
            page = scraper.page()
            (folder / f"{int(page.at_seconds * 1000)}.prom").write_bytes(page.body)
            done.wait(1.0)

    thread = threading.Thread(target=record)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def window_of(pages: Mapping[int, bytes], folder: Path) -> Window:
    folder.mkdir()
    for second, body in pages.items():
        (folder / f"{second * 1000:013d}.prom").write_bytes(body)
    return window_in(folder)


def window_in(folder: Path) -> Window:
    return windows(gather((parse(str(folder)),), window_seconds=0, headers={}, progress=quiet).snapshots)[0]


# ---- what kvwatch says ---------------------------------------------------------------------------------------------


def recommend(capture: Path) -> dict[str, Any]:
    """`kvwatch recommend CAPTURE`, as an operator would run it: nothing but the pages is given."""
    command = [sys.executable, "-m", "kvwatch", "recommend", str(capture), "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode not in {0, 1}:
        raise SystemExit(f"kvwatch recommend failed:\n{done.stderr}")
    engine = json.loads(done.stdout)["engines"][0]
    return dict(engine)


def flags_of(report: Mapping[str, Any]) -> dict[str, float]:
    return {item["setting"]: item["proposed"] for item in report["recommendations"] if item["apply"] == "restart"}


def predict(capture: Path, settings: Mapping[str, float]) -> Prediction:
    """So many requests drawn from the load that the pages show, through the simulator under these settings."""
    window = window_in(capture)
    view = engine_view(window, EngineFacts())
    load = offered_load(view)
    trial, _ = trial_of(view, load)
    tried = with_seqs(trial.settings, int(settings["max_num_seqs"]), settings["watermark"])
    runs = [simulate(tried, trial.cost, load.requests(seed, REQUESTS), CLIENTS) for seed in range(DRAWS)]
    counts = [run.preemptions for run in runs]
    return Prediction(
        preemptions=sum(counts) / DRAWS,
        preemptions_low=min(counts),
        preemptions_high=max(counts),
        output_tokens_per_second=sum(r.output_tokens for r in runs) / math.fsum(r.makespan_seconds for r in runs),
    )


# ---- the page ------------------------------------------------------------------------------------------------------


Verdict = Literal["met", "missed", "not decided"]


def verdicts(
    expected: Sequence[Prediction], baseline: Sequence[Run], tuned: Sequence[Run]
) -> tuple[tuple[str, Verdict], ...]:
    """What was wanted, in a sentence each, and whether it came out so."""
    fewer = 1 - fmean([run.preemptions for run in tuned]) / fmean([run.preemptions for run in baseline])
    least = TARGETS["preemptions"]
    found = [
        (f"Preemptions fall by {fewer:.0%}; at least {least:.0%} are wanted.", _met(fewer >= least)),
        speed_verdict([r.output_tokens_per_second for r in baseline], [r.output_tokens_per_second for r in tuned]),
    ]
    for name, prediction, runs in (("before", expected[0], baseline), ("after", expected[1], tuned)):
        seen, said = fmean([run.preemptions for run in runs]), prediction.preemptions
        text = f"Preemptions {name}: {said:.1f} predicted, {seen:.1f} measured; within 30 % or 3 is wanted."
        found.append((text, _met(abs(said - seen) <= max(3.0, 0.3 * seen))))
    return tuple(found)


def speed_verdict(before: Sequence[float], after: Sequence[float]) -> tuple[str, Verdict]:
    """Throughput after against before, round by round: the two runs of a round follow each other on the same machine.

    Met or missed where so many rounds are on one side of what is wanted that chance would do it in less than one of
    twenty (sign test). A machine that stands still for a while may spoil a round by any factor: means do not bear that.
    """
    kept = TARGETS["throughput"]
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    enough = sum(ratio >= kept for ratio in ratios)
    text = (
        f"Output tokens per second: at least {kept:.0%} of before are wanted, and there in {enough} of {len(ratios)} "
        f"rounds; {median(ratios):.1%} in the median, {min(ratios):.1%} to {max(ratios):.1%}."
    )
    if _by_chance(enough, len(ratios)) < CHANCE:
        return text, "met"
    if _by_chance(len(ratios) - enough, len(ratios)) < CHANCE:
        return text, "missed"
    return f"{text} That may be chance.", "not decided"


def _by_chance(least: int, rounds: int) -> float:
    """The probability of at least so many heads among so many tosses."""
    return sum(math.comb(rounds, heads) for heads in range(least, rounds + 1)) / 2.0**rounds


def rounds(text: str) -> int:
    number = int(text)
    if not FEWEST_ROUNDS <= number <= 50:
        raise argparse.ArgumentTypeError(f"{number}: give {FEWEST_ROUNDS} to 50")
    return number


def _met(is_met: bool) -> Verdict:
    return "met" if is_met else "missed"


PAGE = """# Proof: a real vLLM before and after

Written by `make prove`. vLLM {version} computes in {threads} {cpus} CPUs ({machine}); its API server and the clients
have the rest. It serves a tiny random model from a pool of {blocks} blocks of 128 tokens. {clients} clients send {each}
requests each, prompts of {prompts} tokens and answers of {answers}, the same in every run.

## What kvwatch said

`kvwatch recommend` saw the /metrics pages of the first run, up to its {seen}th answer, and nothing else.

- Now: {now}.
- At the next rollout: `{flags}`.
  The engine had been started with `{before}`.
- It simulated {simulated:.2f} preemptions per request under the present settings; {observed:.2f} were seen.
  The cost of a step {cost}.

Its prediction for these {requests} requests, made before the flags were tried: {draws} draws of requests from what the
pages show; mean, lowest and highest.

| | preemptions | output tokens/s |
|---|---|---|
{predicted}

## What was measured

| | flags | preemptions | output tokens/s | between tokens, mean | p99 | TTFT p50 | TTFT p99 |
|---|---|---|---|---|---|---|---|
{rows}

{checked}

{beside}

Runs alternate between the two settings. In a closed loop the preemptions hardly depend on how fast the machine is; the
throughput does, so it is compared within each round.
"""


def page(
    report: Mapping[str, Any],
    proposed: Mapping[str, float],
    expected: Sequence[Prediction],
    baseline: Sequence[Run],
    tuned: Sequence[Run],
) -> str:
    """docs/proof.md."""
    simulation = report["simulation"]
    fitted = simulation["cost_error_ratio"]
    gateway = next((r["proposed"] for r in report["recommendations"] if r["setting"] == "gateway_max_in_flight"), None)
    named = (("before", expected[0], baseline), ("after", expected[1], tuned))
    checks = verdicts(expected, baseline, tuned)
    return PAGE.format(
        version=report["vllm_version"],
        threads=f"{THREADS} thread{'s' * (THREADS > 1)} on",
        cpus=os.cpu_count(),
        machine=platform.machine(),
        blocks=POOL[1],
        clients=CLIENTS,
        each=EACH,
        prompts=" to ".join(map(str, WORK.prompt_tokens)),
        answers=" to ".join(map(str, WORK.output_tokens)),
        seen=SEEN_REQUESTS,
        now=f"cap the requests in flight at {gateway}" if gateway else "nothing",
        flags=command_line(proposed),
        before=command_line(BASELINE),
        simulated=simulation["simulated_preemptions_per_request"],
        observed=simulation["observed_preemptions_per_request"],
        cost="could not be fitted to them" if fitted is None else f"was fitted and misses {fitted:.0%} of the time",
        requests=REQUESTS,
        draws=DRAWS,
        predicted="\n".join(
            f"| {name} | {told.preemptions:.1f} ({told.preemptions_low} to {told.preemptions_high}) "
            f"| {told.output_tokens_per_second:,.0f} |"
            for name, told, _ in named
        ),
        rows="\n".join(
            row(f"{name}, round {n}", run) for name, _, runs in named for n, run in enumerate(runs, start=1)
        ),
        beside=beside(expected, baseline, tuned),
        checked="\n".join(f"- **{verdict}**: {text}" for text, verdict in checks),
    )


def beside(expected: Sequence[Prediction], baseline: Sequence[Run], tuned: Sequence[Run]) -> str:
    """What was not asked for, and what an operator sees all the same."""
    ratio = expected[1].output_tokens_per_second / expected[0].output_tokens_per_second
    p50, p99 = (
        [median([getattr(run, f"ttft_{name}_seconds") for run in runs]) for runs in (baseline, tuned)]
        for name in ("p50", "p99")
    )
    return (
        f"The throughput predicted is {ratio:.1%} of before. Medians of the rounds: TTFT p50 went from {p50[0]:.1f} s "
        f"to\n{p50[1]:.1f} s and p99 from {p99[0]:.1f} s to {p99[1]:.1f} s. Fewer requests run at a time, so more wait "
        "before\ntheir first token, and fewer after it. The cap that works without a restart was not tried."
    )


def earlier(page_before: Path) -> str:
    """What the page says of the runs before the one it shows; it is written by hand, and kept."""
    text = page_before.read_text(encoding="utf-8") if page_before.exists() else ""
    _, heading, rest = text.partition(f"\n{EARLIER}\n")
    return heading + rest


def command_line(settings: Mapping[str, float]) -> str:
    return " ".join(f"--{key.replace('_', '-')} {value:g}" for key, value in settings.items())


def row(name: str, run: Run) -> str:
    flags = ", ".join(f"{key} {value:g}" for key, value in run.settings.items())
    return (
        f"| {name} | {flags} | {run.preemptions} | {run.output_tokens_per_second:,.0f} | "
        f"{run.itl_mean_seconds * 1000:.1f} ms | {run.itl_p99_seconds * 1000:.0f} ms | "
        f"{run.ttft_p50_seconds:.1f} s | {run.ttft_p99_seconds:.1f} s |"
    )


def quiet(_elapsed_seconds: float, _total_seconds: float) -> None:
    """A folder is read at once."""


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KvwatchError as error:
        sys.exit(f"Error: {error}")
