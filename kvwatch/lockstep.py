"""Requests that decode advance together: one token each per step.

Seen from the count of steps, such a request stands still: `computed tokens - step` is constant. So the group needs no
per-request work while it advances. What it holds is a sum, the step at which a member needs its next block is a
remainder (kept in a histogram per KV cache group), and its end is a step number.
"""

import heapq

from kvwatch.blockpool import SharedBlock
from kvwatch.simulation import KvGroup, Request


class Flight:
    """One request on its way through the engine.

    While it is in lockstep, `offset` says where it is; otherwise `computed` (tokens whose KV is there), `tokens`
    (prompt and output so far) and `held_blocks` do. Times are ticks.
    """

    __slots__ = (
        "admission",
        "arrival",
        "attempt_arrival",
        "attempts",
        "computed",
        "finish_step",
        "held_blocks",
        "high_water",
        "in_lockstep",
        "index",
        "last_token_at",
        "last_tokens",
        "offset",
        "phase_start",
        "prefix",
        "prompt_tokens",
        "shared",
        "shared_limit",
        "tokens",
        "was_admitted",
    )

    def __init__(self, index: int, request: Request, *, arrival: int, shared_limit: int) -> None:
        self.index = index
        self.arrival = arrival
        self.attempt_arrival = arrival
        self.attempts = 1
        self.prefix = request.prefix or ""
        self.shared_limit = shared_limit  # blocks of tokens that lie whole within the shared prefix
        self.shared: list[SharedBlock] = []  # those of them that it holds
        self.prompt_tokens = request.prompt_tokens
        self.tokens = request.prompt_tokens
        self.last_tokens = request.prompt_tokens + request.output_tokens - 1  # computed tokens when it is finished
        self.computed = 0
        self.offset = 0
        self.in_lockstep = False
        self.finish_step = 0
        self.held_blocks = 0
        self.admission = 0  # place in the running queue: greater is later
        self.was_admitted = False
        self.last_token_at: int | None = None
        self.phase_start = 0  # tokens found in the cache when it was last admitted
        self.high_water = 0  # tokens that were computed or found at least once


class _Boundaries:
    """When the members of the lockstep cross block boundaries, in one KV cache group."""

    __slots__ = ("block_size", "cap_tokens", "crossing", "members")

    def __init__(self, group: KvGroup) -> None:
        self.block_size = group.block_size
        # From so many tokens on, a request needs no further block of this group.
        cap = group.decoding_cap_blocks
        self.cap_tokens = None if cap is None else cap * group.block_size
        self.members = 0
        self.crossing = [0] * group.block_size  # at [step % block_size]: members that need a block in that step

    def blocks(self, step: int, steps: int) -> int:
        """Blocks that the members need in `steps` steps from `step` on."""
        size = self.block_size
        rounds, rest = divmod(steps, size)
        start = step % size
        end = start + rest
        crossing = self.crossing
        if end <= size:
            partial = crossing[start] if rest == 1 else sum(crossing[start:end])
        else:
            partial = sum(crossing[start:]) + sum(crossing[: end - size])
        return rounds * self.members + partial

    def add(self, offset: int, members: int) -> None:
        self.members += members
        self.crossing[-offset % self.block_size] += members


class Lockstep:
    """The decoding requests. `step` counts the steps of the whole engine."""

    __slots__ = ("_boundaries", "_finishes", "_offsets", "_saturations", "count", "step")

    def __init__(self, groups: tuple[KvGroup, ...]) -> None:
        self.step = 0
        self.count = 0
        self._offsets = 0
        self._boundaries = tuple(_Boundaries(group) for group in groups)
        self._finishes: list[tuple[int, int, Flight]] = []  # heap of (step, admission, flight); may hold stale ones
        # heap of (step, admission, number of the boundaries, flight): from that step on it needs none of that group
        self._saturations: list[tuple[int, int, int, Flight]] = []

    @property
    def held_tokens(self) -> int:
        """Computed tokens of all members together."""
        return self._offsets + self.count * self.step

    def computed(self, flight: Flight) -> int:
        return flight.offset + self.step

    def join(self, flight: Flight) -> None:
        """Take in a request that has computed all its tokens and has just been given another one."""
        computed = flight.computed
        flight.offset = offset = computed - self.step
        flight.in_lockstep = True
        flight.finish_step = flight.last_tokens - offset
        self.count += 1
        self._offsets += offset
        for number, boundaries in enumerate(self._boundaries):
            cap = boundaries.cap_tokens
            if cap is None:
                boundaries.add(offset, 1)
            elif computed < cap:
                boundaries.add(offset, 1)
                heapq.heappush(self._saturations, (cap - offset, flight.admission, number, flight))
        heapq.heappush(self._finishes, (flight.finish_step, flight.admission, flight))

    def leave(self, flight: Flight) -> None:
        computed = flight.offset + self.step
        flight.computed = computed
        flight.tokens = computed + 1
        flight.in_lockstep = False
        self.count -= 1
        self._offsets -= flight.offset
        for boundaries in self._boundaries:
            if boundaries.cap_tokens is None or computed < boundaries.cap_tokens:
                boundaries.add(flight.offset, -1)

    def blocks(self, steps: int) -> int:
        """Blocks that the next `steps` steps need."""
        step = self.step
        if len(self._boundaries) == 1:
            return self._boundaries[0].blocks(step, steps)
        return sum(boundaries.blocks(step, steps) for boundaries in self._boundaries)

    def steps_within(self, blocks: int, limit: int) -> int:
        """The largest number of steps, up to `limit`, that needs no more than `blocks`."""
        if self.blocks(limit) <= blocks:
            return limit
        enough, too_many = 0, limit
        while too_many - enough > 1:
            middle = (enough + too_many) // 2
            if self.blocks(middle) <= blocks:
                enough = middle
            else:
                too_many = middle
        return enough

    def next_event(self) -> int:
        """The step at whose end a member finishes, or before which one stops growing in some group; needs a member."""
        finishes = self._finishes
        while not _is_current(finishes[0][2], finishes[0][0]):
            heapq.heappop(finishes)
        return min(finishes[0][0], self._saturations[0][0]) if self._saturations else finishes[0][0]

    def advance(self, steps: int) -> None:
        """Give every member `steps` more tokens; not past the next event."""
        self.step += steps
        saturations = self._saturations
        while saturations and saturations[0][0] <= self.step:
            at_step, _, number, flight = heapq.heappop(saturations)
            cap = self._boundaries[number].cap_tokens
            if flight.in_lockstep and cap is not None and flight.offset == cap - at_step:
                self._boundaries[number].add(flight.offset, -1)

    def finished(self) -> list[Flight]:
        """Members that have all their tokens, in the order of the running queue."""
        finishes = self._finishes
        done: list[Flight] = []
        while finishes and finishes[0][0] <= self.step:
            at_step, _, flight = heapq.heappop(finishes)
            if _is_current(flight, at_step):
                done.append(flight)
        return done


def _is_current(flight: Flight, finish_step: int) -> bool:
    """Whether an entry of the heap still holds: its request was not preempted or held up since."""
    return flight.in_lockstep and flight.finish_step == finish_step
