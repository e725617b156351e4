"""What `make prove` concludes from its runs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools.prove import _by_chance, earlier, speed_verdict

STEADY, BUSY = [1000.0] * 6, [2000.0, 400.0, 1500.0, 3000.0, 2500.0, 385.0]


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
@pytest.mark.parametrize("before", [STEADY, BUSY], ids=["a steady machine", "a busy one"])
def test_rounds_are_compared_one_by_one(before: list[float], ratios: list[float], verdict: str) -> None:
    after = [old * ratio for old, ratio in zip(before, ratios, strict=True)]
    assert speed_verdict(before, after)[1] == verdict


@pytest.mark.parametrize(("least", "tosses", "probability"), [(5, 5, 1 / 32), (7, 8, 9 / 256), (0, 6, 1.0)])
def test_chance_is_that_of_tossing_coins(least: int, tosses: int, probability: float) -> None:
    assert _by_chance(least, tosses) == probability


def test_what_is_said_of_earlier_runs_is_kept(tmp_path: Path) -> None:
    page = tmp_path / "proof.md"
    assert earlier(page) == ""
    page.write_text("# Proof\n\nfigures\n\n## Runs before this one\n\nThey were worse.\n")
    assert earlier(page) == "\n## Runs before this one\n\nThey were worse.\n"
