"""vLLM's V1 scheduler as a discrete-event model: same decisions, step for step, without an engine.

SOURCE: vllm/v1/core/sched/scheduler.py (0.32.0), Scheduler.schedule, _preempt_request and update_from_output;
vllm/v1/core/kv_cache_manager.py, KVCacheManager.allocate_slots. Modelled: first come first served, token budget,
chunked prefill, max_num_seqs and max_num_active_seqs, the reservation of blocks for the whole prompt, the watermark,
preemption of the last admitted request, recomputation, the prefix cache, the null block. Not modelled: priorities,
speculative decoding, KV connectors, LoRA limits, multi-modal encoders, asynchronous scheduling.

Why it is fast: requests that decode advance by one token a step, all together (kvwatch/lockstep.py). A stretch of
steps in which nobody is admitted, finishes, is preempted or lacks a block is one addition. Only prefills, preemptions
and the ends of requests cost work.
"""

import heapq
from collections import deque
from collections.abc import Sequence

from kvwatch.arrivals import Arrivals
from kvwatch.blockpool import BlockPool, SharedBlock
from kvwatch.lockstep import Flight, Lockstep
from kvwatch.simulation import CostModel, Request, Retry, SchedulerSettings, StepTrace, Trace
from kvwatch.tally import Tally
from kvwatch.ticks import seconds_of, to_ticks


