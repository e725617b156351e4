"""The straight line through a gauge in a window, by least squares, as PromQL's deriv and predict_linear draw it."""

from dataclasses import dataclass

from kvwatch.errors import NoData
from kvwatch.vllm_metrics import Metric
from kvwatch.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """`now` is the line's value at the latest snapshot."""

    now: float
    per_second: float

    def after(self, seconds: float) -> float:
        """The line's value so many seconds later."""
        return self.now + self.per_second * seconds


def trend(window: Window, metric: Metric) -> Trend:
    """The line through the values of a gauge. Raises NoData if it is not exposed or there are fewer than two values."""
    latest = window.latest.at_seconds
    points = [(s.at_seconds - latest, value) for s in window.snapshots if (value := s.get(metric)) is not None]
    if len(points) < 2:
        raise NoData(f"a trend of {metric.exposed} needs two pages; give --window or a capture folder")
    if all(value == points[0][1] for _, value in points):  # the mean of equal values may be off by a rounding
        return Trend(now=points[0][1], per_second=0.0)
    mean_time = sum(time for time, _ in points) / len(points)
    mean_value = sum(value for _, value in points) / len(points)
    spread = sum((time - mean_time) ** 2 for time, _ in points)
    slope = sum((time - mean_time) * (value - mean_value) for time, value in points) / spread
    return Trend(now=mean_value - slope * mean_time, per_second=slope)
