"""docs/proof.md: what was wanted of a real vLLM before and after, what came out, and the page that says so."""

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

TARGETS = {"preemptions": 0.80, "throughput": 0.97}
CHANCE = 0.05
SPEED = "output_tokens_per_second"
EARLIER = "## Runs before this one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of the work, measured on the server's own metrics.

    `seconds` are those in which it might compute; its latencies also hold those in which it was stopped.
    """

    settings: Mapping[str, float]
    preemptions: int
    seconds: float
    output_tokens: int
    itl_mean_seconds: float
    ttft_p50_seconds: float
    ttft_p99_seconds: float

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Two runs of the same work that took turns."""

    before: Run
    after: Run

    def ratio(self, name: str) -> float:
        """What an attribute is after, of before."""
        after, before = float(getattr(self.after, name)), float(getattr(self.before, name))
        return after / before


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is expected of the same work under some settings: mean and extremes over draws of requests."""

    preemptions: float
    preemptions_low: int
    preemptions_high: int
    output_tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the page says of the server and the load."""

    blocks: str
    clients: int
    each: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    seen_requests: int
    draws: int
    turn_seconds: float

    @property
    def requests(self) -> int:
        return self.clients * self.each


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """All that was said and measured. `first`: the run that kvwatch saw. `equal`: a round of its settings twice."""

    work: Work
    report: Mapping[str, Any]
    expected_before: Prediction
    expected_after: Prediction
    first: Run
    equal: Round
    rounds: Sequence[Round]

    @property
    def preemptions_before(self) -> float:
        runs = [self.first, self.equal.before, self.equal.after, *(one.before for one in self.rounds)]
        return fmean(run.preemptions for run in runs)

    @property
    def preemptions_after(self) -> float:
        return fmean(one.after.preemptions for one in self.rounds)


Verdict = Literal["met", "missed", "not decided"]


def verdicts(proof: Proof) -> tuple[tuple[str, Verdict], ...]:
    """What was wanted, in a sentence each, and whether it came out so."""
    fewer = 1 - proof.preemptions_after / proof.preemptions_before
    least = TARGETS["preemptions"]
    found = [
        (f"Preemptions fall by {fewer:.0%}; at least {least:.0%} are wanted.", _met(fewer >= least)),
        speed_verdict([one.ratio(SPEED) for one in proof.rounds]),
    ]
    for name, prediction, seen in (
        ("before", proof.expected_before, proof.preemptions_before),
        ("after", proof.expected_after, proof.preemptions_after),
    ):
        said = prediction.preemptions
        text = f"Preemptions {name}: {said:.1f} predicted, {seen:.1f} measured; within 30 % or 3 is wanted."
        found.append((text, _met(abs(said - seen) <= max(3.0, 0.3 * seen))))
    return tuple(found)


def speed_verdict(ratios: Sequence[float]) -> tuple[str, Verdict]:
    """Throughput after, of before, round by round.

    Met or missed where so many rounds are on one side of what is wanted that chance would do it in less than one of
    twenty (sign test), whatever a machine that stands still for a while does to one of them.
    """
    kept = TARGETS["throughput"]
    enough = sum(ratio >= kept for ratio in ratios)
    text = (
        f"Output tokens per second: at least {kept:.0%} of before are wanted, and there in {enough} of {len(ratios)} "
        f"rounds; {median(ratios):.1%} in the median, {min(ratios):.1%} to {max(ratios):.1%}."
    )
    if by_chance(enough, len(ratios)) < CHANCE:
        return text, "met"
    if by_chance(len(ratios) - enough, len(ratios)) < CHANCE:
        return text, "missed"
    return f"{text} That may be chance.", "not decided"


def by_chance(least: int, rounds: int) -> float:
    """The probability of at least so many heads among so many tosses."""
    return sum(math.comb(rounds, heads) for heads in range(least, rounds + 1)) / 2.0**rounds


def _met(is_met: bool) -> Verdict:
    return "met" if is_met else "missed"


