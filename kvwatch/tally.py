"""What a simulation measures while it runs. Memory grows with requests, not with tokens or steps."""

from array import array

from kvwatch.samples import Samples

_SPANS = 256


class Timeline:
    """The largest number of blocks held in each of at most 256 spans of time; spans double when time runs out."""

    __slots__ = ("peaks", "span")

    def __init__(self, span: int) -> None:
        self.span = max(1, span)
        self.peaks = [0]

    def record(self, *, start: int, end: int, first: int, last: int) -> None:
        """Blocks held rose from `first` at `start` to `last` at `end`, about evenly."""
        while end // self.span >= _SPANS:
            peaks = self.peaks
            self.peaks = [max(peaks[i : i + 2]) for i in range(0, len(peaks), 2)]
            self.span *= 2
        span, peaks = self.span, self.peaks
        from_span, to_span = start // span, end // span
        if len(peaks) <= to_span:
            peaks.extend([0] * (to_span + 1 - len(peaks)))
        if from_span == to_span:
            peaks[to_span] = max(peaks[to_span], last)
            return
        for number in range(from_span, to_span + 1):
            share = min(1.0, ((number + 1) * span - start) / (end - start))
            peaks[number] = max(peaks[number], first + round((last - first) * share))


class Tally:
    """Counters and samples, in seconds."""

    __slots__ = (
        "abandoned",
        "itl",
        "least_free",
        "output_tokens",
        "preemptions",
        "prefix_hit_tokens",
        "queue",
        "recomputed_tokens",
        "scheduled_tokens",
        "timeline",
        "timeouts",
        "ttft",
    )

    def __init__(self, *, usable_blocks: int, span: int) -> None:
        self.itl = Samples()
        self.ttft = array("d")
        self.queue = array("d")
        self.timeline = Timeline(span)
        self.least_free = usable_blocks
        self.preemptions = 0
        self.scheduled_tokens = 0
        self.output_tokens = 0
        self.recomputed_tokens = 0
        self.prefix_hit_tokens = 0
        self.timeouts = 0
        self.abandoned = 0
