"""When requests reach the engine: at their times, as clients become free, or again after a client gave up.

Times are ticks. Requests become flights only when they arrive, so a long list costs no memory in advance.
"""

import heapq
from collections.abc import Sequence
from itertools import pairwise

from kvwatch.lockstep import Flight
from kvwatch.simulation import Request
from kvwatch.ticks import to_ticks


class Arrivals:
    """The requests of a workload, in the order in which the engine sees them."""

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        clients: int | None,
        block_size: int | None,
    ) -> None:
        """`block_size` is that of the prefix cache; None without one."""
        self._requests = requests
        self._block_size = block_size
        self._resent: list[tuple[int, int, Flight]] = []  # heap of (time, index, flight)
        self._position = 0
        self._closed = clients is not None
        self._free_clients = clients or 0
        self._order: Sequence[int] = range(len(requests))
        self._next_at: int | None = None
        self.in_file_order = True
        if not self._closed:
            times = [request.at_seconds for request in requests]
            if any(later < earlier for earlier, later in pairwise(times)):
                self._order = sorted(self._order, key=times.__getitem__)
                self.in_file_order = False
            self._look_ahead()

    def next_time(self) -> int | None:
        """When the next request arrives by itself; None if none will unless another one ends first."""
        times = [at for at in (self._next_at, self._resent[0][0] if self._resent else None) if at is not None]
        return min(times, default=None)

    def due(self, now: int) -> list[Flight]:
        """The requests that have arrived by `now` and were not handed out yet, in file order."""
        due: list[Flight] = []
        while self._free_clients and self._position < len(self._requests):
            self._free_clients -= 1
            due.append(self._depart(self._position, now))
            self._position += 1
        while self._next_at is not None and self._next_at <= now:
            due.append(self._depart(self._order[self._position], self._next_at))
            self._position += 1
            self._look_ahead()
        while self._resent and self._resent[0][0] <= now:
            at, _, flight = heapq.heappop(self._resent)
            flight.attempt_arrival = at
            due.append(flight)
        if len(due) > 1:
            due.sort(key=_file_order)
        return due

    def ended(self) -> None:
        """A request finished or was given up: a closed loop's client is free for the next one."""
        if self._closed:
            self._free_clients += 1

    def resend(self, flight: Flight, at: int) -> None:
        """The client of `flight` gave up and sends it again."""
        heapq.heappush(self._resent, (at, flight.index, flight))

    def _look_ahead(self) -> None:
        if self._position < len(self._order):
            self._next_at = to_ticks(self._requests[self._order[self._position]].at_seconds)
        else:
            self._next_at = None

    def _depart(self, index: int, at: int) -> Flight:
        request = self._requests[index]
        shared_limit = request.prefix_tokens // self._block_size if self._block_size else 0
        return Flight(index, request, arrival=at, shared_limit=shared_limit)


def _file_order(flight: Flight) -> int:
    return flight.index
