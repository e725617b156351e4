"""Reading a page: kvwatch's reader against prometheus_client's parser, in one run."""

import math
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvwatch.exposition import read_samples
from kvwatch.snapshot import snapshots

PAGE = (Path(__file__).parents[1] / "tests/data/exposition/vllm-0.32.0-all-families.prom").read_text()
MOST_RATIO = 1 / 4


def fastest_seconds(*works: Callable[[], object], rounds: int = 40) -> list[float]:
    """CPU time of the fastest round of each: what it takes where nothing else runs.

    They take turns, so that a machine that is slow for a while is slow for all of them.
    """
    fastest = [math.inf] * len(works)
    for _ in range(rounds):
        for number, work in enumerate(works):
            started = time.process_time()
            work()
            fastest[number] = min(fastest[number], time.process_time() - started)
    return fastest


def test_a_page_is_read_in_a_quarter_of_the_time_of_the_reference_parser() -> None:
    reference, reader, whole = fastest_seconds(
        lambda: list(text_string_to_metric_families(PAGE)),
        lambda: read_samples(PAGE),
        lambda: snapshots(read_samples(PAGE), at_seconds=0.0),
    )
    print(
        f"\n{len(PAGE):,} bytes: prometheus_client {reference * 1e3:.2f} ms, read_samples {reader * 1e3:.2f} ms "
        f"({reader / reference:.0%}), with snapshots {whole * 1e3:.2f} ms ({whole / reference:.0%})"
    )
    assert reader <= MOST_RATIO * reference
    assert whole <= MOST_RATIO * reference
