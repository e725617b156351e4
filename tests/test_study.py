"""The load that pages show, simulated under the present settings, does what the engine does."""

import pytest
from grid_cases import CASES, GridCase

from kvwatch.what_if import run

# An open loop is as fast as its requests arrive, whatever a step costs.
CLOSED = [case for case in CASES if case.clients is not None]
# The engine's figure includes the end of its work, when fewer and fewer requests run: long with a heavy tail.
OFF_BY = 0.16


@pytest.mark.slow
@pytest.mark.parametrize("case", CLOSED, ids=lambda case: case.name)
def test_the_present_throughput_is_that_of_the_engine(case: GridCase) -> None:
    """Where requests share a prefix, that includes what each of them reads of it."""
    trial = case.reconstructed()
    simulated = run(trial, trial.settings, None, range(len(trial.draws)))
    assert case.play(case.settings).output_tokens_per_second == pytest.approx(
        simulated.output_tokens_per_second, rel=OFF_BY
    )
