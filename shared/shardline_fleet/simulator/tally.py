"""What a simulation counts: tokens by second, the latencies of jobs that ended, and how long faults
held jobs up."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from shardline_fleet.simulator.simulated_job import SimulatedJob


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles of something, in seconds."""

    p50: float
    p99: float
    worst: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Takes them by nearest rank; NaN of nothing."""
        found = sorted(seconds) or [math.nan]
        return cls(p50=_rank(found, 0.5), p99=_rank(found, 0.99), worst=found[-1])


class Tally:
    """Counts one simulation, as its jobs end."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = defaultdict(int)
        """Output tokens by second, each counted once."""
        self.num_again = 0
        """Tokens that were computed once more, since a head died before it had saved them."""
        self.ttft_s: list[float] = []
        self.token_s: list[float] = []
        self.request_s: list[float] = []
        self.gaps_s: list[float] = []
        """Of jobs that a fault held up: until the next token."""
        self.num_ended = self.num_failed = 0
        self.ended_s = 0.0
        self._streamed: dict[SimulatedJob, int] = {}

    def add_tokens(self, job: SimulatedJob, num: int, now_s: float) -> None:
        """Called with new tokens of a job, some of which may have come before."""
        new = job.num_tokens - self._streamed.get(job, 0)
        self.num_again += num - max(0, new)
        if new <= 0:
            return
        self._streamed[job] = job.num_tokens
        self.tokens[int(now_s)] += new
        if job.first_s is None:
            job.first_s = now_s
            self.ttft_s.append(now_s - job.arrived_s)
        if job.stalled_s is not None:
            self.gaps_s.append(now_s - job.stalled_s)
            job.stalled_s = None

    def add_end(self, job: SimulatedJob, now_s: float) -> None:
        """Called when a job has all its tokens."""
        assert job.first_s is not None
        self.num_ended += 1
        self.ended_s = now_s
        del self._streamed[job]
        self.request_s.append(now_s - job.arrived_s)
        self.token_s.append((now_s - job.first_s) / max(1, job.output - 1))

    def tokens_per_s(self, from_s: float, until_s: float) -> float:
        """Returns the rate of whole seconds."""
        first = math.ceil(from_s)
        last = max(math.ceil(from_s) + 1, math.floor(until_s))
        return sum(self.tokens.get(second, 0) for second in range(first, last)) / (last - first)


def _rank(found: Sequence[float], share: float) -> float:
    return found[max(0, math.ceil(share * len(found)) - 1)]
