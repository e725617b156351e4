#!/usr/bin/env python3
"""A real vLLM thrashes, kvwatch reads its /metrics and names flags, vLLM restarts with them: is it better?

    python tools/prove.py [--rounds 6] [--output docs/proof.md]

The same seeded work every time: 28 clients send 3 requests each, prompts of 900 to 1500 tokens, answers of 600 to 1200,
to a pool of 256 blocks of 128 tokens. The prediction is made from the first run's pages, before the flags are tried.
It needs the vLLM of tools/install_vllm.sh and a quarter of an hour in which the machine does nothing else.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent / "tests"), str(Path(__file__).parent.parent)]

from load import Load, Traffic  # noqa: E402 -- the path must be set first
from proof_page import (  # noqa: E402
    SPEED,
    Prediction,
    Proof,
    Round,
    Run,
    Work,
    command_line,
    earlier,
    page,
    verdicts,
)
from turns import TURN_SECONDS, Player, take_turns  # noqa: E402
from vllm_server import Server, vllm_server  # noqa: E402

from kvwatch.capacity import EngineFacts  # noqa: E402
from kvwatch.checks.check import engine_view  # noqa: E402
from kvwatch.errors import KvwatchError  # noqa: E402
from kvwatch.simulator import simulate  # noqa: E402
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
TRAFFIC = Traffic(
    clients=CLIENTS, prompt_tokens=(900, 1500), output_tokens=(600, 1200), requests_per_client=EACH, seed=11
)
WARM_UP = Traffic(clients=8, prompt_tokens=(900, 1500), output_tokens=(20, 40), requests_per_client=2, seed=5)
POOL = ("--num-gpu-blocks-override", "256")
BASELINE = {"max_num_seqs": SEATS, "watermark": 0.0}
# The pages that kvwatch sees end before the first clients run out of requests: the load is still on.
SEEN_REQUESTS = REQUESTS - CLIENTS
FEWEST_ROUNDS = 5  # all of one kind among fewer may be chance
DRAWS = 8
WORK = Work(
    blocks=POOL[1],
    clients=CLIENTS,
    each=EACH,
    prompt_tokens=TRAFFIC.prompt_tokens,
    output_tokens=TRAFFIC.output_tokens,
    seen_requests=SEEN_REQUESTS,
    draws=DRAWS,
    turn_seconds=TURN_SECONDS,
)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=rounds, default=6, help="how often both settings are compared: 5 to 50")
    options.add_argument("--output", type=Path, default=ROOT / "docs" / "proof.md")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        proof = prove(asked.rounds, Path(scratch))
    text = page(proof)
    asked.output.write_text(f"{text}{earlier(asked.output)}", encoding="utf-8")
    say(text)
    return 0 if all(verdict == "met" for _, verdict in verdicts(proof)) else 1


def prove(number_of_rounds: int, folder: Path) -> Proof:
    first = alone(BASELINE, folder, "first")
    report = recommend(folder / "first")
    proposed = {**BASELINE, **flags_of(report)}
    if proposed == BASELINE:
        raise SystemExit(f"kvwatch proposed no flag:\n{json.dumps(report, indent=1)[:4000]}")
    expected = [predict(folder / "first", settings) for settings in (BASELINE, proposed)]
    say(f"proposed {proposed}; expected {expected[1]}")
    return Proof(
        work=WORK,
        report=report,
        expected_before=expected[0],
        expected_after=expected[1],
        first=first,
        equal=compared(BASELINE, BASELINE, folder, "equal"),
        rounds=[
            compared(BASELINE, proposed, folder, f"round{number}", is_after_first=number % 2 == 0)
            for number in range(1, number_of_rounds + 1)
        ],
    )


# ---- running -------------------------------------------------------------------------------------------------------


def alone(settings: Mapping[str, float], folder: Path, name: str) -> Run:
    """Start vLLM with the settings, let the clients do their work, save its pages, end it."""
    say(f"{name}: vLLM with {command_line(settings)}")
    log = folder / f"{name}.log"
    with vllm_server(log, *POOL, *command_line(settings).split()) as server:
        warm_up(server)
        counters = Counters(server, folder / f"{name}-ends")
        load = Load(server.address, TRAFFIC)
        started = time.monotonic()
        load.start()
        with recording(counters.scraper, folder / name, load):
            load.wait()
        seconds = time.monotonic() - started
        check(load, log)
        window = counters.window()
    run = measured(settings, window, seconds)
    say(f"{name}: {run.preemptions} preemptions, {run.output_tokens_per_second:.0f} output tokens/s")
    return run


def compared(
    before: Mapping[str, float], after: Mapping[str, float], folder: Path, name: str, *, is_after_first: bool = False
) -> Round:
    """The same work on two servers that take turns."""
    say(f"{name}: {command_line(before)} beside {command_line(after)}")
    logs = [folder / f"{name}-{which}.log" for which in ("before", "after")]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(vllm_server(log, *POOL, *command_line(settings).split()))
            for log, settings in zip(logs, (before, after), strict=True)
        ]
        for server in servers:
            warm_up(server)
        counters = [Counters(server, folder / f"{name}-{which}") for server, which in zip(servers, "ab", strict=True)]
        loads = [Load(server.address, TRAFFIC) for server in servers]
        for load in loads:
            load.start()
        players = [
            Player(group=server.group, is_done=load.is_done) for server, load in zip(servers, loads, strict=True)
        ]
        seconds = take_turns(players[::-1])[::-1] if is_after_first else take_turns(players)
        for load, log in zip(loads, logs, strict=True):
            check(load, log)
        runs = [
            measured(settings, one.window(), spent)
            for settings, one, spent in zip((before, after), counters, seconds, strict=True)
        ]
    found = Round(before=runs[0], after=runs[1])
    say(f"{name}: {runs[0].preemptions} and {runs[1].preemptions} preemptions, {found.ratio(SPEED):.1%}")
    return found


class Counters:
    """A server's page before the work, and after it."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.scraper = Scraper(f"{server.address}/metrics")
        self._folder = folder
        self._before = self.scraper.page().body

    def window(self) -> Window:
        """Between the two."""
        self._folder.mkdir()
        for second, body in enumerate((self._before, self.scraper.page().body)):
            (self._folder / f"{second * 1000:013d}.prom").write_bytes(body)
        return window_in(self._folder)


