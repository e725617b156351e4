"""Servers that take turns: one runs, the others are stopped (SIGSTOP), a quarter of a second each.

Two runs one after the other do not see the same machine: on a shared host the same work takes 23 s of CPU in one minute
and 40 s in the next. Runs that take turns do, so that their ratio is that of the servers.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TURN_SECONDS = 0.25
_LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """A group of processes, by the process that leads it, and whether its work is done."""

    group: int
    is_done: Callable[[], bool]


def take_turns(players: Sequence[Player], *, turn_seconds: float = TURN_SECONDS) -> list[float]:
    """Let one player run at a time, the first one first, until all are done. The seconds that each had for its work.

    All run again when this ends, however it ends.
    """
    seconds = [0.0] * len(players)
    waiting = deque(range(len(players)))
    try:
        for player in players:
            os.killpg(player.group, signal.SIGSTOP)
        while waiting:
            number = waiting.popleft()
            os.killpg(players[number].group, signal.SIGCONT)
            seconds[number] += _turn(players[number], turn_seconds)
            os.killpg(players[number].group, signal.SIGSTOP)
            if not players[number].is_done():
                waiting.append(number)
    finally:
        for player in players:
            os.killpg(player.group, signal.SIGCONT)
    return seconds


def _turn(player: Player, turn_seconds: float) -> float:
    started = time.monotonic()
    while time.monotonic() - started < turn_seconds and not player.is_done():
        time.sleep(_LOOK_SECONDS)
    return time.monotonic() - started
