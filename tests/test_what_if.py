"""The search for settings, on draws of requests that differ."""

import random

import pytest

from kvwatch.simulation import CostModel, Request, SchedulerSettings
from kvwatch.what_if import Trial, best_settings


def drawn(seed: int, output_tokens: tuple[int, int]) -> tuple[Request, ...]:
    rng = random.Random(seed)
    return tuple(
        Request(prompt_tokens=rng.randint(200, 600), output_tokens=rng.randint(*output_tokens)) for _ in range(200)
    )


LONG, SHORT = drawn(1, (300, 900)), drawn(2, (20, 40))


@pytest.mark.parametrize("draws", [(LONG, SHORT), (SHORT, LONG)], ids=["long first", "short first"])
def test_a_draw_that_is_faster_under_any_settings_hides_none_that_are_calm(
    draws: tuple[tuple[Request, ...], ...],
) -> None:
    trial = Trial(
        settings=SchedulerSettings(num_gpu_blocks=1000, block_size=16, max_model_len=8192, max_num_seqs=256),
        # Prompts cost nearly all, so short answers are few tokens per second.
        cost=CostModel(step_seconds=0.02, per_token_seconds=2e-3),
        draws=draws,
        clients=28,
        version=(0, 32, 0),
    )
    found = best_settings(trial)
    assert found.now.preemptions == 109
    assert found.best.preemptions <= 6
