"""What a stage does with its time: it computes, handles frames or waits. Owns the counts; reads no
clock, knows no hop.

A stage waits while it has nothing to do and its pipeline has a step in flight. Only the head knows
when that is: a plan tells how long the pipeline was idle before it, and that time counts for no
stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from shardline_scheduler.step_plan import StepPlan

NUM_KEPT = 2048
"""Steps that a stage remembers, a minute or more of work: 0.7 MiB."""


class StepTime(NamedTuple):
    """One step in one stage. Moments are of `monotonic_s`."""

    epoch: int
    step: int
    began_s: float
    """Its frame had come; on a head: scheduling began. Not before the step before had ended."""
    compute_began_s: float
    compute_s: float
    """From its launch, or the end of the computation before it, until the device had done its last
    operator."""
    ended_s: float
    """Its frame had left; on a head without later stages: its tokens were applied. On an
    accelerator that was given the next step by then: it was computed."""
    wait_s: float
    """Before it."""
    idle_s: float
    """Before it, without a step in flight anywhere."""
    hop_s: float
    """Frames decoded and sent; on a head also steps scheduled and results applied since its step
    before."""
    num_rows: int
    num_tokens: int
    num_context: int
    """Tokens of the KV to which the rows attend, their own included."""
    num_sampled: int


@dataclass(slots=True)
class EngineProgress:
    """What the engine has done in one epoch. The engine's thread writes it, others read it."""

    epoch: int
    num_steps: int = 0
    """Steps that this stage has computed."""
    num_tokens: int = 0
    """Their packed rows."""
    compute_s: float = 0.0
    hop_s: float = 0.0
    """Time spent decoding frames and sending them on; on a head also scheduling and applying
    results."""
    wait_s: float = 0.0
    """Time without work while the pipeline had a step in flight."""
    error: str | None = None
    _ended_s: float | None = None
    _computed_s: float = 0.0
    _worked_s: float = 0.0
    """Since then, between two steps."""

    @property
    def bubble_share(self) -> float:
        """The share of the pipeline's busy time in which this stage did not compute; 0 before its
        first step."""
        return bubble_share(self.compute_s, self.hop_s, self.wait_s)

    def work(self, seconds: float) -> None:
        """Counts what a head did between two steps: results applied."""
        self.hop_s += seconds
        self._worked_s += seconds

    def computing_s(self, began_s: float, computed_s: float) -> float:
        """Seconds of a step that the device was given and had computed then. One that it was given
        before it had done the last step counts from there."""
        return computed_s - max(began_s, self._computed_s)

    def finish(
        self,
        plan: StepPlan,
        began_s: float,
        compute_began_s: float,
        computed_s: float,
        ended_s: float,
    ) -> StepTime:
        """Counts a step after its frame has left. Of the time since the step before, what was
        neither work nor idle was a wait."""
        idle_s = plan.idle_us / 1e6
        began_s = began_s if self._ended_s is None else max(began_s, self._ended_s)
        compute_s = self.computing_s(compute_began_s, computed_s)
        compute_began_s = max(compute_began_s, self._computed_s)
        gap_s = 0.0 if self._ended_s is None else began_s - self._ended_s
        wait_s = max(0.0, gap_s - idle_s - self._worked_s)
        hop_s = ended_s - began_s - compute_s
        time = StepTime(
            epoch=self.epoch,
            step=plan.step,
            began_s=began_s,
            compute_began_s=compute_began_s,
            compute_s=compute_s,
            ended_s=ended_s,
            wait_s=wait_s,
            idle_s=idle_s,
            hop_s=hop_s + self._worked_s,
            num_rows=len(plan.rows),
            num_tokens=plan.num_tokens,
            num_context=sum(row.start + row.length for row in plan.rows),
            num_sampled=plan.num_wanting + plan.num_drafts,
        )
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        self.compute_s += compute_s
        self.hop_s += hop_s
        self.wait_s += wait_s
        self._ended_s = ended_s
        self._computed_s = computed_s
        self._worked_s = 0.0
        return time


@dataclass(slots=True)
class StepTimes:
    """The last steps of a stage, over all epochs. The engine's thread adds, others read."""

    _kept: list[StepTime] = field(default_factory=list)
    _next: int = 0

    def add(self, time: StepTime) -> None:
        """Forgets the oldest once NUM_KEPT are there."""
        if len(self._kept) < NUM_KEPT:
            self._kept.append(time)
        else:
            self._kept[self._next] = time
        self._next = (self._next + 1) % NUM_KEPT

    def last(self) -> list[StepTime]:
        """Returns them in the order of time. Safe from any thread."""
        return sorted(self._kept.copy(), key=lambda time: time.began_s)


def bubble_share(compute_s: float, hop_s: float, wait_s: float) -> float:
    """1 - compute / (compute + hop + wait); 0 where nothing was done."""
    active_s = compute_s + hop_s + wait_s
    return 1 - compute_s / active_s if active_s else 0.0
