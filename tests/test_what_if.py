"""The search for settings, on draws of requests that differ."""

import random

import pytest
from grid_cases import GPU, SHAPES, cases

from kvwatch.simulation import CostModel, Request, SchedulerSettings
from kvwatch.what_if import WATERMARKS, Trial, _Search, best_settings


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
    assert found.best.preemptions <= 10


def test_settings_that_are_fast_on_the_first_draw_only_do_not_crowd_out_the_others() -> None:
    """The calmest on the first draw are all too slow on the five; what is calm and fast comes after them."""
    found = best_settings(cases(series=3)[0].reconstructed())
    assert found.now.preemptions > 140
    assert found.best.preemptions < 25


@pytest.mark.parametrize("others", [(), (LONG,), (SHORT,)], ids=["one draw", "a worse one", "a better one"])
def test_what_leaves_the_engine_idle_is_judged_on_one_draw_whatever_the_others_are(
    others: tuple[tuple[Request, ...], ...],
) -> None:
    trial = Trial(
        settings=SchedulerSettings(num_gpu_blocks=1000, block_size=16, max_model_len=8192, max_num_seqs=256),
        cost=GPU,
        draws=(drawn(3, (100, 400)), *others),
        clients=28,
        version=(0, 32, 0),
    )
    caps, watermarks = _Search(trial, "balanced").without_idle(tuple(range(4, 29)), WATERMARKS)
    assert caps == (25, 26, 27, 28)
    assert watermarks == WATERMARKS[:-2]


def heavy_tailed(seed: int) -> tuple[Request, ...]:
    rng = random.Random(seed)
    return tuple(SHAPES["heavy tail"](rng) for _ in range(200))


def test_the_present_settings_are_never_ruled_out_where_the_first_draw_is_the_worse_one() -> None:
    """No watermark in this release, every cap to try is the present one or higher, and preempts on the first draw."""
    trial = Trial(
        settings=SchedulerSettings(num_gpu_blocks=532, block_size=16, max_model_len=8192, max_num_seqs=4),
        cost=GPU,
        draws=(heavy_tailed(0), heavy_tailed(3)),
        clients=40,
        version=(0, 20, 0),
    )
    found = best_settings(trial)
    assert [run.preemptions for run in found.now.runs] == [22, 8]
    assert found.best is found.now
