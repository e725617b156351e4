#!/usr/bin/env python3
"""Prove it on a real engine: thrash, ask kvwatch, do what it says, measure again. Writes docs/proof.md.

usage: make prove        about 8 minutes on two cores; needs the vLLM of tools/install_vllm.sh

Every run serves the same requests with a real vLLM on the CPU. The first runs with the settings as found; kvwatch looks
on and recommends. Each further run changes exactly what one recommendation says.
"""

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from load import Load, Traffic
from parts import eventually
from vllm_server import vllm_server

from kvwatch.exposition import decode, read_samples
from kvwatch.snapshot import Snapshot, snapshots
from kvwatch.sources.scrape import Scraper
from kvwatch.vllm_metrics import GENERATION_TOKENS, INTER_TOKEN_LATENCY, PREEMPTIONS, TIME_TO_FIRST_TOKEN
from kvwatch.window import Window

OUTPUT = Path(__file__).parent.parent / "docs" / "proof.md"
POOL = ("--num-gpu-blocks-override", "256")
AS_FOUND = ("--max-num-seqs", "32")
OLDER_VLLM = "0.20.0"  # has no --watermark, so kvwatch recommends --max-num-seqs
TRAFFIC = Traffic(clients=28, prompt_tokens=(900, 1500), output_tokens=(600, 1200), requests_per_client=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the traffic, measured at the engine (deltas of its counters) and at the clients."""

    name: str
    preemptions: int
    output_tokens_per_second: float
    token_gap_mean_seconds: float
    first_token_p95_seconds: float
    response_p50_seconds: float
    response_p95_seconds: float
    took_seconds: float

    def row(self) -> str:
        return (
            f"| {self.name} | {self.preemptions} | {self.output_tokens_per_second:,.0f} | "
            f"{1000 * self.token_gap_mean_seconds:.1f} ms | {self.first_token_p95_seconds:.1f} s | "
            f"{self.response_p50_seconds:.1f} s | {self.response_p95_seconds:.1f} s | {self.took_seconds:.0f} s |"
        )


def page(address: str) -> Snapshot:
    scraper = Scraper(f"{address}/metrics")
    try:
        fetched = scraper.page()
    finally:
        scraper.close()
    [snapshot] = snapshots(read_samples(decode(fetched.body)), at_seconds=fetched.at_seconds, target=address)
    return snapshot


def measure(name: str, address: str, load: Load, before: Snapshot, started: float) -> Run:
    """Wait for the traffic to end and read what it did."""
    load.wait()
    took = time.monotonic() - started
    load.stop()
    if load.errors:
        sys.exit(f"{name}: {load.errors[0]}")
    seen = Window((before, page(address)))
    cuts = statistics.quantiles(load.response_seconds, n=20)
    run = Run(
        name=name,
        preemptions=round(seen.increase(PREEMPTIONS)),
        output_tokens_per_second=seen.increase(GENERATION_TOKENS) / took,
        token_gap_mean_seconds=seen.average(INTER_TOKEN_LATENCY),
        first_token_p95_seconds=seen.quantile(TIME_TO_FIRST_TOKEN, 0.95),
        response_p50_seconds=statistics.median(load.response_seconds),
        response_p95_seconds=cuts[-1],
        took_seconds=took,
    )
    print(run.row(), file=sys.stderr)
    return run


def play(name: str, address: str, traffic: Traffic) -> Run:
    before, started = page(address), time.monotonic()
    load = Load(address, traffic)
    load.start()
    return measure(name, address, load, before, started)


def recommend(address: str, *flags: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "kvwatch", "recommend", address, "--window", "20s", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def answer(process: "subprocess.Popen[str]") -> str:
    out, _ = process.communicate(timeout=120)
    if process.returncode != 1:
        sys.exit(f"kvwatch recommend ended with status {process.returncode}, not 1: the engine is not thrashing")
    return out


def as_found(address: str) -> tuple[Run, str, list[list[dict[str, Any]]]]:
    """The first run; what kvwatch says while it goes on, as text and as recommendations: for this vLLM, for an older."""
    before, started = page(address), time.monotonic()
    load = Load(address, TRAFFIC)
    load.start()
    eventually(lambda: Window((before, page(address))).increase(PREEMPTIONS) >= 5, within_seconds=90)
    text, *documents = [
        recommend(address, *flags)
        for flags in ((), ("--output", "json"), ("--output", "json", "--vllm-version", OLDER_VLLM))
    ]
    said = answer(text)
    changes = [json.loads(answer(document))["engines"][0]["recommendations"] for document in documents]
    return measure("as found: " + " ".join(AS_FOUND), address, load, before, started), said, changes


def warm(address: str) -> None:
    """The first requests of a server are slow: they compile."""
    play("warm-up", address, replace(TRAFFIC, clients=4, requests_per_client=1, output_tokens=(20, 40)))


def prove(folder: Path) -> tuple[list[Run], str]:
    with vllm_server(folder / "as-found.log", *POOL, *AS_FOUND) as address:
        warm(address)
        first, said, changes = as_found(address)
        runs = [first]
        for change in changes[0]:
            if change["setting"] == "gateway_max_in_flight":
                cap = int(change["proposed"])
                capped = replace(TRAFFIC, gateway_max_in_flight=cap)
                runs.append(play(f"now: at most {cap} in flight", address, capped))
    for recommended in changes:
        flags = " ".join(change["flag"] for change in recommended if change["apply"] == "restart" and change["flag"])
        with vllm_server(folder / "rollout.log", *POOL, *AS_FOUND, *flags.split()) as address:
            warm(address)
            runs.append(play(f"rollout: {flags}", address, TRAFFIC))
    return runs, said


def document(runs: Iterable[Run], said: str) -> str:
    runs = list(runs)
    rows = "\n".join(run.row() for run in runs)
    requests = TRAFFIC.clients * (TRAFFIC.requests_per_client or 0)
    return f"""# Proof on a real engine

Written by `make prove`; run it to get your own.

A real vLLM serves a tiny model on the CPU ({platform.machine()}, 2 threads) from a pool of 256 blocks of 128 tokens.
{TRAFFIC.clients} clients send {requests} requests, each the next one when the last is answered: prompts of
{TRAFFIC.prompt_tokens[0]} to {TRAFFIC.prompt_tokens[1]} tokens, answers of {TRAFFIC.output_tokens[0]} to
{TRAFFIC.output_tokens[1]} tokens, the same in every row. The first row is the engine as found. Each other row does what
one recommendation says, and nothing else; the last is the recommendation for a vLLM that has no `--watermark` yet.

| setting | preemptions | output tokens/s | gap between tokens | first token p95 | response p50 | p95 | all done |
|---|---|---|---|---|---|---|---|
{rows}

First token and gap are the engine's own histograms; responses are measured by the clients and include the wait for a
turn at the gateway.

## What kvwatch said during the first row

```
$ kvwatch recommend http://vllm:8000 --window 20s
{said.rstrip()}
```
"""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kvwatch-prove-") as folder:
        runs, said = prove(Path(folder))
    said = "\n".join(line.replace("127.0.0.1", "vllm") for line in said.splitlines())
    OUTPUT.write_text(document(runs, said), encoding="utf-8")
    print(f"written: {OUTPUT}", file=sys.stderr)


if __name__ == "__main__":
    main()
