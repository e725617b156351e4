"""The line through a gauge: exact on lines, and the one that PromQL draws."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwatch.errors import NoData
from kvwatch.snapshot import EngineKey, Snapshot
from kvwatch.trend import trend
from kvwatch.vllm_metrics import KV_CACHE_USAGE
from kvwatch.window import Window, window

KEY = EngineKey(target="", model_name="m", engine="0")


def usage(*points: tuple[float, float]) -> Window:
    return window(Snapshot(at_seconds=t, key=KEY, values={KV_CACHE_USAGE.name: value}) for t, value in points)


def test_a_constant_has_no_slope_at_all() -> None:
    line = trend(usage((0, 0.8), (10, 0.8), (25, 0.8)), KV_CACHE_USAGE)
    assert (0.0, 0.8) == (line.per_second, line.now)


@given(st.floats(-1, 1), st.floats(-0.01, 0.01), st.integers(2, 30), st.floats(0, 2e9))
def test_a_straight_line_is_found(now: float, slope: float, count: int, start: float) -> None:
    end = start + 15 * (count - 1)
    line = trend(usage(*((start + 15 * i, now + slope * (start + 15 * i - end)) for i in range(count))), KV_CACHE_USAGE)
    assert math.isclose(now, line.now, abs_tol=1e-6)
    assert math.isclose(slope, line.per_second, abs_tol=1e-6)
    assert math.isclose(now + slope * 600, line.after(600), abs_tol=1e-3)


def test_the_line_is_that_of_least_squares() -> None:
    line = trend(usage((0, 0.0), (10, 0.2), (20, 0.1)), KV_CACHE_USAGE)  # slope 1/200, mean 0.1 at 10 s
    assert math.isclose(0.005, line.per_second)
    assert math.isclose(0.15, line.now)


def test_one_page_has_no_trend() -> None:
    with pytest.raises(NoData, match="two pages"):
        trend(usage((0, 0.5)), KV_CACHE_USAGE)


def test_infinite_values_raise_nothing() -> None:
    assert math.isnan(trend(usage((0, math.inf), (10, -math.inf), (20, 0.5)), KV_CACHE_USAGE).per_second)
