"""Processes that take turns."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from turns import Player, take_turns

# Writes a number each millisecond or so, for ever.
COUNTER = """
import sys, time
with open(sys.argv[1], "w") as out:
    while True:
        out.write(f"{time.monotonic()}\\n")
        out.flush()
        time.sleep(0.001)
"""


@pytest.fixture
def counters(tmp_path: Path) -> Iterator[list[tuple[int, Path]]]:
    """Two processes that note the time as long as they run: their groups, and where."""
    files = [tmp_path / "0", tmp_path / "1"]
    processes = [subprocess.Popen([sys.executable, "-c", COUNTER, str(file)], start_new_session=True) for file in files]
    while not all(file.exists() and times(file) for file in files):
        time.sleep(0.01)
    try:
        yield [(process.pid, file) for process, file in zip(processes, files, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def times(file: Path) -> list[float]:
    return [float(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def after_seconds(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def test_one_runs_at_a_time_and_its_seconds_are_its_own(counters: list[tuple[int, Path]]) -> None:
    started = time.monotonic()
    seconds = take_turns([Player(group=group, is_done=after_seconds(1.0)) for group, _ in counters], turn_seconds=0.1)
    ended = time.monotonic()
    first, second = ([at for at in times(file) if started < at < ended] for _, file in counters)
    ours = [(at, 0) for at in first] + [(at, 1) for at in second]
    turns = 1 + sum(one[1] != other[1] for one, other in zip(sorted(ours), sorted(ours)[1:], strict=False))
    assert min(len(first), len(second)) > 20
    assert 8 <= turns <= 14  # ten, and one that began before the first stop
    assert 0.9 * (ended - started) <= sum(seconds) <= ended - started


def test_who_is_done_leaves_the_others_all_the_time_and_all_run_in_the_end(counters: list[tuple[int, Path]]) -> None:
    done = [after_seconds(0.3), after_seconds(1.0)]
    seconds = take_turns(
        [Player(group=group, is_done=is_done) for (group, _), is_done in zip(counters, done, strict=True)],
        turn_seconds=0.1,
    )
    assert seconds[1] > 2 * seconds[0] > 0.1
    ended = time.monotonic()
    time.sleep(0.3)
    assert all(times(file)[-1] > ended for _, file in counters)


def test_all_run_again_where_it_fails(counters: list[tuple[int, Path]]) -> None:
    def broken() -> bool:
        raise ConnectionError("the server is gone")

    with pytest.raises(ConnectionError):
        take_turns([Player(group=group, is_done=broken) for group, _ in counters])
    ended = time.monotonic()
    time.sleep(0.3)
    assert all(times(file)[-1] > ended for _, file in counters)
