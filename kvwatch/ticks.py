"""Simulated time in integers: sums are exact, and no result depends on how steps are grouped."""

from decimal import Decimal

_DIGITS = 21
TICKS_PER_SECOND: int = 10**_DIGITS


def to_ticks(seconds: float) -> int:
    """Ticks of the decimal number that `seconds` prints as: 0.02 is a fiftieth, not the binary float next to it."""
    return int(Decimal(repr(seconds)).scaleb(_DIGITS))


def seconds_of(ticks: int) -> float:
    return ticks / TICKS_PER_SECOND
