"""Recorded engines for the pictures: captures of a real vLLM, played one after another as one server."""

import math
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from kvwatch.demo import Recording, continued, growth_between
from kvwatch.exposition import read_samples
from kvwatch.vllm_metrics import PREEMPTIONS

CAPTURES = Path(__file__).resolve().parent.parent.parent / "tests/data/captures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A capture, repeated for so long. Counters go on where the part before had them, unless the engine restarts: then
    it is down for `down_seconds`, and begins anew.
    """

    capture: str
    seconds: float = math.inf
    down_seconds: float = 0.0


class Played:
    """What an engine shows, by the seconds since its start; None while it is down."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)
        self._starts = tuple(sum(part.seconds for part in parts[:place]) for place in range(len(parts)))
        self._shifts: list[dict[bytes, Fraction]] = []
        for place, part in enumerate(parts):
            self._shifts.append({} if place == 0 or part.down_seconds else self._shift(place))

    def page(self, elapsed_seconds: float) -> bytes | None:
        place = bisect_right(self._starts, elapsed_seconds) - 1
        part, inside = self._parts[place], elapsed_seconds - self._starts[place]
        return None if inside < part.down_seconds else self._shown(place, inside - part.down_seconds)

    def _shift(self, place: int) -> dict[bytes, Fraction]:
        """What counters of this part lack to where the part before ends."""
        before = self._parts[place - 1]
        ended = self._shown(place - 1, before.seconds - before.down_seconds)
        return growth_between(recording(self._parts[place].capture).pages[0], ended)

    def _shown(self, place: int, inside_seconds: float) -> bytes:
        page = recording(self._parts[place].capture).page(inside_seconds)
        return continued(page, self._shifts[place], 1)


@cache
def recording(capture: str) -> Recording:
    """A folder of captures; what is repeated is the part with preemptions, or all of it where there are none."""
    files = sorted((CAPTURES / capture).glob("*.prom"))
    pages = tuple(file.read_bytes() for file in files)
    counted = [preemptions(page) for page in pages]
    repeat_from = next((place for place, count in enumerate(counted) if count > counted[0]), 0)
    return Recording(
        offsets_seconds=tuple((int(file.stem) - int(files[0].stem)) / 1000 for file in files),
        pages=pages,
        repeat_from=repeat_from,
        growth=growth_between(pages[repeat_from], pages[-1]),
        answers={},
    )


def preemptions(page: bytes) -> float:
    return sum(sample.value for sample in read_samples(page.decode()) if sample.name == PREEMPTIONS.exposed)


def server(played: Played) -> type[BaseHTTPRequestHandler]:
    """A handler that shows an engine from the moment of its first scrape on, and answers 503 while it is down."""
    started: list[float] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            started[:] = started or [time.monotonic()]
            page = played.page(time.monotonic() - started[0])
            self.send_response(503 if page is None else 200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(page or b"")

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler
