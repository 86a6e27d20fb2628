"""The queue of all heads: the job that came first goes to the head that has waited longest. Knows
no clock."""

from __future__ import annotations

from heapq import heappop, heappush

from shardline_fleet.simulator.simulated_head import SimulatedHead
from shardline_fleet.simulator.simulated_job import SimulatedJob


class JobLine:
    """Jobs that wait, or heads with a free seat that wait."""

    def __init__(self) -> None:
        self._jobs: list[tuple[float, int, SimulatedJob]] = []
        self._heads: dict[SimulatedHead, None] = {}
        """In the order in which they began to wait."""
        self._is_dealing = False

    @property
    def num_waiting(self) -> int:
        """Jobs without a head."""
        return len(self._jobs)

    def put(self, job: SimulatedJob) -> None:
        """A job that is to be computed, or computed further: it keeps its place before those that
        came later."""
        heappush(self._jobs, (job.arrived_s, job.number, job))
        self._deal()

    def open(self, head: SimulatedHead) -> None:
        """A head has a free seat."""
        self._heads.setdefault(head)
        self._deal()

    def _deal(self) -> None:
        if self._is_dealing:  # a job that ends as it is added opens a seat
            return
        self._is_dealing = True
        while self._jobs and self._heads:
            head = next(iter(self._heads))
            del self._heads[head]
            if head.has_seat:
                head.add(heappop(self._jobs)[2])
                if head.has_seat:
                    self._heads.setdefault(head)
        self._is_dealing = False