class Engine:
    """The scheduler's state: who waits, who runs, who of them has prompt left to compute."""

    def __init__(
        self,
        settings: SchedulerSettings,
        cost: CostModel,
        requests: Sequence[Request],
        *,
        clients: int | None,
        retry: Retry | None,
        trace: Trace | None,
    ) -> None:
        groups = settings.kv_groups
        unit = sum(group.is_full for group in groups)
        caching = settings.enable_prefix_caching and unit > 0
        self._settings = settings
        self._block_size = settings.block_size
        self._is_hybrid = len(groups) > 1 or unit == 0
        self._cached_unit = unit if caching else 0
        self._watermark_blocks = int(settings.watermark * settings.num_gpu_blocks)
        self._active_limit = settings.active_seqs_limit
        self._budget = settings.max_num_batched_tokens
        self._pool = BlockPool(
            settings.usable_blocks,
            unit=unit or 1,
            evict_unhashed_first=settings.evict_unhashed_first or not caching,
        )
        self._lockstep = Lockstep(groups)
        self._arrivals = Arrivals(requests, clients=clients, block_size=settings.block_size if caching else None)
        self._waiting: deque[Flight] = deque()
        self._running: dict[Flight, None] = {}  # in the order of admission
        self._partial: list[Flight] = []  # those of them that are not in lockstep, in the same order
        self._admissions = 0
        self._retry = retry
        self._timeout = to_ticks(retry.first_token_timeout_seconds) if retry else 0
        self._deadlines: list[tuple[int, int, int, Flight]] = []  # heap of (time, index, attempt, flight)
        self.now = 0
        self._step_ticks = to_ticks(cost.step_seconds)
        self._token_ticks = to_ticks(cost.per_token_seconds)
        self._kv_token_ticks = to_ticks(cost.per_kv_token_seconds)
        self._trace = trace
        self.tally = Tally(usable_blocks=settings.usable_blocks, span=self._step_ticks)

    def run(self) -> None:
        """Until every request is done or given up."""
        while True:
            if self._deadlines:
                self._give_up_on_late_requests()
            self._receive()
            if not self._running and not self._waiting:
                upcoming = self._arrivals.next_time()
                if upcoming is None:
                    return
                self.now = max(self.now, upcoming)
                continue
            self._advance()

    @property
    def steps(self) -> int:
        return self._lockstep.step

    # ---- arrivals and clients ----------------------------------------------------------------------------------

    def _receive(self) -> None:
        for flight in self._arrivals.due(self.now):
            self._waiting.append(flight)
            if self._retry:
                deadline = flight.attempt_arrival + self._timeout
                heapq.heappush(self._deadlines, (deadline, flight.index, flight.attempts, flight))

    def _next_deadline(self) -> int | None:
        """When the next client gives up. Entries of requests that have a first token, or were resent, are dropped."""
        deadlines = self._deadlines
        while deadlines:
            at, _, attempt, flight = deadlines[0]
            if flight.last_token_at is None and not flight.in_lockstep and flight.attempts == attempt:
                return at
            heapq.heappop(deadlines)
        return None

    def _give_up_on_late_requests(self) -> None:
        while (at := self._next_deadline()) is not None and at <= self.now and self._retry:
            flight = heapq.heappop(self._deadlines)[3]
            if flight in self._running:
                self._release(flight)
            else:
                self._waiting.remove(flight)
            self.tally.timeouts += 1
            flight.attempts += 1
            if flight.attempts <= self._retry.max_attempts:
                self._arrivals.resend(flight, self.now + to_ticks(self._retry.backoff_seconds))
            else:
                self.tally.abandoned += 1
                self._arrivals.ended()

    # ---- one step, or a stretch of equal ones --------------------------------------------------------------------

    def _advance(self) -> None:
        """Schedule a step as vLLM does, carry it out, and repeat it as long as nothing changes."""
        lockstep, pool = self._lockstep, self._pool
        threshold = self._prefill_threshold()
        planned = self._plan(threshold)
        preempted: list[Flight] = []
        if planned is None:
            chunks, preempted, budget = self._schedule_in_order(threshold)
        else:
            chunks, budget = planned
        would_admit = False
        repeatable = not preempted and not self._partial
        if not preempted:  # vLLM admits nobody in a step that preempted
            would_admit = self._admit(chunks, budget, threshold)
            repeatable = repeatable and not chunks
        steps = 1
        if repeatable:
            steps = self._repetitions(would_admit=would_admit)
        free = pool.free
        if self._trace:
            self._emit(self._trace, chunks, preempted, steps)
        if steps > 1:
            pool.take(lockstep.blocks(steps) - lockstep.blocks(1))
        self._carry_out(chunks, steps, free)

    def _prefill_threshold(self) -> int:
        """The most prompt tokens one request may compute in this step; 0 if the budget alone decides."""
        threshold = self._settings.long_prefill_token_threshold
        if not threshold:
            return 0
        eligible = len(self._running) + len(self._waiting)
        if eligible <= 1:
            return 0  # nobody to protect from a long prompt
        if self._settings.long_prefill_token_threshold_adaptive:
            return max(threshold, self._budget // eligible)
        return threshold

    def _plan(self, threshold: int) -> tuple[list[tuple[Flight, int]], int] | None:
        """Schedule the running requests when there are tokens and blocks for all, so that their order is no matter.

        Returns the prefill chunks and the budget left, or None if somebody would get less.
        """
        budget = self._budget - self._lockstep.count
        blocks = self._lockstep.blocks(1)
        chunks: list[tuple[Flight, int]] = []
        for flight in self._partial:
            chunk = flight.tokens - flight.computed
            if 0 < threshold < chunk:
                chunk = threshold
            if chunk > budget:
                if budget <= 0 or flight is not next(reversed(self._running)):
                    return None
                chunk = budget  # the last in the queue gets what the others leave
            budget -= chunk
            blocks += self._growth(flight, flight.computed, chunk)
            chunks.append((flight, chunk))
        if budget < 0 or blocks > self._pool.free:
            return None
        self._pool.take(blocks)
        for flight, chunk in chunks:
            flight.held_blocks += self._growth(flight, flight.computed, chunk)
            self._share_prefix(flight, flight.computed + chunk)
        return chunks, budget

    def _schedule_in_order(self, threshold: int) -> tuple[list[tuple[Flight, int]], list[Flight], int]:
        """Schedule the running requests one by one, preempting from the end of the queue when blocks run out."""
        lockstep, pool = self._lockstep, self._pool
        order = list(self._running)
        budget = self._budget
        chunks: list[tuple[Flight, int]] = []
        preempted: list[Flight] = []
        position = 0
        while position < len(order) and budget > 0:
            flight = order[position]
            computed, chunk = (lockstep.computed(flight), 1) if flight.in_lockstep else (flight.computed, budget)
            if not flight.in_lockstep:
                wanted = flight.tokens - computed
                chunk = min(threshold if 0 < threshold < wanted else wanted, budget)
            blocks = self._growth(flight, computed, chunk)
            while blocks > pool.free and (not preempted or preempted[-1] is not flight):
                preempted.append(order.pop())
                self._preempt(preempted[-1])
            if preempted and preempted[-1] is flight:
                break
            pool.take(blocks)
            if not flight.in_lockstep:
                flight.held_blocks += blocks
                self._share_prefix(flight, computed + chunk)
                chunks.append((flight, chunk))
            budget -= chunk
            position += 1
        held_up = [flight for flight in order[position:] if flight.in_lockstep]
        for flight in held_up:  # no tokens left for it: it gets its next token later than the others
            self._leave_lockstep(flight)
        if held_up:
            self._partial = [flight for flight in self._running if not flight.in_lockstep]
        return chunks, preempted, budget

    def _admit(self, chunks: list[tuple[Flight, int]], budget: int, threshold: int) -> bool:
        """Move requests from waiting to running while seats, tokens and blocks last; their chunks are added.

        Returns whether a request that arrived now could be admitted. What is refused for lack of blocks stays refused
        while the others only decode: each block that they take leaves one less free, and if it was one that could be
        hit, it was the last of its run (a run is freed last block first), so the need grows by no less.
        """
        waiting, running = self._waiting, self._running
        while waiting and len(running) < self._active_limit and budget > 0:
            flight = waiting[0]
            chunk = self._try_admit(flight, budget, threshold)
            if not chunk:
                return False
            waiting.popleft()
            budget -= chunk
            chunks.append((flight, chunk))
        return not waiting and len(running) < self._active_limit and budget > 0

    def _try_admit(self, flight: Flight, budget: int, threshold: int) -> int:
        """Allocate the first chunk of a waiting request and return its tokens: KVCacheManager.allocate_slots.

        Returns 0 if it must wait for blocks.
        """
        pool, unit = self._pool, self._cached_unit
        own = idle = 0
        shared: list[SharedBlock] = []
        if unit:
            limit = (flight.tokens - 1) // self._block_size  # the last token is always computed, for its logits
            if flight.shared_limit:
                shared = pool.shared_hits(flight.prefix, min(flight.shared_limit, limit))
                idle = sum(block.references == 0 for block in shared)
            if len(shared) == flight.shared_limit:
                own = min(pool.own_hits(flight), limit - len(shared))
                idle += own
        hits = len(shared) + own
        computed = hits * self._block_size
        chunk = flight.tokens - computed
        if 0 < threshold < chunk:
            chunk = threshold
        chunk = min(chunk, budget)
        # Hit blocks that nobody holds are free, but leave the free queue when they are claimed.
        available = pool.free - idle * unit - (self._watermark_blocks if self._running else 0)
        held = hits * unit
        if self._settings.scheduler_reserve_full_isl:
            whole = self._settings.admission_blocks(flight.tokens) if self._is_hybrid else self._cdiv(flight.tokens)
            if whole - held > available:
                return 0
        flight.held_blocks = held
        blocks = self._growth(flight, computed, chunk)
        if blocks > available:
            return 0
        if hits:
            pool.claim(owner=flight, own=own, shared=shared)
        pool.take(blocks)
        flight.held_blocks += blocks
        self._seat(flight, computed)
        flight.shared = shared
        self._share_prefix(flight, computed + chunk)
        return chunk

    def _seat(self, flight: Flight, hit_tokens: int) -> None:
        self._admissions += 1
        flight.admission = self._admissions
        flight.computed = flight.phase_start = hit_tokens
        found = hit_tokens - flight.high_water
        if found > 0:
            self.tally.prefix_hit_tokens += found
            flight.high_water = hit_tokens
        if not flight.was_admitted:
            flight.was_admitted = True
            self.tally.queue.append(seconds_of(self.now - flight.arrival))
        self._running[flight] = None
        self._partial.append(flight)

    def _share_prefix(self, flight: Flight, computed: int) -> None:
        """Cache the blocks of the shared prefix that are full once `computed` tokens are."""
        full = min(computed // self._block_size, flight.shared_limit)
        shared = flight.shared
        while len(shared) < full:
            shared.append(self._pool.share(flight.prefix, len(shared)))

    def _repetitions(self, *, would_admit: bool) -> int:
        """How many steps like this one follow each other, this one included."""
        lockstep = self._lockstep
        limit = lockstep.next_event() - lockstep.step
        if limit > 1:
            first = lockstep.blocks(1)
            limit = lockstep.steps_within(self._pool.free + first, limit)
        wake_ups: list[int | None] = []
        # An arrival that must queue anyway needs no step of its own, unless it can give up, or order is at stake.
        if would_admit or self._retry or not self._arrivals.in_file_order:
            wake_ups.append(self._arrivals.next_time())
        if self._retry:
            wake_ups.append(self._next_deadline())
        wake_up = min((at for at in wake_ups if at is not None), default=None)
        if wake_up is None or limit <= 1:
            return max(limit, 1)
        return self._steps_started_before(wake_up, limit)

    def _steps_started_before(self, wake_up: int, limit: int) -> int:
        """The first step always starts; a later one of the stretch only if it starts before `wake_up`."""
        first, increment = self._durations(self._lockstep.count, self._lockstep.held_tokens)
        least, most = 1, limit
        while least < most:
            middle = (least + most + 1) // 2
            before = middle - 1  # steps that are over when the middle one starts
            if self.now + before * first + increment * (before * (before - 1) // 2) < wake_up:
                least = middle
            else:
                most = middle - 1
        return least

    def _durations(self, tokens: int, held_tokens: int) -> tuple[int, int]:
        """Ticks of the first step, and how much longer each further step of pure decoding is."""
        first = self._step_ticks + tokens * self._token_ticks + held_tokens * self._kv_token_ticks
        return first, self._lockstep.count * self._kv_token_ticks

    def _carry_out(self, chunks: list[tuple[Flight, int]], steps: int, free_at_first: int) -> None:
        lockstep, tally = self._lockstep, self.tally
        members = lockstep.count
        tokens, held_tokens = members * steps, lockstep.held_tokens
        for flight, chunk in chunks:
            tokens += chunk
            held_tokens += flight.computed
        first, increment = self._durations(tokens if steps == 1 else members, held_tokens)
        start = self.now
        self.now = end = start + steps * first + increment * (steps * (steps - 1) // 2)
        tally.scheduled_tokens += tokens
        if members:
            tally.itl.add_run(first=seconds_of(first), increment=seconds_of(increment), count=steps, weight=members)
        free = self._pool.free
        tally.least_free = min(tally.least_free, free)
        usable = self._settings.usable_blocks
        tally.timeline.record(start=start, end=end, first=usable - free_at_first, last=usable - free)
        lockstep.advance(steps)
        for flight, chunk in chunks:
            flight.computed += chunk
            if flight.computed == flight.tokens:
                self._emit_token(flight)
        if chunks:
            self._partial = [flight for flight in self._partial if not flight.in_lockstep]
        for flight in lockstep.finished():
            tally.output_tokens += flight.last_tokens + 1 - flight.prompt_tokens
            self._release(flight)
            self._arrivals.ended()

    def _emit_token(self, flight: Flight) -> None:
        """A prefill is complete: the step gave the request a token, and from now on it decodes with the others."""
        if flight.last_token_at is None:
            self.tally.ttft.append(seconds_of(self.now - flight.arrival))
        else:
            self.tally.itl.add(seconds_of(self.now - flight.last_token_at))
        if self._is_hybrid:  # from now on it holds no more than its windows
            self._pool.take(self._settings.blocks(flight.computed) - flight.held_blocks)
        self._lockstep.join(flight)

    # ---- leaving -------------------------------------------------------------------------------------------------

    def _preempt(self, flight: Flight) -> None:
        self._release(flight)
        self._waiting.appendleft(flight)
        self.tally.preemptions += 1

    def _leave_lockstep(self, flight: Flight) -> None:
        self._lockstep.leave(flight)
        flight.last_token_at = self.now
        flight.held_blocks = self._settings.blocks(flight.computed) if self._is_hybrid else self._cdiv(flight.computed)

    def _release(self, flight: Flight) -> None:
        """Take a request off the running queue and free its blocks."""
        if flight.in_lockstep:
            self._leave_lockstep(flight)
        else:
            self._partial.remove(flight)
        del self._running[flight]
        computed, unit = flight.computed, self._cached_unit
        cached = computed // self._block_size if unit else 0
        own = (cached - len(flight.shared)) * unit
        self._pool.give_back(owner=flight, unhashed=flight.held_blocks - cached * unit, own=own, shared=flight.shared)
        flight.shared = []
        self.tally.recomputed_tokens += min(computed, flight.high_water) - flight.phase_start
        flight.high_water = max(computed, flight.high_water)
        flight.computed = 0

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _growth(self, flight: Flight, computed: int, chunk: int) -> int:
        """Blocks that `chunk` more tokens take; fewer than none where a window moves on by more than it takes."""
        if not self._is_hybrid:
            return self._cdiv(computed + chunk) - self._cdiv(computed)
        if flight.in_lockstep:
            return self._settings.blocks(computed + chunk) - self._settings.blocks(computed)
        return self._settings.chunk_blocks(computed, computed + chunk) - flight.held_blocks

    def _cdiv(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _emit(self, trace: Trace, chunks: list[tuple[Flight, int]], preempted: list[Flight], steps: int) -> None:
        """Spell out a stretch step by step."""
        lockstep = self._lockstep
        tokens = {flight: 1 for flight in self._running if flight.in_lockstep}
        tokens.update(chunks)
        scheduled = tuple((flight.index, tokens[flight]) for flight in self._running if flight in tokens)
        first, increment = self._durations(lockstep.count, lockstep.held_tokens)
        needed = lockstep.blocks(1)
        for number in range(steps):
            trace(
                StepTrace(
                    step=lockstep.step + number,
                    start_seconds=seconds_of(self.now + number * first + increment * (number * (number - 1) // 2)),
                    scheduled=scheduled,
                    preempted=tuple(flight.index for flight in preempted),
                    free_blocks=self._pool.free - (lockstep.blocks(number + 1) - needed),
                )
            )