def warm_up(server: Server) -> None:
    load = Load(server.address, WARM_UP)
    load.start()
    load.wait()


def check(load: Load, log: Path) -> None:
    if load.errors or load.answered != REQUESTS:
        tail = log.read_text(errors="replace")[-2000:]
        raise SystemExit(f"{load.answered} of {REQUESTS} requests were answered; errors: {load.errors[:3]}\n{tail}")


def measured(settings: Mapping[str, float], window: Window, seconds: float) -> Run:
    first, last = window.snapshots[0].values, window.latest.values

    def rise(name: str) -> int:
        return int(last[name] - first[name])

    return Run(
        settings=settings,
        preemptions=rise("num_preemptions_total"),
        seconds=seconds,
        output_tokens=rise("generation_tokens_total"),
        itl_mean_seconds=window.average(INTER_TOKEN_LATENCY),
        ttft_p50_seconds=window.quantile(TIME_TO_FIRST_TOKEN, 0.5),
        ttft_p99_seconds=window.quantile(TIME_TO_FIRST_TOKEN, 0.99),
    )


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


# ---- the command line ----------------------------------------------------------------------------------------------


def rounds(text: str) -> int:
    number = int(text)
    if not FEWEST_ROUNDS <= number <= 50:
        raise argparse.ArgumentTypeError(f"{number}: give {FEWEST_ROUNDS} to 50")
    return number


def quiet(_elapsed_seconds: float, _total_seconds: float) -> None:
    """A folder is read at once."""


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KvwatchError as error:
        sys.exit(f"Error: {error}")