PAGE = """# Proof: a real vLLM before and after

Written by `make prove` on {cpus} CPUs ({machine}). vLLM {version} serves a tiny random model from a pool of {blocks}
blocks of 128 tokens. It computes in one thread, in the engine's process; its API server and the clients have the other
CPUs. {clients} clients send {each} requests each, prompts of {prompts} tokens and answers of {answers}, the same in
every run.

## What kvwatch said

`kvwatch recommend` saw the /metrics pages of the first run, up to its {seen}th answer, and nothing else.

- Now: {now}.
- At the next rollout: `{flags}`.
  The engine had been started with `{before}`.
- It simulated {simulated:.2f} preemptions per request under the present settings; {observed:.2f} were seen.
  The cost of a step {cost}.

Its prediction for these {requests} requests, made before the flags were tried: {draws} draws of requests from what the
pages show; mean, lowest and highest. The throughput after is {ratio:.1%} of before.

| | preemptions | output tokens/s |
|---|---|---|
{predicted}

## What was measured

{checked}

In each round two servers, started afresh with one setting each, get the same work at the same time and take turns of
{turn:g} s: one runs, the other is stopped. Their seconds are those of their turns. Runs one after the other do not
compare: on a shared machine the same work takes half as long again a minute later. A round in which both servers had
the first settings says what the comparison itself is off by: {equal}.

| | preemptions before | after | output tokens/s before | after | after, of before |
|---|---|---|---|---|---|
{rounds}

Latencies, after, of before: the median of the rounds, the lowest and the highest. Fewer requests run at a time, so each
of them is faster, and more of them wait before their first token.

| TTFT p50 | TTFT p99 | between tokens, mean |
|---|---|---|
| {latencies} |

The tokens per second that were predicted are those of the first run's half minute; the prediction that counts is how
they change. The cap of the requests in flight, which works without a restart, was not tried.
"""


def page(proof: Proof) -> str:
    """The page, up to what is said of earlier runs."""
    work, report = proof.work, proof.report
    simulation = report["simulation"]
    fitted = simulation["cost_error_ratio"]
    gateway = next((r["proposed"] for r in report["recommendations"] if r["setting"] == "gateway_max_in_flight"), None)
    expected = (("before", proof.expected_before), ("after", proof.expected_after))
    return PAGE.format(
        version=report["vllm_version"],
        cpus=os.cpu_count(),
        machine=platform.machine(),
        blocks=work.blocks,
        clients=work.clients,
        each=work.each,
        prompts=" to ".join(map(str, work.prompt_tokens)),
        answers=" to ".join(map(str, work.output_tokens)),
        seen=work.seen_requests,
        now=f"cap the requests in flight at {gateway}" if gateway else "nothing",
        flags=command_line(proof.rounds[0].after.settings),
        before=command_line(proof.first.settings),
        simulated=simulation["simulated_preemptions_per_request"],
        observed=simulation["observed_preemptions_per_request"],
        cost="could not be fitted to them" if fitted is None else f"was fitted and misses {fitted:.0%} of the time",
        requests=work.requests,
        draws=work.draws,
        ratio=proof.expected_after.output_tokens_per_second / proof.expected_before.output_tokens_per_second,
        predicted="\n".join(
            f"| {name} | {told.preemptions:.1f} ({told.preemptions_low} to {told.preemptions_high}) "
            f"| {told.output_tokens_per_second:,.0f} |"
            for name, told in expected
        ),
        checked="\n".join(f"- **{verdict}**: {text}" for text, verdict in verdicts(proof)),
        turn=work.turn_seconds,
        equal=f"{proof.equal.ratio(SPEED):.1%} where 100 % is right",
        rounds="\n".join(_round_row(number, one) for number, one in enumerate(proof.rounds, start=1)),
        latencies=" | ".join(
            _spread([one.ratio(name) for one in proof.rounds])
            for name in ("ttft_p50_seconds", "ttft_p99_seconds", "itl_mean_seconds")
        ),
    )


def _round_row(number: int, one: Round) -> str:
    return (
        f"| round {number} | {one.before.preemptions} | {one.after.preemptions} "
        f"| {one.before.output_tokens_per_second:,.0f} | {one.after.output_tokens_per_second:,.0f} "
        f"| {one.ratio(SPEED):.1%} |"
    )


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.0%} ({min(values):.0%} to {max(values):.0%})"


def earlier(page_before: Path) -> str:
    """What the page says of the runs before the one it shows; it is written by hand, and kept."""
    text = page_before.read_text(encoding="utf-8") if page_before.exists() else ""
    _, heading, rest = text.partition(f"\n{EARLIER}\n")
    return heading + rest


def command_line(settings: Mapping[str, float]) -> str:
    return " ".join(f"--{key.replace('_', '-')} {value:g}" for key, value in settings.items())
