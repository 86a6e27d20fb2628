"""A head on the virtual clock: the product's scheduler over a chain of stages with predicted times.

Its loop is the engine's: answers that have come are applied, the next step is cut and sent, and
while there is nothing to cut it waits. It loses its stages and gets others, or dies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from shardline_costs.drift import step_kind
from shardline_fleet.simulator.agenda import Agenda
from shardline_fleet.simulator.simulated_job import SimulatedJob
from shardline_fleet.simulator.stage_chain import StageChain
from shardline_scheduler.events import (
    Event,
    KvExceeded,
    NewTokens,
    SequenceCrashed,
    SequenceFailed,
    SequenceFinished,
)
from shardline_scheduler.scheduler import Scheduler
from shardline_scheduler.scheduler_config import SchedulerConfig
from shardline_scheduler.sequence import Key
from shardline_scheduler.step_plan import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCalls:
    """Whom a head tells."""

    tokens: Callable[[SimulatedJob, int], None]
    """A number of new ones of a job."""
    ended: Callable[[SimulatedJob], None]
    failed: Callable[[SimulatedJob], None]
    """It never ends here, for one since it needs more KV than the pipeline has."""
    given_back: Callable[[SimulatedJob], None]
    has_room: Callable[[SimulatedHead], None]
    """A seat has become free."""


class SimulatedHead:
    """One pipeline's head, and the jobs that it holds."""

    def __init__(
        self, agenda: Agenda, config: SchedulerConfig, calls: HeadCalls, heartbeat_s: float
    ) -> None:
        self._agenda = agenda
        self._calls = calls
        self._heartbeat_s = heartbeat_s
        self._scheduler = Scheduler(config)
        self.chain: StageChain | None = None
        """None while the pipeline forms."""
        self.lost_s: float | None = None
        """Since when it has lost its stages."""
        self._jobs: dict[Key, SimulatedJob] = {}
        self._answers: deque[tuple[float, StepResult]] = deque()
        self._free_s = 0.0
        """When it has computed its own part of the last step."""
        self._due_s: float | None = None
        self._beat_s = agenda.now_s
        self._is_alive = True
        agenda.after(heartbeat_s, self._beat)

    @property
    def has_seat(self) -> bool:
        """Whether it takes one more job."""
        return self.chain is not None and len(self._jobs) < self._scheduler.config.max_seats

    @property
    def beat_age_s(self) -> float:
        """Since its last heartbeat."""
        return self._agenda.now_s - self._beat_s

    def lead(
        self, chain: StageChain, num_blocks: int, num_lanes: int, after_s: float = 0.0
    ) -> None:
        """Begins a new epoch over these stages after `after_s` seconds."""
        assert self._is_alive
        self.chain = chain
        self.lost_s = None
        self._free_s = self._agenda.now_s + after_s
        self._take(self._scheduler.rebuild(num_blocks, num_lanes))
        self._wake()
        if self.has_seat:
            self._calls.has_room(self)

    def lose(self) -> None:
        """A stage is gone: steps in flight are lost, jobs wait with their tokens."""
        if self.chain is None:
            return
        self.chain = None
        self._due_s = None
        self.lost_s = self._agenda.now_s
        self._answers.clear()
        self._stall()
        self._take(self._scheduler.rebuild(self._scheduler.config.num_blocks))

    def give_back(self) -> list[SimulatedJob]:
        """All jobs, with all of their tokens saved: somebody else goes on with them."""
        jobs = list(self._jobs.values())
        for job in jobs:
            self._scheduler.abort(job.key)
            job.num_saved = job.num_tokens
            job.stalled_s = job.stalled_s if job.stalled_s is not None else self._agenda.now_s
        self._jobs.clear()
        return jobs

    def die(self) -> list[SimulatedJob]:
        """Returns what it held, with the tokens of the last heartbeat."""
        self.chain = None
        self._due_s = None
        self._is_alive = False
        self._stall()
        for job in self._jobs.values():
            job.is_suspect = job.num_saved == 0
        return list(self._jobs.values())

    def add(self, job: SimulatedJob) -> None:
        """Claims a job."""
        request = job.begin()
        self._jobs[job.key] = job
        self._take(self._scheduler.add(request, job))
        self._wake()

    def _wake(self) -> None:
        """The loop turns as soon as the head has computed its part of the last step."""
        self._turn_at(max(self._agenda.now_s, self._free_s))

    def _turn_at(self, due_s: float) -> None:
        if self.chain is not None and (self._due_s is None or due_s < self._due_s):
            self._due_s = due_s
            self._agenda.at(due_s, partial(self._turn_if_due, due_s))

    def _turn_if_due(self, due_s: float) -> None:
        """What was noted for another moment since, or before stages were lost, is of the past."""
        if self._due_s == due_s and self.chain is not None:
            self._due_s = None
            self._turn(self.chain)

    def _turn(self, chain: StageChain) -> None:
        now_s = self._agenda.now_s
        while self._answers and self._answers[0][0] <= now_s:
            self._take(self._scheduler.apply(self._answers.popleft()[1]))
        plan = self._scheduler.schedule()
        if plan is not None:
            result = StepResult(plan.step, ((0,),) * plan.num_wanting)
            answered_s = max(now_s, self._answers[-1][0] if self._answers else now_s)
            if plan.rows:
                self._free_s, answered_s = chain.send(now_s, step_kind(plan), len(plan.rows))
            self._answers.append((answered_s, result))
            self._turn_at(max(now_s, self._free_s))
        elif self._answers:
            self._turn_at(self._answers[0][0])

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, NewTokens):
                job = self._jobs[event.key]
                if job.is_suspect:
                    job.is_suspect = False
                    self._scheduler.release(job.key)
                self._calls.tokens(job, len(event.ids))
            elif isinstance(event, SequenceFinished):
                self._calls.ended(self._drop(event.key))
            elif isinstance(event, SequenceFailed | KvExceeded):
                self._calls.failed(self._drop(event.key))
            elif isinstance(event, SequenceCrashed):
                job = self._drop(event.key)
                job.num_saved = job.num_tokens
                self._calls.given_back(job)

    def _drop(self, key: Key) -> SimulatedJob:
        job = self._jobs.pop(key)
        if self.has_seat:
            self._calls.has_room(self)
        return job

    def _stall(self) -> None:
        for job in self._jobs.values():
            job.stalled_s = job.stalled_s if job.stalled_s is not None else self._agenda.now_s

    def _beat(self) -> None:
        """Saves tokens and renews leases, as one statement."""
        if not self._is_alive:
            return
        self._beat_s = self._agenda.now_s
        for job in self._jobs.values():
            job.num_saved = job.num_tokens
        self._agenda.after(self._heartbeat_s, self._beat)
