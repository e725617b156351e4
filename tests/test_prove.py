"""What `make prove` concludes from its runs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools.prove import speed_verdict

ONE, TWO = [1000.0, 1200.0, 800.0, 1000.0], [2000.0, 1000.0, 1500.0, 3000.0]


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.0, 1.01, 0.99, 1.0], "met"),
        ([0.9, 0.91, 0.89, 0.9], "missed"),
        ([1.3, 0.7, 1.1, 0.9], "not decided"),
        ([0.97, 0.97, 0.97, 0.97], "met"),
    ],
)
@pytest.mark.parametrize("before", [ONE, TWO], ids=["a steady machine", "a busy one"])
def test_rounds_are_compared_one_by_one(before: list[float], ratios: list[float], verdict: str) -> None:
    after = [old * ratio for old, ratio in zip(before, ratios, strict=True)]
    assert speed_verdict(before, after)[1] == verdict
