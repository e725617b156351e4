"""Reading a page: kvwatch's reader against prometheus_client's parser, in one run."""

import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvwatch.exposition import read_samples
from kvwatch.snapshot import snapshots

PAGE = (Path(__file__).parents[1] / "tests/data/exposition/vllm-0.32.0-all-families.prom").read_text()
MOST_RATIO = 1 / 4


def fastest_seconds(work: Callable[[], object], *, rounds: int = 25) -> float:
    """CPU time of the fastest round: what the work takes where nothing else runs."""
    times = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


def test_a_page_is_read_in_a_quarter_of_the_time_of_the_reference_parser() -> None:
    reference = fastest_seconds(lambda: list(text_string_to_metric_families(PAGE)))
    reader = fastest_seconds(lambda: read_samples(PAGE))
    whole = fastest_seconds(lambda: snapshots(read_samples(PAGE), at_seconds=0.0))
    print(
        f"\n{len(PAGE):,} bytes: prometheus_client {reference * 1e3:.2f} ms, read_samples {reader * 1e3:.2f} ms "
        f"({reader / reference:.0%}), with snapshots {whole * 1e3:.2f} ms ({whole / reference:.0%})"
    )
    assert reader <= MOST_RATIO * reference
    assert whole <= MOST_RATIO * reference
