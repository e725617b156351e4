"""What `make prove` concludes from its runs, and the page that says so."""

from pathlib import Path

import pytest
from proof_page import Prediction, Proof, Round, Run, Work, by_chance, earlier, page, speed_verdict, verdicts

BEFORE, AFTER = {"max_num_seqs": 32, "watermark": 0.0}, {"max_num_seqs": 17, "watermark": 0.05}


def run(settings: dict[str, float], preemptions: int, seconds: float) -> Run:
    return Run(
        settings=settings,
        preemptions=preemptions,
        seconds=seconds,
        output_tokens=76_000,
        itl_mean_seconds=seconds / 3000,
        ttft_p50_seconds=2.5,
        ttft_p99_seconds=8.0,
    )


def proof(after_preemptions: int = 1) -> Proof:
    first = run(BEFORE, 48, 30.0)
    simulation = {
        "cost_error_ratio": 0.04,
        "simulated_preemptions_per_request": 0.6,
        "observed_preemptions_per_request": 0.65,
    }
    return Proof(
        work=Work(
            blocks="256",
            clients=28,
            each=3,
            prompt_tokens=(900, 1500),
            output_tokens=(600, 1200),
            seen_requests=56,
            draws=8,
            turn_seconds=0.25,
        ),
        report={
            "vllm_version": "0.32.0",
            "simulation": simulation,
            "recommendations": [{"setting": "gateway_max_in_flight", "proposed": 16}],
        },
        expected_before=Prediction(
            preemptions=50.1, preemptions_low=46, preemptions_high=55, output_tokens_per_second=2500.0
        ),
        expected_after=Prediction(
            preemptions=0.4, preemptions_low=0, preemptions_high=2, output_tokens_per_second=2450.0
        ),
        first=first,
        equal=Round(before=first, after=run(BEFORE, 52, 30.3)),
        rounds=[Round(before=first, after=run(AFTER, after_preemptions, 30.0 + tenths / 10)) for tenths in range(6)],
    )


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.0, 1.01, 0.99, 1.0, 0.98, 1.1], "met"),
        ([1.0, 1.01, 0.99, 1.0, 0.98, 0.3], "not decided"),
        ([0.9, 0.91, 0.89, 0.9, 0.96, 0.8], "missed"),
        ([1.3, 0.7, 1.1, 0.9, 1.0, 0.8], "not decided"),
        ([5.3, 0.98, 0.98, 0.98, 0.98, 0.98], "met"),
    ],
)
def test_throughput_is_judged_round_by_round(ratios: list[float], verdict: str) -> None:
    assert speed_verdict(ratios)[1] == verdict


@pytest.mark.parametrize(("least", "tosses", "probability"), [(5, 5, 1 / 32), (7, 8, 9 / 256), (0, 6, 1.0)])
def test_chance_is_that_of_tossing_coins(least: int, tosses: int, probability: float) -> None:
    assert by_chance(least, tosses) == probability


def test_preemptions_are_those_of_every_run() -> None:
    assert proof().preemptions_before == (8 * 48 + 52) / 9
    assert proof().preemptions_after == 1.0
    assert [verdict for _, verdict in verdicts(proof())] == ["met"] * 4
    assert [verdict for _, verdict in verdicts(proof(after_preemptions=10))] == ["missed", "met", "met", "missed"]


def test_the_page_shows_prediction_and_measurement() -> None:
    text = page(proof())
    for part in (
        "cap the requests in flight at 16",
        "`--max-num-seqs 17 --watermark 0.05`",
        "| before | 50.1 (46 to 55) | 2,500 |",
        "The throughput after is 98.0% of before.",
        "| round 1 | 48 | 1 | 2,533 | 2,533 | 100.0% |",
        "| round 6 | 48 | 1 | 2,533 | 2,492 | 98.4% |",
        "99.0% where 100 % is right",
        "- **met**: Preemptions after: 0.4 predicted, 1.0 measured; within 30 % or 3 is wanted.",
        "| 100% (100% to 100%) | 100% (100% to 100%) | 101% (100% to 102%) |",
    ):
        assert part in text


def test_what_is_said_of_earlier_runs_is_kept(tmp_path: Path) -> None:
    written = tmp_path / "proof.md"
    assert earlier(written) == ""
    written.write_text("# Proof\n\nfigures\n\n## Runs before this one\n\nThey were worse.\n")
    assert earlier(written) == "\n## Runs before this one\n\nThey were worse.\n"
